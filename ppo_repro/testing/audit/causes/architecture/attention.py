"""Change rotary positions, and which heads of queries share a head of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.architecture.bfloat16 import ADVICE, in_bfloat16, rounded
from ppo_repro.testing.audit.causes.architecture.copies import copied, with_function, with_weights
from ppo_repro.testing.audit.causes.architecture.option import Option


def of_attention(model: PreTrainedModel) -> Iterator[Option]:
    """Yield changes of rotary positions and of heads."""
    rotary = [name for name, module in model.named_modules() if _frequencies(module)]
    if rotary:
        yield in_bfloat16("rotary table", lambda: _with_rotary(copied(model), rotary, _table_in_bfloat16))
        yield Option(
            "rotary frequencies rounded to bfloat16",
            ADVICE,
            lambda: _with_rotary(copied(model), rotary, _frequencies_in_bfloat16),
        )
        yield Option(
            "weights and rotary frequencies rounded to bfloat16",
            ADVICE,
            lambda: _with_rotary(with_weights(model, _in_bfloat16), rotary, _frequencies_in_bfloat16),
        )
    yield Option(
        "rotary positions in the other order of pairs",
        "rotate the same pairs on both sides: halves of a head, or neighbours",
        partial(with_function, model, "apply_rotary_pos_emb", _other_pairs),
    )
    yield Option(
        "queries with the keys of other heads",
        "let neighbouring heads of queries share a head of keys and values on both sides",
        partial(with_function, model, "repeat_kv", lambda repeat: lambda x, count: x.repeat(1, count, 1, 1)),
    )


def _frequencies(rotary: Module) -> list[str]:
    return [name for name in rotary._buffers if name.endswith("inv_freq")]


def _in_bfloat16(name: str, x: Tensor) -> Tensor | None:
    return rounded(x) if x.is_floating_point() else None


def _table_in_bfloat16(forward: Callable[..., tuple[Tensor, Tensor]], rotary: Module, *args: Any) -> tuple[Tensor, ...]:
    cos, sin = forward(rotary, *args)
    return rounded(cos), rounded(sin)


def _frequencies_in_bfloat16(forward: Callable[..., Any], rotary: Module, *args: Any) -> Any:
    for name in _frequencies(rotary):
        exact: Any = rotary._buffers[name]
        rotary._buffers[name] = rounded(exact)
    return forward(rotary, *args)


def _with_rotary(model: PreTrainedModel, names: Sequence[str], wrapper: Callable[..., Any]) -> PreTrainedModel:
    """Give the rotary modules of a copy a class with wrapper(forward, module, *args) as forward, and return the copy.

    In float64 a new object of the same class replaces each rotary module, so the forward of an object would be lost.
    """
    for name in names:
        module = model.get_submodule(name)
        kind: Any = type(module)

        def forward(self: Module, *args: Any, kind: Any = kind, **named: Any) -> Any:
            return wrapper(partial(kind.forward, **named), self, *args)

        module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def _other_pairs(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the rotation of neighbouring entries if `rotate` pairs the halves of a head, and the reverse."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        width, one = cos.shape[-1], torch.zeros_like(q)
        one[..., 0] = 1.0
        swapped, _ = rotate(one, k, torch.zeros_like(cos), torch.ones_like(sin), *args, **kwargs)
        is_halves = not bool(swapped[..., 1].any())
        order = torch.arange(width, device=q.device).view(*((-1, 2) if is_halves else (2, -1))).T.reshape(-1)
        there = torch.cat([order, torch.arange(width, q.shape[-1], device=q.device)])
        rotated = rotate(q[..., there], k[..., there], cos, sin, *args, **kwargs)
        return rotated[0][..., there.argsort()], rotated[1][..., there.argsort()]

    return turned
