"""The norms, and their results with gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.linear import ExactModule
from ppo_repro.numerics.layers.norms import ExactGemmaRMSNorm, ExactLayerNorm
from tests.support.models import seeded

NORMS = ("layer norm", "gemma")


def norm_of(kind: str, size: int, seed: int, parameters: str = "normal", eps: float = 1e-6) -> ExactModule:
    values = torch.randn(2, size, generator=seeded(seed))
    if parameters != "normal":
        values = values.sign() * 0.0 if parameters == "signed zeros" else torch.zeros(2, size)
    if kind == "gemma":
        return ExactGemmaRMSNorm(nn.Parameter(values[0].clone()), eps, "norm")
    source = nn.LayerNorm(size, eps)
    with torch.no_grad():
        source.weight.copy_(values[0])
        source.bias.copy_(values[1])
    return ExactLayerNorm(source, "norm")


def normed(norm: ExactModule, x: Tensor, upstream: Tensor, offset: int | None = 0) -> list[Tensor]:
    """Outputs with and without autograd, input gradient, integer sums, largest exponents; NumericsError."""
    accumulator = norm.accumulator
    leaf = x.detach().clone().requires_grad_()
    y = norm(leaf)
    with torch.no_grad():
        tensors = [y.detach(), norm(x)]
    if accumulator is not None:  # a first pass finds the grid
        accumulator.begin()
        accumulator.grids = {}
        torch.autograd.grad(y, leaf, upstream, retain_graph=True)
        if offset is not None:
            accumulator.grids = {name: e + offset for name, e in accumulator.largest.items()}
        accumulator.begin()
    tensors.append(torch.autograd.grad(y, leaf, upstream)[0])
    if accumulator is not None:
        tensors.append(torch.tensor([accumulator.largest.get(n, 1_000) for n in accumulator.parameters]))
        # beyond the grid the sums are not used: the step is redone
        if offset is not None and offset >= -4:
            tensors += [accumulator.sums[n] for n in accumulator.largest]
    return tensors


def trained(norm: ExactModule) -> ExactModule:
    norm.accumulator = GradientAccumulator(norm.named_parameters())
    return norm
