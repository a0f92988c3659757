"""Temperatures and masks, and the statistics of tokens under them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ppo_repro.numerics.logprobs import score, token_statistics
from tests.support.kernels import values

TEMPERATURES = (1.0, 0.7, 2.5, 1e-3, 100.0)


MASKS = ("all", "some", "one", "but one")


def masked(mask: str, targets: Tensor, vocab_size: int, rng: np.random.Generator) -> Tensor | None:
    """Which tokens are eligible; each row's target always is."""
    if mask == "all":
        return None
    share = {"some": 0.4, "one": 0.0, "but one": 1.0}[mask]
    eligible = torch.from_numpy(rng.random((len(targets), vocab_size)) < share)
    if mask == "but one":
        eligible[:, int(rng.integers(vocab_size))] = False
    return eligible.scatter_(-1, targets[:, None], True)


def statistics(
    seed: int, n: int, v: int, kind: str, mask: str, temperature: float, strided: bool = False
) -> list[Tensor]:
    """All results for one random case: forward, backward, and the comparison with a reference."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(values(kind, (n, v), rng))
    moved = logits + torch.from_numpy(values("normal", (n, v), rng)) * float(rng.choice([0.0, 1e-3, 1.0]))
    if strided:
        logits, moved = logits.t().contiguous().t(), torch.stack([moved, moved], -1)[..., 0]
    targets = torch.from_numpy(rng.integers(0, v, n))
    eligible = masked(mask, targets, v, rng)
    gradients = tuple(torch.from_numpy(values("normal", (2, n), rng)) * float(rng.choice([0.0, 1.0])))
    leaf = logits.detach().requires_grad_()
    statistics = token_statistics(leaf, targets, temperature, eligible, "exact")
    torch.autograd.backward(statistics, gradients)
    assert leaf.grad is not None
    scores = score(logits, moved, targets, temperature, eligible, "exact")
    return [*statistics, leaf.grad, *vars(scores).values()]
