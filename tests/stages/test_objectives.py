"""Dual clip, clip-higher, the unclipped, penalised and plain policy-gradient objectives: by hand and by definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.ppo.losses import (
    Band,
    anchor_penalty,
    clip_flags,
    clipped_surrogate,
    flag_names,
    policy_gradient,
    probability_ratios,
    removes_gradient,
    unclipped_surrogate,
)
from tests.support.float32 import bits, finite, tensor

BAND = Band(0.25, 0.5, 3.0)
ratio_values = st.one_of(st.sampled_from([0.0, 0.75, 1.0, 1.5, 3.0]), finite(0.0, 8.0))
tokens = st.lists(st.tuples(ratio_values, finite(-100.0, 100.0)), min_size=1, max_size=30)


def columns(rows: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    return tensor([r for r, _ in rows]), tensor([a for _, a in rows])


def slope(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x, torch.ones_like(loss))[0]


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "flag"),
    [  # the band is [0.75, 1.5], the dual clip 3
        (2.0, 1.375, -2.75, -2.0, "none"),  # above 1 + low, below 1 + high: clip-higher lets it rise
        (2.0, 1.5, -3.0, -2.0, "none"),
        (2.0, 2.0, -3.0, 0.0, "clip_high"),
        (2.0, 64.0, -3.0, 0.0, "clip_high"),  # dual clip is for negative advantages
        (2.0, 0.5, -1.0, -2.0, "wrong_low"),
        (-2.0, 0.5, 1.5, 0.0, "clip_low"),
        (-2.0, 2.0, 4.0, 2.0, "wrong_high"),
        (-2.0, 3.0, 6.0, 2.0, "wrong_high"),
        (-2.0, 4.0, 6.0, 0.0, "clip_dual"),  # the loss stops at -c A
        (-2.0, 64.0, 6.0, 0.0, "clip_dual"),
        (0.0, 64.0, 0.0, 0.0, "none"),
    ],
)
def test_the_dual_clip_by_hand(advantage: float, ratio: float, loss: float, gradient: float, flag: str) -> None:
    r, a = tensor([ratio]).requires_grad_(), tensor([advantage])
    found = clipped_surrogate(r, a, BAND)
    assert (found.item(), slope(found, r).item()) == (loss, gradient)
    assert flag_names(clip_flags(r.detach(), a, BAND)) == [flag]


@given(tokens)
def test_the_dual_clip_is_its_definition(rows: list[tuple[float, float]]) -> None:
    r, a = columns(rows)
    ratios, advantages = r.numpy(), a.numpy()
    lower = np.minimum(ratios * advantages, np.clip(ratios, np.float32(0.75), np.float32(1.5)) * advantages)
    expected = -np.where(advantages < 0, np.maximum(lower, np.float32(3.0) * advantages), lower)
    leaf = r.clone().requires_grad_()
    found = clipped_surrogate(leaf, a, BAND)
    assert found.tolist() == expected.tolist()
    removed = removes_gradient(clip_flags(r, a, BAND))
    assert slope(found, leaf).tolist() == torch.where(removed, torch.zeros_like(a), -a).tolist()


@given(tokens)
def test_a_symmetric_band_without_dual_clip_is_the_plain_clip(rows: list[tuple[float, float]]) -> None:
    r, a = columns(rows)
    far = Band(0.2, 0.2, 1e30)
    assert bits(clipped_surrogate(r, a, far)) == bits(clipped_surrogate(r, a, Band(0.2, 0.2)))
    assert torch.equal(clip_flags(r, a, far), clip_flags(r, a, Band(0.2, 0.2)))


@given(tokens)
def test_without_a_band_every_token_keeps_its_gradient(rows: list[tuple[float, float]]) -> None:
    r, a = columns(rows)
    r.requires_grad_()
    loss = unclipped_surrogate(r, a)
    assert loss.tolist() == [-(x * y) for x, y in zip(r.detach().numpy(), a.numpy(), strict=True)]
    assert bits(slope(loss, r)) == bits(-a)


def test_the_policy_gradient_by_hand() -> None:
    logprobs = tensor([-1.0, -2.0]).requires_grad_()
    loss = policy_gradient(logprobs, tensor([3.0, -0.5]))
    assert loss.tolist() == [3.0, -1.0] and slope(loss, logprobs).tolist() == [-3.0, 0.5]


@given(st.lists(st.tuples(finite(-8.0, 0.0), finite(-4.0, 4.0)), min_size=1, max_size=20))
def test_all_objectives_have_one_gradient_before_the_first_step(rows: list[tuple[float, float]]) -> None:
    """At a ratio of 1 clip, unclipped, penalty and REINFORCE agree; they differ in what happens afterwards."""
    old, advantages = columns(rows)

    def gradient(loss_of) -> list[int]:
        new = old.clone().requires_grad_()
        return bits(slope(loss_of(new, probability_ratios(new, old)), new))

    expected = gradient(lambda new, r: policy_gradient(new, advantages))
    assert gradient(lambda new, r: clipped_surrogate(r, advantages, BAND)) == expected
    assert gradient(lambda new, r: unclipped_surrogate(r, advantages)) == expected
    penalised = gradient(lambda new, r: unclipped_surrogate(r, advantages) + anchor_penalty(new - old, 5.0))
    # adding beta (1 - 1) turns -0.0 into 0.0
    assert [0 if b == -(2**31) else b for b in penalised] == [0 if b == -(2**31) else b for b in expected]


@given(finite(-1.0, 1.0), finite(-2.0, 2.0), st.sampled_from([0.5, 4.0]))
def test_the_penalty_pulls_the_ratio_back(log_ratio: float, advantage: float, coef: float) -> None:
    new, old, a = tensor([log_ratio]).requires_grad_(), tensor([0.0]), tensor([advantage])
    loss = unclipped_surrogate(probability_ratios(new, old), a) + anchor_penalty(new - old, coef)
    r = math.exp(float(tensor([log_ratio])))
    # float32: the exponential and each operation are rounded by 2^-24, and r - 1 - log r cancels
    assert loss.item() == pytest.approx(-r * a.item() + coef * (r - 1 - math.log(r)), abs=1e-5)
    assert slope(loss, new).item() == pytest.approx(-r * a.item() + coef * (r - 1), abs=1e-5)


def test_a_ratio_is_not_brought_back_into_the_band() -> None:
    """Wrong claim: "ratio 1.5 is clipped to 1.2, 0.7 to 0.8". On the side where it hurts, nothing is clipped."""
    plain = Band(0.2, 0.2)
    for ratio, advantage in ((1.5, -1.0), (0.7, 1.0)):
        r = tensor([ratio]).requires_grad_()
        loss = clipped_surrogate(r, tensor([advantage]), plain)
        assert loss.item() == tensor([-ratio * advantage]).item() and slope(loss, r).item() == -advantage


def test_a_smaller_band_allows_less() -> None:
    """Wrong claim: "policy too deterministic: decrease eps_clip, which allows more change"."""
    r, a = tensor([1.15]), tensor([1.0])
    assert removes_gradient(clip_flags(r, a, Band(0.1, 0.1))).item()
    assert not removes_gradient(clip_flags(r, a, Band(0.2, 0.2))).item()


def test_added_to_a_loss_the_surrogate_needs_its_sign() -> None:
    """Wrong claim: "L = L_CLIP + c1 L_VF + c2 L_S", minimised. That unlearns good tokens; the loss is -L_CLIP."""
    logits = torch.zeros(2, requires_grad=True)
    logprobs = torch.log_softmax(logits, 0)
    claimed = (probability_ratios(logprobs[:1], logprobs[:1].detach()) * 1.0).sum()
    ours = clipped_surrogate(probability_ratios(logprobs[:1], logprobs[:1].detach()), torch.ones(1), BAND).sum()
    down = [-torch.autograd.grad(x, logits, retain_graph=True)[0][0].item() for x in (claimed, ours)]
    assert down[0] < 0 < down[1], "a good token's logit falls under the one and rises under the other"
