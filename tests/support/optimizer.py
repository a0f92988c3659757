"""A small linear model and the steps of an optimizer on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ppo_repro.numerics.layers.linear import ExactLinear
from ppo_repro.numerics.optim.adamw import AdamWSettings, ExactAdamW, exact_norm
from tests.support.kernels import values
from tests.support.models import seeded


def linear_model(seed: int = 0) -> ExactLinear:
    layer = nn.Linear(6, 4)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=seeded(seed + p.dim())))
    return ExactLinear(layer, "layer")


def backward_of(model: nn.Module, factor: float, calls: list[float] | None = None) -> Callable[[], None]:
    x = torch.randn(20, 6, generator=seeded(7))
    target = torch.randn(20, 4, generator=seeded(8))

    def backward() -> None:
        if calls is not None:
            calls.append(factor)
        y = model(x)
        torch.autograd.backward(y, (y.detach() - target) * factor)

    return backward


def steps(seed: int, size: int, kind: str, optimizer: AdamWSettings) -> list[Tensor]:
    """Weights and moments after three steps on random gradients, and their norms."""
    rng = np.random.default_rng(seed)
    model = nn.Linear(size, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(values(kind if rng.random() < 0.5 else "normal", (1, size), rng)))
    adamw, norms = ExactAdamW({"weight": model.weight}), []
    for _ in range(3):
        gradient = torch.from_numpy(values(kind, (1, size), rng))
        norms.append(exact_norm([gradient, model.weight.detach()]))
        adamw.apply(optimizer, {"weight": gradient}, norms[-1])
    return [model.weight, adamw.first["weight"], adamw.second["weight"], torch.tensor(norms, dtype=torch.float64)]
