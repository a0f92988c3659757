"""Copy a model with other weights, modules, functions or precision; a copy shares all other weights with the model.

Nobody may write to the weights of a copy.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ppo_repro.base.errors import is_out_of_memory

# how torch, transformers and Python refuse what cannot be computed
REFUSED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
PROBE = 4  # tokens that show whether a model computes


@torch.no_grad()
def probed(make: Callable[[], PreTrainedModel]) -> Tensor | None:
    """Return logits [1, PROBE, V] of some tokens; None if the model cannot be built or its forward fails."""
    try:
        made: Any = make()
        ids = torch.arange(PROBE, device=made.device)[None] % int(made.config.get_text_config().vocab_size)
        logits: Tensor = made(ids, use_cache=False).logits
    except REFUSED as error:
        if is_out_of_memory(error):
            raise
        return None
    return logits


def is_finite(make: Callable[[], PreTrainedModel]) -> bool:
    """Return whether a model can be built and gives finite logits."""
    logits = probed(make)
    return logits is not None and bool(logits.isfinite().all())


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


def with_parameters_in(model: PreTrainedModel, narrow: torch.dtype, last: torch.dtype) -> PreTrainedModel:
    """Copy the model with parameters rounded to a format of 16 bits, in the dtype `last`."""
    # parameters only: from_pretrained leaves rotary frequencies in float32
    memo: dict[int, Any] = {id(p): Parameter(p.detach().to(narrow).to(last), False) for p in model.parameters()}
    return copy.deepcopy(model, memo)


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


def rounded(x: Tensor) -> Tensor:
    """Return x rounded to bfloat16, in its own dtype."""
    return x.bfloat16().to(x.dtype)


class _Narrow(TorchFunctionMode):
    """Run matrix products in bfloat16 while the block runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        narrow = [x.bfloat16() if isinstance(x, Tensor) else x for x in (*args, *(kwargs or {}).values())]
        return func(*narrow).to(args[0].dtype)


def narrow_products(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a module with matrix products in bfloat16; a wrapper for `with_forward`."""
    with _Narrow():
        return forward(*args, **kwargs)
