"""The unmodified transformers model with a policy's weights, and any model in float64.

In float64, everything is computed in float64, including norms, routers and rotary positions, which transformers
computes in float32 in every model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.numerics.families import attention_of


class _Widening(TorchFunctionMode):
    """Widen float32 tensors where a function takes them; the output matrix, which may be the largest, only once."""

    def __init__(self, head: Module | None) -> None:
        super().__init__()
        self.matrix = getattr(head, "weight", None)

    @cached_property
    def wide_matrix(self) -> Tensor:
        return cast(Tensor, self.matrix).double()

    def _wider(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if x is self.matrix:
                return self.wide_matrix
            return x.double() if x.dtype == torch.float32 else x
        if type(x) in (list, tuple):
            return type(x)(map(self._wider, x))
        return torch.float64 if x is torch.float32 else x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Tensor.double if func is Tensor.float else func
        if getattr(func, "__name__", "") in ("__get__", "__set__"):  # attributes are of the tensor itself
            return call(*args, **(kwargs or {}))
        if func is embedding:  # else the whole matrix would be widened for a few rows
            return self._wider(call(*args, **(kwargs or {})))
        result = call(*map(self._wider, args), **{name: self._wider(x) for name, x in (kwargs or {}).items()})
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            raise TypeError(f"{getattr(func, '__name__', func)} gave float32 inside a float64 model")
        return result


@contextmanager
def float64(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let `model` compute in float64 inside the block; float32 weights are widened when they are used.

    No weight is copied. Constants that transformers rounds to float32, for example rotary frequencies, are computed
    again. Raises TypeError if a float32 result still appears.
    """
    before, narrow = torch.get_default_dtype(), dict[str, Module]()
    experts = getattr(model.config, "_experts_implementation", None)
    torch.set_default_dtype(torch.float64)
    try:
        model.config._experts_implementation = "eager"  # grouped products take no float64
        with _Widening(model.get_output_embeddings()):
            for name, module in list(model.named_modules()):
                if name and _constants(module):
                    narrow[name] = module
                    model.set_submodule(name, _computed_again(model, module, torch.float64, model.device))
            yield model
    finally:
        for name, module in narrow.items():
            model.set_submodule(name, module)
        model.config._experts_implementation = experts
        torch.set_default_dtype(before)


def stock_model(policy: PreTrainedModel) -> PreTrainedModel:
    """Return the unmodified model with the weights of `policy`. They share memory, so no code may write to them."""
    config = copy.deepcopy(policy.config)
    config._attn_implementation = attention_of(config)
    config._experts_implementation = "eager"
    config.pad_token_id = None  # a prompt may hold it, of which transformers would warn
    return with_config(policy, config)


def with_config(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of another configuration that shares the weights of `model`.

    Weights that the configuration lacks are left out. Raises RuntimeError if it needs other weights or other shapes.
    """
    with torch.device("meta"):
        model_copy = type(model)(config)
    wanted, state = model_copy.state_dict().keys(), model.state_dict()
    model_copy.load_state_dict({name: x for name, x in state.items() if name in wanted}, assign=True)
    for name, module in list(model_copy.named_modules()):
        if name and _constants(module):
            model_copy.set_submodule(name, _computed_again(model_copy, module, torch.float32, model.device))
    return model_copy.eval()


def _constants(module: Module) -> list[str]:
    """Return the names of buffers with floating-point constants, which no state dict contains."""
    kept = module._non_persistent_buffers_set
    return [n for n, x in module._buffers.items() if n in kept and x is not None and x.is_floating_point()]


def _computed_again(model: PreTrainedModel, module: Module, dtype: torch.dtype, device: torch.device) -> Module:
    """Return a module with the same weights, whose constants are computed as transformers does after loading."""
    if type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "config"):
        kind: Any = type(module)  # some also remember the longest sequence
        fresh: Module = kind(module.config).to(device)
        return fresh
    memo: dict[int, Any] = {id(p): Parameter(p.detach().to("meta"), False) for p in module.parameters()}
    module_copy = copy.deepcopy(module, memo | {id(model.config): model.config})  # without memory for weights
    for name in _constants(module):
        old = module._buffers[name]
        assert old is not None
        module_copy._buffers[name] = torch.empty(old.shape, dtype=dtype, device=device)
    model._init_weights(module_copy)
    module_copy._parameters, module_copy._modules = module._parameters, module._modules
    return module_copy
