"""Compute one part of a model in bfloat16, and everything else in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.architecture.copies import with_forward
from ppo_repro.testing.audit.causes.architecture.option import Option
from ppo_repro.testing.causes import CAUSES

ADVICE = CAUSES["reduced_precision"].mend


def rounded(x: Tensor) -> Tensor:
    """Return x rounded to bfloat16, in its own dtype."""
    return x.bfloat16().to(x.dtype)


def in_bfloat16(part: str, make: Callable[[], PreTrainedModel]) -> Option:
    """Return the option that computes a part of the model in bfloat16."""
    return Option(f"{part} computed in bfloat16, all else in float32", ADVICE, make, format="bfloat16")


def with_narrow_products(model: PreTrainedModel, names: Sequence[str]) -> PreTrainedModel:
    """Copy the model; some modules compute their matrix products in bfloat16."""
    return with_forward(model, names, _in_bfloat16)


class _Narrow(TorchFunctionMode):
    """Run matrix products in bfloat16 while the block runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        narrow = [x.bfloat16() if isinstance(x, Tensor) else x for x in (*args, *(kwargs or {}).values())]
        return func(*narrow).to(args[0].dtype)


def _in_bfloat16(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Narrow():
        return forward(*args, **kwargs)
