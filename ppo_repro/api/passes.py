"""Check a deterministic model before each pass, and each backward pass before it adds to a gradient.

Each pass packs the weights again, so it sees every change, also through `.data`, NumPy or another library.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.api.gradients import RunningSums
from ppo_repro.base.errors import UserError
from ppo_repro.numerics import library
from ppo_repro.numerics.lowering import Numbers, check_parts, numbers_of, require_numbers, shapes_of
from ppo_repro.numerics.network import forget_packed

AGAIN = "make a new model with ppo_repro.deterministic"
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# fields of a config that no pass reads: names, labels, initialisation of weights, a cache that `forward` refuses
_UNREAD = """
    _attn_implementation_internal _commit_hash _experts_implementation_internal _name_or_path architectures dtype
    id2label initializer_range label2id problem_type tie_word_embeddings transformers_version use_cache
    bos_token_id eos_token_id pad_token_id
"""
Modules = dict[str, type[nn.Module]]
Settings = dict[str, Any]


def settings_of(config: PretrainedConfig) -> Settings:
    """Return a copy of the fields of a config that a pass may depend on."""
    fields = {"loss_type": None, **vars(config)}
    return copy.deepcopy({name: value for name, value in fields.items() if name not in _UNREAD.split()})


def modules_of(model: nn.Module) -> Modules:
    """Return the class of each module by name."""
    return {name: type(module) for name, module in model.named_modules()}


class Passes:
    """State of one deterministic model between passes: its modules, shapes, config, trained weights, gradient sums."""

    def __init__(self, modules: Modules, numbers: Numbers, shapes: dict[str, torch.Size], settings: Settings) -> None:
        self._modules, self._numbers, self._shapes, self._settings = modules, numbers, shapes, settings
        self._trained: dict[str, nn.Parameter] = {}
        self._device: torch.device | None = None  # device of the sums
        self._sums: RunningSums | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and save no sums: the copy of a model has other gradients."""
        return Passes, (self._modules, self._numbers, self._shapes, self._settings)

    @property
    def sums(self) -> RunningSums | None:
        """Return what receives the gradients of the pass that has begun."""
        return self._sums

    def edge(self) -> Tensor | None:
        """Return the edge of a pass with gradients, whose node is an `Ends`; None if nothing is trained."""
        return Ends.apply(*self._trained.values()) if self._trained else None

    def begin(self, model: PreTrainedModel) -> None:
        """Check the model before a pass and forget its packed weights.

        Raises UserError if the kernels cannot compute it.
        """
        _check_process(model.device)
        self._check_modules(model)
        _check_weights(model)
        _check_hooks(model)
        if shapes_of(model) != self._shapes:  # another vocabulary, for example
            check_parts(model)
            self._shapes, self._trained = shapes_of(model), {}
            self._numbers = numbers_of(model)
            self._settings = {**self._settings, "vocab_size": model.config.vocab_size}
        self._check_settings(model.config)
        require_numbers(model, self._numbers)
        forget_packed(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        same = self._trained.keys() == trained.keys() and all(p is self._trained[n] for n, p in trained.items())
        if not same or self._device != model.device:
            self._trained, self._device = trained, model.device
            self._sums = RunningSums(model.named_parameters())

    def _check_settings(self, config: PretrainedConfig) -> None:
        for name, before in self._settings.items():
            now = getattr(config, name, None)
            if now != before:
                raise UserError(
                    f"deterministic model: config.{name} = {now!r:.60}, was {before!r:.60}: no pass sees the change; "
                    f"set it back, or {AGAIN}"
                )

    def _check_modules(self, model: PreTrainedModel) -> None:
        modules = modules_of(model)
        if modules != self._modules:
            name = next(n for n in [*modules, *self._modules] if modules.get(n) is not self._modules.get(n))
            raise UserError(f"deterministic model: module '{name}' was added, removed or replaced; {AGAIN}")
        if "_loss_function" in vars(model):
            raise UserError(
                "deterministic model: it has a loss function of its own, which would not be called; remove it"
            )
        for name, module in model.named_modules():
            if module is not model and ("forward" in vars(module) or _has_hook(module)):
                raise UserError(
                    f"deterministic model: module '{name}' has a hook or a forward of its own, which would not be "
                    "called; remove it"
                )


def new_passes(model: PreTrainedModel) -> Passes:
    """Return the state of a deterministic model before its first pass."""
    return Passes(modules_of(model), numbers_of(model), shapes_of(model), settings_of(model.config))


def _has_hook(module: nn.Module) -> bool:
    hooks = (hook for kind in _MODULE_HOOKS for hook in getattr(module, kind).values())
    # with gradient checkpointing transformers puts a hook on the embeddings, which only asks for gradients
    return any(getattr(hook, "__module__", None) != PreTrainedModel.__module__ for hook in hooks)


def _check_weights(model: PreTrainedModel) -> None:
    for name, p in model.named_parameters():
        if p.dtype != torch.float32 or p.device.type not in ("cpu", "cuda") or not p.is_contiguous():
            raise UserError(
                f"model parameter '{name}' is {p.dtype} on {p.device}; deterministic numerics need contiguous float32 "
                "on the CPU or an NVIDIA GPU"
            )
        if p.requires_grad and not p.is_leaf:
            raise UserError(
                f"model parameter '{name}' is computed from other tensors, which get no gradient; give a parameter"
            )


def _check_hooks(model: PreTrainedModel) -> None:
    for name, p in model.named_parameters():
        if any(getattr(p, hooks, None) for hooks in _WEIGHT_HOOKS):
            raise UserError(f"model parameter '{name}' has a hook, which would not be called; remove it")


def _check_process(device: torch.device) -> None:
    """Raise UserError for a setting of torch that changes what a stock model computes."""
    library.check_denormals()
    fresh = torch.empty(0)
    if fresh.dtype != torch.float32 or fresh.device.type != "cpu":
        raise UserError(
            f"deterministic model: torch's default is {fresh.dtype} on {fresh.device}; must be torch.float32 on cpu"
        )
    if torch.is_autocast_enabled(device.type):
        raise UserError("deterministic model: autocast has no effect, passes compute in float32; leave out bf16, fp16")
    if _has_any_global_hook():
        raise UserError("deterministic model: a global hook of modules would not be called; remove it")


class Ends(Function):
    """Function whose node runs after the backward pass of a model, and leads to the trained parameters.

    Hooks that autograd calls at a parameter then see its whole `.grad`.
    """

    @staticmethod
    def forward(ctx: Any, *trained: nn.Parameter) -> Tensor:
        ctx.count = len(trained)
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.count


def _state_of(model: PreTrainedModel) -> list[tuple[int, bool, int]]:
    """Return what a backward pass needs unchanged of each parameter. The last number counts writes that torch sees."""
    return [(id(p), p.requires_grad, p._version) for p in model.parameters()]


class Watched(Function):
    """Function for the logits of a pass.

    Its backward raises RuntimeError if a weight has changed, if it runs twice, or if it is asked for more or less than
    all gradients.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, model: PreTrainedModel, ends: Any) -> Tensor:
        ctx.model, ctx.state, ctx.ends, ctx.is_done = model, _state_of(model), ends, False
        ctx.mark_dirty(logits)  # no view: the caller may change the logits in place, as those of a stock model
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.is_done:
            raise RuntimeError("a second backward through one pass; run the forward pass again")
        if ctx.state != _state_of(ctx.model):
            raise RuntimeError(
                "a weight was changed between the forward pass and its backward: written, replaced, frozen or unfrozen;"
                " run the forward again"
            )
        _check_hooks(ctx.model)
        if torch.is_grad_enabled():
            raise RuntimeError("a deterministic model has no second derivatives; call backward() without create_graph")
        if not all(map(_is_wanted, ctx.ends.next_functions)):
            raise RuntimeError("a deterministic model computes all gradients at once; call backward() without inputs=")
        ctx.is_done = True
        return grad, None, None


def _is_wanted(edge: tuple[Any, int]) -> bool:
    """Return whether the backward pass that runs now reaches the end of an edge."""
    try:
        return torch._C._will_engine_execute_node(edge[0])
    except RuntimeError:  # torch.autograd.grad
        return False
