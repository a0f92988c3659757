"""The gates of GELU, and their results with gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo_repro.numerics.arithmetic.gates import Gate, normal_cdf, quick_gate, tanh_gate
from ppo_repro.numerics.layers.activations import Gated, gated

GATES = {"erf": normal_cdf, "tanh": tanh_gate, "quick": quick_gate}


def results(gate: Gate, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Values with and without autograd, and the gradient. All NaNs are made equal: their bits are not specified."""
    leaf = x.detach().requires_grad_()
    y = Gated.apply(leaf, gate)
    tensors = [y.detach(), gated(x.detach(), gate), torch.autograd.grad(y, leaf, upstream)[0]]
    return [torch.where(r.isnan(), math.nan, r) for r in tensors]
