"""Routes of tokens through mixtures of experts: which experts computed them, layer by layer, seen or given.

A route is one row of M k expert indices: for each of the M layers with a mixture, in order, its k experts by rising
index.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ppo_repro.numerics.layers.experts import ExactRouter
from ppo_repro.numerics.layers.families import ROUTERS, decoder_layers, modules_of


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a model in the order of its layers, exact or stock; empty for a dense model."""
    return [m for m in modules_of(model) if isinstance(m, ExactRouter) or type(m) in ROUTERS]


def mixture_layers(model: nn.Module) -> list[int]:
    """Which of the decoder layers of a model have a router, by rising index; empty for a dense model."""
    return [index for index, layer in enumerate(decoder_layers(model)) if routers(layer)]


class SeenRoutes:
    """The routes of the tokens of forward passes, sorted: stock routers give experts by falling weight."""

    def __init__(self) -> None:
        self._by_layer: list[Tensor] = []

    def add(self, experts: Tensor) -> None:
        """What one router chose, [T, k]."""
        self._by_layer.append(experts.sort(-1).values.to(torch.int32).cpu())

    def take(self) -> Tensor:
        """The routes of the last forward pass, [T, M k] int32, in the order of its tokens; forgotten with that."""
        found, self._by_layer = torch.cat(self._by_layer, -1), []
        return found


@contextmanager
def seen_routes(model: nn.Module) -> Iterator[SeenRoutes]:
    """Look at the routers of a model while it computes."""
    seen = SeenRoutes()

    def look(_: nn.Module, __: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        seen.add(out[2])

    handles: list[RemovableHandle] = [router.register_forward_hook(look) for router in routers(model)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def give_routes(model: nn.Module, routes: Tensor | None) -> None:
    """Let tokens [T] take `routes` [T, M k] in the next forward passes of an exact model; None: let routers choose.

    ValueError for routes of another width than the model has.
    """
    exact = [router for router in routers(model) if isinstance(router, ExactRouter)]
    if routes is not None and routes.shape[1] != sum(router.top_k for router in exact):
        raise ValueError(f"routes of {routes.shape[1]} experts for a model of {sum(r.top_k for r in exact)}")
    start = 0
    for router in exact:
        router.given = None if routes is None else routes[:, start : start + router.top_k].to(torch.int64)
        start += router.top_k
