"""Copy a model with other weights, modules or functions; a copy shares all other weights with the model."""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names of weights or modules by kind, which is the name with * in place of the index of a layer."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(name)
    return found


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's parameters and saved buffers by name, without a copy."""
    return dict(model.state_dict(keep_vars=True))


def with_weights(model: PreTrainedModel, change: Callable[[str, Tensor], Tensor | None]) -> PreTrainedModel:
    """Copy the model with change(name, weight) as weights; a weight for which that is None is shared."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for name, x in weights(model).items():
        other = change(name, x.detach())
        if other is not None:
            memo[id(x)] = Parameter(other, False) if isinstance(x, Parameter) else other
    return copy.deepcopy(model, memo)


def copied(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the model; all weights are shared."""
    return with_weights(model, lambda name, x: None)


def with_modules(model: PreTrainedModel, names: Sequence[str], make: Callable[[], Module]) -> PreTrainedModel:
    """Copy the model with a module of `make` in each of these places."""
    found = copied(model)
    for name in names:
        found.set_submodule(name, make())
    return found


def with_forward(
    model: PreTrainedModel, names: Sequence[str], wrapper: Callable[..., Any], *first: Any
) -> PreTrainedModel:
    """Copy the model with wrapper(*first, forward, *args) as the forward of some modules."""
    found = copied(model)
    for name in names:
        module = found.get_submodule(name)
        module.forward = functools.partial(wrapper, *first, module.forward)
    return found


def with_function(model: PreTrainedModel, name: str, change: Callable[[Any], Any]) -> PreTrainedModel:
    """Copy the model with change(function) in place of a function that the model's code calls by name."""
    found = copied(model)
    code: Any = sys.modules[type(found).__module__]
    own, forward = getattr(code, name), found.forward
    other = change(own)
    found.config._attn_implementation = "eager"  # torch's fused attention repeats heads by itself

    @functools.wraps(forward)
    def forward_so(*args: Any, **kwargs: Any) -> Any:
        setattr(code, name, other)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(code, name, own)

    found.forward = forward_so
    return found
