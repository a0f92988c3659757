"""Which layer of a policy in exact numerics is farthest from the model in float64, each given the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.accuracy.scores import Float64, Text, policy_scores, stock_scores
from ppo_repro.accuracy.stock import stations, wide_model


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


@contextmanager
def _hooked(
    model: nn.Module, before: Callable[[str, Tensor], Tensor], after: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Show the first input and output of every station; `before` returns what it computes instead of the input."""

    def add(name: str, station: nn.Module) -> Sequence[Any]:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (before(name, args[0]), *args[1:])

        def leave(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
            after(name, _first(out).detach())

        return station.register_forward_pre_hook(enter), station.register_forward_hook(leave)

    handles = [handle for name, station in stations(model).items() for handle in add(name, station)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def layer_errors(policy: PreTrainedModel, text: Text) -> dict[str, float]:
    """|y - y64| / |y64| over all tokens of each station's outputs, given the model's own inputs in float64, rounded.

    So what earlier layers lost does not count. Every prompt of `text` is one token: each position is scored.
    """
    wide = wide_model(policy)
    distances = dict.fromkeys(stations(policy), 0.0)
    sizes = dict(distances)
    for prompt, response in zip(text.prompts, text.responses, strict=True):
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}

        def keep(name: str, x: Tensor, inputs: dict[str, Tensor] = inputs) -> Tensor:
            inputs[name] = x
            return x

        def exchange(name: str, x: Tensor, inputs: dict[str, Tensor] = inputs) -> Tensor:
            return inputs[name].to(x.dtype).reshape(x.shape)

        def compare(name: str, y: Tensor, outputs: dict[str, Tensor] = outputs) -> None:
            expected = outputs[name].reshape(y.shape)
            distances[name] += float((y.double() - expected).square().sum())
            sizes[name] += float(expected.square().sum())

        one = Text([prompt], [response])
        with _hooked(wide, keep, outputs.__setitem__), Float64():
            stock_scores(wide, one)
        with _hooked(policy, exchange, compare):  # with hooks the forward pass goes through the modules
            policy_scores(policy, one)
    return {name: math.sqrt(distances[name] / sizes[name]) if sizes[name] else 0.0 for name in distances}
