"""Add deliberate faults to the built-in sampler's logits: noise, and tokens that are preferred everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics.noise import normal_noise
from ppo_repro.sampling.built_in import LogitsHook

_EVERYWHERE = 2**32 - 1  # a position that no token has


def logits_fault(sigma: float | None, bias: float | None, seed: int) -> LogitsHook:
    """Return a hook that adds `disturbed`'s noise of size `sigma`, then the bias `biased` of size `bias` and `seed`."""

    def changed(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float) -> Tensor:
        if sigma is not None:
            logits = disturbed(logits, seeds, positions, temperature, sigma)
        return logits if bias is None else biased(logits, seed, temperature, bias)

    return changed


def disturbed(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float, sigma: float) -> Tensor:
    """Return logits [n, V] + temperature sigma z, rounded once, with z the `normal_noise` of the token's id.

    The sum imitates a sampler whose logits / temperature have an error of standard deviation sigma. To first
    order in sigma^2, KL(sampler || model) and KL(model || sampler) are both sigma^2 / 2 (1 - sum_v p_v^2) nats.
    """
    offsets = normal_noise(seeds, positions, logits.shape[-1], logits.device) * (temperature * sigma)
    return (logits.to(torch.float64) + offsets).to(torch.float32)


def biased(logits: Tensor, seed: int, temperature: float, size: float) -> Tensor:
    """Return logits [n, V] + temperature size z, rounded once. `size` is in nats of log-prob.

    z is one standard normal number for each token id. The sum imitates a sampler that prefers some tokens everywhere,
    for example because a row of its last matrix is wrong.
    """
    z = normal_noise(torch.tensor([seed]), torch.tensor([_EVERYWHERE]), logits.shape[-1], logits.device)
    return (logits.to(torch.float64) + z * (temperature * size)).to(torch.float32)
