"""Exact attention: neither the order of the keys, nor invisible ones, nor the current length shows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ppo_repro.numerics.layers.attention import attend
from tests.support.in_order import sum_in_order
from tests.support.models import seeded, unequal

SCALING = 0.35


def exact(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return attend(q, k, v, visible, SCALING)


def stock(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=SCALING, enable_gqa=True)


def case(i: int, j: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [1, 4, i, 8], keys and values [1, 2, j, 8] of uneven sizes, each query with some visible keys."""
    generator = seeded(seed)
    q, k, v = (torch.randn(1, h, n, 8, generator=generator) * 2 for h, n in ((4, i), (2, j), (2, j)))
    v = v * 2.0 ** torch.randint(-10, 4, (1, 2, j, 1), generator=generator)
    visible = torch.rand(1, 1, i, j, generator=generator) < 0.8
    visible[..., 0] = True
    return q, k, v, visible


def gradients(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(exact(*leaves, visible), leaves, seed)


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 200), st.integers(0, 10**6))
def test_the_order_of_keys_and_of_queries_changes_no_bit(i: int, j: int, seed: int) -> None:
    q, k, v, visible = case(i, j, seed)
    keys, queries = torch.randperm(j, generator=seeded(seed)), torch.randperm(i, generator=seeded(seed))
    mixed = (q[:, :, queries], k[:, :, keys], v[:, :, keys], visible[:, :, queries][..., keys])
    assert unequal(exact(*mixed), exact(q, k, v, visible)[:, :, queries]) == 0
    upstream = torch.randn(1, 4, i, 8, generator=seeded(seed + 1))
    dq, dk, dv = gradients(q, k, v, visible, upstream)
    eq, ek, ev = gradients(*mixed, upstream[:, :, queries])
    assert unequal(eq + 0.0, dq[:, :, queries] + 0.0) == 0
    assert unequal(ek + 0.0, dk[:, :, keys] + 0.0) == 0
    assert unequal(ev + 0.0, dv[:, :, keys] + 0.0) == 0


def test_the_order_of_many_queries_changes_no_gradient_of_a_key() -> None:
    q, k, v, _ = case(4000, 4, 5)
    q, visible = q[:, :, :1].expand(1, 4, 4000, 8), torch.ones(1, 1, 4000, 4, dtype=torch.bool)
    # large terms that cancel and leave little: a sum that is not exact shows
    signs = torch.ones(4000, 1).index_fill_(0, torch.arange(2000), -1.0)
    upstream = signs + torch.randint(-1, 2, (1, 4, 4000, 8), generator=seeded(6)) * 2.0**-19
    _, dk, dv = gradients(q, k, v, visible, upstream)
    assert dk.any() and dv.abs().amax() < 1
    for seed in range(3):
        order = torch.randperm(4000, generator=seeded(seed))
        _, ek, ev = gradients(q, k, v, visible, upstream[:, :, order])
        assert unequal(ek, dk) == 0 and unequal(ev, dv) == 0


def in_order(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention whose sums over the keys are rounded key by key."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q[:, :, :, None] * k[:, :, None]).double().sum(-1).float() * SCALING
    weights = torch.exp(scores.double()).float() * visible
    return sum_in_order(weights[..., None] * v[:, :, None], 3) / sum_in_order(weights, 3)[..., None]


def test_attention_that_adds_in_order_changes_with_the_order_of_the_keys() -> None:
    """The negative control; its results are those of attention."""
    q, k, v, visible = case(6, 200, 0)
    keys = torch.randperm(200, generator=seeded(0))
    plain = in_order(q, k, v, visible)
    assert torch.allclose(plain, stock(q, k, v, visible), rtol=1e-4, atol=1e-4)  # sums of 200 float32 terms
    assert unequal(in_order(q, k[:, :, keys], v[:, :, keys], visible[..., keys]), plain) > 0


def test_keys_that_are_not_visible_change_no_bit() -> None:
    q, k, v, _ = case(5, 6000, 1)
    k[:, :, 40:] *= 100.0
    v[:, :, 40:] *= 1e4
    few = exact(q, k[:, :, :40], v[:, :, :40], torch.ones(1, 1, 5, 40, dtype=torch.bool))
    visible = torch.zeros(1, 1, 5, 6000, dtype=torch.bool)
    visible[..., :40] = True
    assert unequal(exact(q, k, v, visible), few) == 0
    for row in range(5):
        alone = exact(q[:, :, row : row + 1], k, v, visible[:, :, row : row + 1])
        assert unequal(alone, few[:, :, row : row + 1]) == 0


def test_values_and_gradients_are_those_of_float64() -> None:
    q, k, v, visible = case(6, 300, 2)
    upstream = torch.randn(1, 4, 6, 8, generator=seeded(3))
    upstream[:, :, ::2] = 0.0  # queries without a gradient must not hide the small ones of the others
    upstream *= 2.0**-40
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = stock(*leaves, visible)
    expected, reference = out.detach(), torch.autograd.grad(out, leaves, upstream.double())
    # scores of up to 30, rounded to float32: 1e-6 each, and with them the weights
    assert float((exact(q, k, v, visible) - expected).norm() / expected.norm()) < 3e-6
    for got, wanted in zip(gradients(q, k, v, visible, upstream), reference, strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 5e-6


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient() -> None:
    q, k, v, visible = case(3, 9, 4)
    visible[:, :, 1] = False
    out = exact(q, k, v, visible)
    assert not out[:, :, 1].any() and bool(torch.isfinite(out).all()) and out[:, :, 0].any()
    dq, dk, dv = gradients(q, k, v, visible, torch.ones(1, 4, 3, 8))
    assert not dq[:, :, 1].any() and all(bool(torch.isfinite(g).all()) for g in (dq, dk, dv))
