"""Compute a model otherwise than its code and its weights say.

| function | what is other | until |
|---|---|---|
| `with_weights`, `with_parameters_in` | weights | in the copy |
| `with_modules` | whole modules | in the copy |
| `with_attributes` | numbers and tensors of modules | in the copy |
| `with_forward` | the forward of modules | in the copy |
| `with_function` | a function that a family's code calls by name, for all its models | while the copy's forward runs |
| `override` | a method of one object | the object ends |
| `patched` | an attribute of any object | the block ends |

A copy (`copied`) shares all weights with the model but the changed ones, so nobody may write to the weights of a copy.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

# copies of a model


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's parameters and saved buffers by name, without a copy."""
    return dict(model.state_dict(keep_vars=True))


def copied(model: PreTrainedModel, instead: Iterable[tuple[Tensor, Tensor]] = ()) -> PreTrainedModel:
    """Copy the modules of a model, but not its parameters; of a pair (own, other) the copy has the other tensor.

    deepcopy takes an object that its memo already has, by id, for the copy of that object.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    memo |= {id(own): other for own, other in instead}
    return copy.deepcopy(model, memo)


def with_weights(model: PreTrainedModel, change: Callable[[str, Tensor], Tensor | None]) -> PreTrainedModel:
    """Copy the model with change(name, weight) as weights; a weight for which that is None is shared."""
    changed = ((x, change(name, x.detach())) for name, x in weights(model).items())
    return copied(model, [(x, _of_kind(x, other)) for x, other in changed if other is not None])


def with_parameters_in(model: PreTrainedModel, narrow: torch.dtype, last: torch.dtype) -> PreTrainedModel:
    """Copy the model with parameters rounded to a format of 16 bits, in the dtype `last`."""
    # parameters only: from_pretrained leaves rotary frequencies in float32
    return copied(model, [(p, _of_kind(p, p.detach().to(narrow).to(last))) for p in model.parameters()])


def _of_kind(own: Tensor, other: Tensor) -> Tensor:
    """Return `other` as a parameter without gradient if `own` is a parameter, else a buffer, as it is."""
    return Parameter(other, False) if isinstance(own, Parameter) else other


def with_modules(model: PreTrainedModel, names: Sequence[str], make: Callable[[], Module]) -> PreTrainedModel:
    """Copy the model with a module of `make` in place of each named module."""
    found = copied(model)
    for name in names:
        found.set_submodule(name, make())
    return found


def with_attributes(model: PreTrainedModel, names: Sequence[str], change: Callable[[Any], Any]) -> PreTrainedModel:
    """Copy the model with change(value) as attributes of modules; a name is `path.of.module.attribute`."""
    found = copied(model)
    for name in names:
        path, _, key = name.rpartition(".")
        module = found.get_submodule(path)
        setattr(module, key, change(getattr(module, key)))
        module._non_persistent_buffers_set.discard(key)  # which float64 would compute again
    return found


def with_forward(model: PreTrainedModel, names: Sequence[str], forward: Callable[..., Any]) -> PreTrainedModel:
    """Copy the model with forward(own, module, *args) in the named modules; own(*args) is what a module computes.

    In float64 a new object of the same class replaces some modules. So the new forward belongs to a class: the forward
    of an object would be lost.
    """
    found = copied(model)
    for name in names:
        module = found.get_submodule(name)
        override(module, "forward", _around(type(module).forward, forward))
    return found


def _around(own: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    def method(module: Module, *args: Any, **kwargs: Any) -> Any:
        return forward(partial(own, module), module, *args, **kwargs)

    return method


def with_function(model: PreTrainedModel, name: str, change: Callable[[Any], Any]) -> PreTrainedModel:
    """Copy the model with change(function) in place of a function that the model's code calls by name."""
    found = copied(model)
    code: Any = sys.modules[type(found).__module__]
    other, forward = change(getattr(code, name)), found.forward
    found.config._attn_implementation = "eager"  # torch's fused attention repeats heads by itself

    @functools.wraps(forward)
    def forward_so(*args: Any, **kwargs: Any) -> Any:
        with patched(code, name, other):
            return forward(*args, **kwargs)

    found.forward = forward_so
    return found


# objects


def override(owner: object, name: str, method: Callable[..., Any]) -> None:
    """Give one object a method of its own."""
    kind: Any = type(owner)
    owner.__class__ = type(kind.__name__, (kind,), {name: method})


@contextmanager
def patched(owner: object, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute while the block runs."""
    own = vars(owner)
    is_own, before = name in own, own.get(name)  # else a class has it, or nothing
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class _NarrowProducts(TorchFunctionMode):
    """Run matrix products in bfloat16 while the block runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        narrow = [x.bfloat16() if isinstance(x, Tensor) else x for x in (*args, *(kwargs or {}).values())]
        return func(*narrow).to(args[0].dtype)


def with_narrow_products(own: Callable[..., Any], module: Module, *args: Any, **kwargs: Any) -> Any:
    """Compute a module with matrix products in bfloat16; a forward for `with_forward`."""
    with _NarrowProducts():
        return own(*args, **kwargs)
