"""Exact attention: neither the order of the keys, nor invisible ones, nor the current length shows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ppo_repro.numerics.layers.attention import attend
from tests.support.in_order import sum_in_order
from tests.support.models import seeded, unequal
from tests.support.number_formats import nearest

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


def test_rounded_weights_by_hand() -> None:
    q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0], [0.0, -1.0], [0.0, 1.0]))
    visible = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    # weights 1 and e^-1 = 0.3678794, in bfloat16 0.3671875 = 188 / 512; their sum is 1 + e^-1 with rounding and without
    total = 1 + math.exp(-1)
    out = {form: float(attend(q, k, v, visible, 1.0, form)) for form in (None, "bfloat16")}
    assert out["bfloat16"] == pytest.approx(188 / 512 / total, rel=1e-7)
    assert out[None] == pytest.approx(math.exp(-1) / total, rel=1e-7)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dq, dk, dv = torch.autograd.grad(attend(*leaves, visible, 1.0, "bfloat16").sum(), leaves)
    assert dv.flatten().tolist() == pytest.approx([1 / total, 188 / 512 / total], rel=1e-7)
    # through the rounding: w (v - out) of each score, times the key or the query
    scores = [w * (value - out["bfloat16"]) for w, value in ((1 / total, 0.0), (math.exp(-1) / total, 1.0))]
    assert dk.flatten().tolist() == pytest.approx(scores, rel=1e-6)
    assert float(dq) == pytest.approx(-scores[1], rel=1e-6)


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 60), st.sampled_from(["bfloat16", "float16"]), st.integers(0, 10**6))
def test_rounded_weights_are_those_of_a_slow_definition_and_know_no_order(i: int, j: int, form: str, seed: int) -> None:
    q, k, v, visible = case(i, j, seed)
    found = attend(q, k, v, visible, SCALING, form)
    keys = torch.randperm(j, generator=seeded(seed))
    assert unequal(attend(q, k[:, :, keys], v[:, :, keys], visible[..., keys], SCALING, form), found) == 0
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), k.double().repeat_interleave(2, 1)) * SCALING
    masses = (scores.masked_fill(~visible, -math.inf) - scores.masked_fill(~visible, -math.inf).amax(-1, True)).exp()
    meeting = torch.from_numpy(nearest(masses.numpy(), form))
    values = v.double().repeat_interleave(2, 1)
    slow = torch.einsum("bhij,bhjd->bhid", meeting, values) / masses.sum(-1, keepdim=True)
    # float32 moves a weight across a boundary now and then: by one spacing, 2^-8 or 2^-11 of it, of one value
    step = 2.0 ** (-8 if form == "bfloat16" else -11)
    distance = (found.double() - slow).abs() / values.abs().amax()
    assert float(distance.max()) < step and float(distance.median()) < 1e-6


def test_rounded_weights_are_other_numbers() -> None:
    q, k, v, visible = case(4, 50, 1)
    exact_out, rounded_out = (attend(q, k, v, visible, SCALING, form) for form in (None, "bfloat16"))
    assert unequal(exact_out, rounded_out) > 0.9 * exact_out.numel()
