"""GSPO's ratio, CISPO's weight, Clip-Cov and KL-Cov: by hand, beside NumPy in float64, and their properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ppo_repro.ppo.losses import (
    Band,
    cispo_loss,
    clipped_surrogate,
    covariance_penalty,
    flag_names,
    policy_gradient,
    probability_ratios,
    unclipped_surrogate,
    weight_flags,
)
from ppo_repro.ppo.sequences import sequence_ratios
from torch import Tensor

from ppo_repro.ppo.covariance import chosen_count, covariances, drawn_tokens, largest_tokens
from tests.support.float32 import bits, finite, tensor

logprobs, numbers = finite(-4.0, 0.0), finite(-3.0, 3.0)
Rows = list[list[tuple[float, float, float]]]  # new and anchor log-prob, advantage
responses = st.lists(st.lists(st.tuples(logprobs, logprobs, numbers), min_size=1, max_size=5), min_size=1, max_size=4)


def tensors(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = [tensor([token[i] for row in rows for token in row]) for i in range(3)]
    return columns[0], columns[1], columns[2], torch.tensor([len(row) for row in rows])


def gradient(loss: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, x, weights)
    return found


def test_gspo_by_hand() -> None:
    # a response of two tokens with ratios e and 1, and one of a single token
    new, anchor = tensor([-1.0, -1.0, -3.0]), tensor([-2.0, -1.0, -3.0])
    ratios = sequence_ratios(new, anchor, torch.tensor([2, 1]))
    assert ratios.tolist() == pytest.approx([np.exp(0.5), np.exp(0.5), 1.0], rel=1e-6)
    # 1.65 is beyond 1.2, and the advantage is positive: both tokens lose their gradient
    losses = clipped_surrogate(ratios, tensor([1.0, 1.0, 1.0]), Band(0.2, 0.2))
    assert losses.tolist() == pytest.approx([-1.2, -1.2, -1.0], rel=1e-6)


@given(responses)
def test_gspos_gradient_is_that_of_its_definition_in_float64(rows: Rows) -> None:
    """Equation 5 of the paper, differentiated by torch in float64: -mean_i s_i A_i, one advantage per response."""
    new, anchor, advantages, lengths = tensors(rows)
    advantages = advantages[torch.repeat_interleave(torch.cumsum(lengths, 0) - 1, lengths)]  # one a response
    x = new.clone().requires_grad_()
    weights = torch.repeat_interleave(1.0 / (len(lengths) * lengths), lengths).to(torch.float32)
    found = gradient(unclipped_surrogate(sequence_ratios(x, anchor, lengths), advantages), weights, x)
    y = new.to(torch.float64).requires_grad_()
    means = torch.stack([run.mean() for run in (y - anchor.to(torch.float64)).split(lengths.tolist())])
    firsts = advantages[torch.cumsum(lengths, 0) - 1].to(torch.float64)
    (expected,) = torch.autograd.grad(-(means.exp() * firsts).mean(), y)
    torch.testing.assert_close(found.to(torch.float64), expected, rtol=2e-5, atol=1e-7)


@given(responses)
def test_a_response_of_one_token_has_its_tokens_ratio(rows: Rows) -> None:
    new, anchor, _, _ = tensors(rows)
    alone = torch.ones(len(new), dtype=torch.int64)
    assert bits(sequence_ratios(new, anchor, alone)) == bits(probability_ratios(new, anchor))


@given(responses, st.randoms(use_true_random=False))
def test_the_order_of_tokens_in_a_response_does_not_show_and_equal_policies_have_ratio_one(rows: Rows, random) -> None:
    new, anchor, _, lengths = tensors(rows)
    shuffled = tensors([random.sample(row, len(row)) for row in rows])
    assert bits(sequence_ratios(new, anchor, lengths)) == bits(sequence_ratios(shuffled[0], shuffled[1], lengths))
    assert bits(sequence_ratios(new, new, lengths)) == bits(torch.ones(len(new)))


def test_cispo_by_hand() -> None:
    new, ratios, advantages = tensor([-1.0, -2.0, -0.5]), tensor([3.0, 1.0, 0.1]), tensor([1.0, 1.0, -2.0])
    assert cispo_loss(new, ratios, advantages, 0.5, 2.0).tolist() == [2.0, 2.0, -0.5]
    assert flag_names(weight_flags(ratios, 0.5, 2.0)) == ["bound_high", "none", "bound_low"]


@given(responses)
def test_cispos_gradient_is_bounded_and_is_the_surrogates_within_its_bounds(rows: Rows) -> None:
    new, anchor, advantages, _ = tensors(rows)
    x = new.clone().requires_grad_()
    ratios = probability_ratios(x, anchor)
    found = gradient(cispo_loss(x, ratios, advantages, 0.5, 2.0), torch.ones(len(x)), x)
    r = np.exp((new - anchor).numpy().astype(np.float64))
    expected = -np.clip(r, 0.5, 2.0) * advantages.numpy().astype(np.float64)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-12)
    unbounded = gradient(cispo_loss(x, probability_ratios(x, anchor), advantages, 0.0, 1e30), torch.ones(len(x)), x)
    plain = gradient(unclipped_surrogate(probability_ratios(x, anchor), advantages), torch.ones(len(x)), x)
    torch.testing.assert_close(unbounded, plain, rtol=1e-6, atol=1e-12)


@given(responses)
def test_before_the_first_step_cispo_is_reinforce(rows: Rows) -> None:
    new, _, advantages, _ = tensors(rows)
    one = probability_ratios(new, new)
    assert bits(cispo_loss(new, one, advantages, 0.5, 2.0) + 0.0) == bits(policy_gradient(new, advantages) + 0.0)


def test_covariances_by_hand() -> None:
    found = covariances(tensor([-1.0, -3.0, -2.0]), tensor([2.0, 0.0, 1.0]))
    assert found.tolist() == [1.0, 1.0, 0.0]
    assert [chosen_count(share, 10) for share in (0.01, 0.25, 1.0)] == [1, 2, 10]
    values = torch.tensor([3.0, 1.0, 3.0, 2.0], dtype=torch.float64)
    assert largest_tokens(values, 0.5).tolist() == [True, False, True, False]
    assert largest_tokens(values, 0.25).tolist() == [True, False, False, False]
    order, allowed = torch.tensor([3, 2, 1, 0]), torch.tensor([True, True, False, True])
    assert drawn_tokens(values, allowed, 1.5, 5.0, 0.25, order).tolist() == [False, False, False, True]
    assert drawn_tokens(values, allowed, 1.5, 5.0, 1.0, order).tolist() == [True, False, False, True]
    assert not drawn_tokens(values, allowed, 5.0, 6.0, 1.0, order).any()


@given(responses, st.sampled_from([0.1, 0.5]))
def test_choices_are_those_of_numpy(rows: Rows, share: float) -> None:
    new, _, advantages, _ = tensors(rows)
    x, y = new.numpy().astype(np.float64), advantages.numpy().astype(np.float64)
    expected = (x - x.mean()) * (y - y.mean())
    found = covariances(new, advantages)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    count = max(int(share * len(x)), 1)
    chosen = largest_tokens(found, share).numpy()
    assert chosen.sum() == count and (found.numpy()[chosen].min() >= found.numpy()[~chosen].max(initial=-np.inf))


def test_every_qualified_token_is_drawn_equally_often() -> None:
    """300 permutations of 6 tokens, 4 of which qualify, one drawn: 75 each, within five standard deviations."""
    values = torch.tensor([2.0, 0.0, 2.0, 2.0, 9.0, 2.0], dtype=torch.float64)
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(6)
    for _ in range(300):
        order = torch.randperm(6, generator=generator)
        counts += drawn_tokens(values, torch.ones(6, dtype=torch.bool), 1.0, 5.0, 0.1, order)
    assert counts[[1, 4]].tolist() == [0, 0] and counts.sum() == 300
    assert ((counts[[0, 2, 3, 5]] - 75).abs() < 5 * (300 * 0.25 * 0.75) ** 0.5).all()


def test_the_penalty_of_kl_cov_by_hand() -> None:
    x = tensor([0.5, -0.25, 0.0, 3.0]).requires_grad_()
    penalty = covariance_penalty(x, torch.tensor([True, True, True, False]), 2.0)
    assert penalty.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert gradient(penalty, torch.ones(4), x).tolist() == [2.0, -2.0, 0.0, 0.0]
