"""The clipped value loss: by definition in rationals, and where rounding could look like clipping."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.ppo.losses import value_losses
from tests.support.float32 import finite, tensor

eighths = st.integers(-32, 32).map(lambda n: n / 8)


def computed(rows: list[tuple[float, float, float]], clip_range: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, where the clip decides, and gradients of (new, old, return)."""
    new, old, returns = (tensor(list(column)) for column in zip(*rows, strict=True))
    new.requires_grad_()
    losses, clipped = value_losses(new, old, returns, clip_range)
    return losses.detach(), clipped, torch.autograd.grad(losses, new, torch.ones_like(losses))[0]


@given(st.lists(st.tuples(eighths, eighths, eighths), min_size=1, max_size=20), st.sampled_from([0.25, 2.0]))
def test_the_loss_is_its_definition_exactly(rows: list[tuple[float, float, float]], clip_range: float) -> None:
    losses, clipped, slopes = computed(rows, clip_range)
    for i, row in enumerate(rows):
        v, v_old, target = map(Fraction, row)
        bound = Fraction(clip_range)
        plain = (v - target) ** 2
        limited = (v_old + max(-bound, min(bound, v - v_old)) - target) ** 2
        assert Fraction(losses[i].item()) == max(plain, limited) / 2
        assert Fraction(slopes[i].item()) == (0 if limited > plain else v - target)
        assert clipped[i].item() == (limited > plain)


@given(st.lists(st.tuples(finite(-4, 4), finite(-4, 4), finite(-4, 4)), min_size=1, max_size=30))
def test_a_step_within_the_range_is_never_clipped(rows: list[tuple[float, float, float]]) -> None:
    """Although old + (new - old) is often rounded to another number than new."""
    assert not computed([*rows, (0.1, 8.3, -1.0)], 10.0)[1].any()
    assert tensor([8.3]) + (tensor([0.1]) - tensor([8.3])) > tensor([0.1])
