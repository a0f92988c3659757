"""Check a deterministic model around each pass, and add its gradients to `.grad`.

Each pass packs the weights again, so it sees every change, also through `.data`, NumPy or another library. Gradients go
to the `grad` of parameters. A gradient is one chain of additions over all sequences since `zero_grad`. So a batch of
eight sequences and eight batches of one give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.numerics import library
from ppo_repro.numerics.gradient_sums import GradientSums, Slots, SlotSums
from ppo_repro.numerics.interface import Struct
from ppo_repro.numerics.lowering import check_parts, shapes_of
from ppo_repro.numerics.network import forget_packed

AGAIN = "make a new model with ppo_repro.deterministic"
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
Modules = dict[str, type[nn.Module]]


def modules_of(model: nn.Module) -> Modules:
    """Return the class of each module by name."""
    return {name: type(module) for name, module in model.named_modules()}


class Passes:
    """State of one deterministic model between passes: its modules, shapes, trained weights and gradient sums."""

    def __init__(self, modules: Modules, shapes: dict[str, torch.Size]) -> None:
        self._modules, self._shapes = modules, shapes
        self._trained: dict[str, nn.Parameter] = {}
        self._device: torch.device | None = None  # device of the sums
        self._sums: RunningSums | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        return Passes(self._modules, self._shapes)

    def begin(self, model: PreTrainedModel) -> None:
        """Check the model before a pass and forget its packed weights.

        Raises UserError if the kernels cannot compute it.
        """
        self._check_modules(model)
        _check_weights(model)
        if shapes_of(model) != self._shapes:  # another vocabulary, for example
            check_parts(model)
            self._shapes = shapes_of(model)
        library.check_denormals()
        forget_packed(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        same = self._trained.keys() == trained.keys() and all(p is self._trained[n] for n, p in trained.items())
        if not same or self._device != model.device:
            self._trained, self._device = trained, model.device
            self._sums = RunningSums(model.named_parameters())

    def _check_modules(self, model: PreTrainedModel) -> None:
        found = modules_of(model)
        if found != self._modules:
            name = next(n for n in [*found, *self._modules] if found.get(n) is not self._modules.get(n))
            raise UserError(f"deterministic model: module '{name}' was added, removed or replaced; {AGAIN}")
        for name, module in model.named_modules():
            if module is not model and ("forward" in vars(module) or _has_hook(module)):
                raise UserError(
                    f"deterministic model: module '{name}' has a hook or a forward of its own, which would not be "
                    "called; remove it"
                )


def _has_hook(module: nn.Module) -> bool:
    hooks = (hook for kind in _MODULE_HOOKS for hook in getattr(module, kind).values())
    # with gradient checkpointing transformers puts a hook on the embeddings, which only asks for gradients
    return any(getattr(hook, "__module__", None) != PreTrainedModel.__module__ for hook in hooks)


def _check_weights(model: PreTrainedModel) -> None:
    for name, p in model.named_parameters():
        if p.dtype != torch.float32 or p.device.type not in ("cpu", "cuda") or not p.is_contiguous():
            raise UserError(
                f"model parameter '{name}' is {p.dtype} on {p.device}; deterministic numerics need contiguous float32 "
                "on the CPU or a CUDA card"
            )
        if any(getattr(p, hooks, None) for hooks in _WEIGHT_HOOKS):
            raise UserError(f"model parameter '{name}' has a hook, which would not be called; remove it")


def _versions(model: PreTrainedModel) -> list[int]:
    """Return the number of changes in place of each parameter, as torch counts them."""
    return [p._version for p in model.parameters()]


class Watched(Function):
    """Function for the logits of a pass.

    Its backward raises RuntimeError if a weight has changed, or if it runs twice.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, model: PreTrainedModel) -> Tensor:
        ctx.model, ctx.versions, ctx.is_done = model, _versions(model), False
        ctx.mark_dirty(logits)  # no view: the caller may change the logits in place, as those of a stock model
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.is_done:
            raise RuntimeError("a second backward through one pass; run the forward pass again")
        if ctx.versions != _versions(ctx.model):
            raise RuntimeError("a weight was changed between the forward pass and its backward; run the forward again")
        ctx.is_done = True
        return grad, None


class RunningSums(GradientSums):
    """Gradient sums that start from the `grad` of each parameter and replace this `grad` after each backward pass."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(parameters, slots=1)
        self._users: dict[int, list[SlotSums]] = {id(p): [] for p in self.trained.values()}
        self._published: dict[int, tuple[Tensor, int]] = {}  # the tensor that `grad` was set to, and its version

    def make_sums(self, parameters: Sequence[Tensor]) -> SlotSums:
        use = _RunningUse(parameters, self)
        for p in use.parameters:
            self._users[id(p)].append(use)
        return use

    def go_on(self, use: SlotSums) -> None:
        """Start the sums of all uses from `grad`, which may be None after `zero_grad`, or a tensor of the caller."""
        for p in use.parameters:
            if p.grad is None:
                self._published.pop(id(p), None)
        only_here = [p for p in use.parameters if len(self._users[id(p)]) == 1] or use.parameters
        if all(p.grad is None for p in only_here):
            use.release()  # the caller may still use the earlier gradients
        for p in use.parameters:
            grad, (published, version) = p.grad, self._published.get(id(p), (None, 0))
            if grad is None:
                for each in self._users[id(p)]:
                    each.view(p).zero_()
            elif grad is not published or grad._version != version:
                value = grad.clone()
                for each in self._users[id(p)]:
                    each.view(p).zero_()
                use.view(p).copy_(value)

    def publish(self, use: SlotSums) -> None:
        """Set `grad` to the sum over all uses; with one use, `grad` shares the memory of the sum."""
        for p in use.parameters:
            first, *others = (each.view(p) for each in self._users[id(p)])
            published = self._published.get(id(p), (None, 0))[0]
            if others or published is None or published.data_ptr() != first.data_ptr():
                for other in others:
                    first = first + other
                published = first
            p.grad = published
            self._published[id(p)] = published, published._version


class _RunningUse(SlotSums):
    def __init__(self, parameters: Sequence[Tensor], owner: RunningSums) -> None:
        self._owner = owner
        super().__init__(parameters, slots=1)

    def begin(self) -> None:
        self._slot, self._is_open = 0, True

    @contextmanager
    def adding(self, slots: Slots) -> Iterator[Struct]:
        if any(slots):
            raise ValueError(f"slots {list(slots)}; running sums have one slot, which stays open")
        with torch.no_grad():
            self._owner.go_on(self)
            with super().adding(slots) as sums:
                yield sums
            self._owner.publish(self)
