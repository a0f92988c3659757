"""Every objective's loss, gradient and flags: by hand, and by definition in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.ppo.objectives import (
    Cispo,
    Clip,
    Objective,
    Penalty,
    PolicyGradient,
    SequenceClip,
    flag_names,
    probability_ratios,
    removes_gradient,
)
from tests.support.float32 import SMALLEST_NORMAL, TINIEST, bits, finite, tensor

EDGES = [
    float(np.nextafter(np.float32(b), np.float32(d), dtype=np.float32)) for b in (0.75, 1.5, 3.0) for d in (0, b, 9)
]
ratio_values = st.one_of(st.sampled_from([0.0, TINIEST, 1.0, *EDGES]), finite(0.0, 8.0), finite(0.0, 1e38))
advantage_values = st.one_of(
    st.sampled_from([0.0, -0.0, TINIEST, -TINIEST, SMALLEST_NORMAL / 2, 1.0, -1.0]), finite(-100, 100), finite()
)
tokens = st.lists(st.tuples(ratio_values, advantage_values), min_size=1, max_size=30)
logprobs = finite(-4.0, 0.0)
Rows = list[list[tuple[float, float, float]]]  # new and anchor log-prob, advantage
responses = st.lists(
    st.lists(st.tuples(logprobs, logprobs, finite(-3.0, 3.0)), min_size=1, max_size=5), min_size=1, max_size=4
)


def tensors(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New and anchor log-probs, advantages, and the response of each token."""
    columns = [tensor([token[i] for row in rows for token in row]) for i in range(3)]
    lengths = torch.tensor([len(row) for row in rows])
    return columns[0], columns[1], columns[2], torch.repeat_interleave(torch.arange(len(rows)), lengths)


def slope(loss: Tensor, x: Tensor, weights: Tensor | None = None) -> Tensor:
    """The gradient of each token's loss in its own input."""
    return torch.autograd.grad(loss, x, torch.ones_like(loss) if weights is None else weights)[0]


def of_ratio(objective: Objective, r: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and their gradients in the ratio."""
    leaf = r.clone().requires_grad_()
    losses = objective.surrogates(leaf, a, r)
    return losses.detach(), slope(losses, leaf)


@given(tokens, st.sampled_from([None, 3.0]))
def test_the_clip_is_its_definition_bit_for_bit(rows: list[tuple[float, float]], dual: float | None) -> None:
    r, a = tensor([r for r, _ in rows]), tensor([a for _, a in rows])
    ratios, advantages = r.numpy(), a.numpy()
    low, high = np.float32(0.75), np.float32(1.5)
    with np.errstate(over="ignore"):  # a huge ratio times a huge advantage is infinite on both sides
        expected = np.minimum(ratios * advantages, np.clip(ratios, low, high) * advantages)
        if dual is not None:
            expected = np.where(advantages < 0, np.maximum(expected, np.float32(dual) * advantages), expected)
    removed = ((ratios > high) & (advantages > 0)) | ((ratios < low) & (advantages < 0))
    if dual is not None:
        removed |= (ratios > np.float32(dual)) & (advantages < 0)
    objective = Clip(0.25, 0.5, dual)
    losses, slopes = of_ratio(objective, r, a)
    assert bits(losses) == (-expected).view(np.int32).tolist()
    assert bits(slopes) == bits(torch.from_numpy(np.where(removed, np.float32(0), -advantages)))
    flags = objective.flags(r, a)
    assert removes_gradient(flags).tolist() == removed.tolist()
    outside = (ratios > high) | (ratios < low)
    assert [name != "none" for name in flag_names(flags)] == (outside & (advantages != 0)).tolist()


@given(responses)
def test_before_the_first_step_every_objective_has_the_gradient_of_reinforce(rows: Rows) -> None:
    old, _, advantages, responses_of = tensors(rows)

    def gradient(objective: Objective) -> list[float]:
        new = old.clone().requires_grad_()
        ratios = objective.ratios(new, old, responses_of)
        assert bits(ratios) == bits(torch.ones(len(old)))
        losses = objective.surrogates(ratios, advantages, new)
        penalties = objective.penalties(new - old)
        return slope(losses if penalties is None else losses + penalties, new).tolist()

    expected = gradient(PolicyGradient())
    assert expected == (-advantages).tolist()
    for objective in (Objective(), Clip(0.2, 0.3, 3.0), SequenceClip(0.2, 0.2), Cispo(0.5, 2.0), Penalty(5.0)):
        assert gradient(objective) == expected, objective


@given(responses, st.randoms(use_true_random=False))
def test_gspos_gradient_is_its_definitions_in_float64_in_any_order_of_tokens(rows: Rows, random) -> None:
    """Equation 5 of the paper, differentiated by torch in float64: -mean_i s_i A_i, one advantage per response."""
    new, anchor, advantages, of = tensors(rows)
    objective, lengths = SequenceClip(0.2, 0.2), torch.tensor([len(row) for row in rows])
    advantages = advantages[torch.repeat_interleave(torch.cumsum(lengths, 0) - 1, lengths)]  # one a response
    x = new.clone().requires_grad_()
    weights = torch.repeat_interleave(1.0 / (len(lengths) * lengths), lengths).to(torch.float32)
    ratios = objective.ratios(x, anchor, of)
    found = slope(Objective().surrogates(ratios, advantages, x), x, weights)
    y = new.to(torch.float64).requires_grad_()
    means = torch.stack([run.mean() for run in (y - anchor.to(torch.float64)).split(lengths.tolist())])
    firsts = advantages[torch.cumsum(lengths, 0) - 1].to(torch.float64)
    (expected,) = torch.autograd.grad(-(means.exp() * firsts).mean(), y)
    torch.testing.assert_close(found.to(torch.float64), expected, rtol=2e-5, atol=1e-7)
    shuffled = tensors([random.sample(row, len(row)) for row in rows])
    assert bits(ratios) == bits(objective.ratios(shuffled[0], shuffled[1], of))


@given(responses)
def test_cispos_gradient_is_the_bounded_ratio_times_the_advantage(rows: Rows) -> None:
    new, anchor, advantages, _ = tensors(rows)
    x = new.clone().requires_grad_()
    found = slope(Cispo(0.5, 2.0).surrogates(probability_ratios(x, anchor), advantages, x), x)
    r = np.exp((new - anchor).numpy().astype(np.float64))
    expected = -np.clip(r, 0.5, 2.0) * advantages.numpy().astype(np.float64)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-12)


@given(finite(-1.0, 1.0), finite(-2.0, 2.0), st.sampled_from([0.5, 4.0]))
def test_the_penalty_pulls_the_ratio_back(log_ratio: float, advantage: float, coef: float) -> None:
    new, old, a = tensor([log_ratio]).requires_grad_(), tensor([0.0]), tensor([advantage])
    objective = Penalty(coef)
    loss = objective.surrogates(probability_ratios(new, old), a, new) + objective.penalties(new - old)
    r = math.exp(float(tensor([log_ratio])))
    # float32: the exponential and each operation are rounded by 2^-24, and r - 1 - log r cancels
    assert loss.item() == pytest.approx(-r * a.item() + coef * (r - 1 - math.log(r)), abs=1e-5)
    assert slope(loss, new).item() == pytest.approx(-r * a.item() + coef * (r - 1), abs=1e-5)
