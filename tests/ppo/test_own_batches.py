"""Sums by response and prompt in a batch of the user's functions: values, derivatives, and one rounding."""

from __future__ import annotations

import math

import pytest
import torch

from ppo_repro.ppo.own_batches import AdvantageBatch

LENGTHS, GROUPS = torch.tensor([3, 1, 4]), torch.tensor([5, 2, 5])
X = torch.tensor([1e8, 1.0, -1e8, 0.5, 2.0, 3.0, 4.0, -1.0])


@pytest.fixture
def batch() -> AdvantageBatch:
    responses = torch.repeat_interleave(torch.arange(3), LENGTHS)
    positions = torch.cat([torch.arange(n) for n in LENGTHS.tolist()])
    scores = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    return AdvantageBatch(responses, GROUPS[responses], positions, LENGTHS[responses], X, None, scores)


def test_sums_and_means_of_responses_are_rounded_once(batch: AdvantageBatch) -> None:
    assert batch.response_sums(X).tolist() == [1.0, 0.5, 8.0]
    assert batch.response_means(X).tolist() == [pytest.approx(1 / 3, rel=1e-7), 0.5, 2.0]


def test_a_value_of_a_response_comes_to_its_tokens_and_gets_the_sum_of_their_gradients(batch: AdvantageBatch) -> None:
    y = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    batch.of_tokens(y).backward(X)
    assert batch.of_tokens(y).tolist() == [1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert y.grad is not None
    assert y.grad.tolist() == [1.0, 0.5, 8.0]


def test_a_token_gets_the_gradient_of_the_sum_of_its_response(batch: AdvantageBatch) -> None:
    x = X.clone().requires_grad_()
    batch.response_means(x).backward(torch.tensor([3.0, 2.0, 4.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def test_sums_of_groups_come_to_each_of_their_responses(batch: AdvantageBatch) -> None:
    assert batch.group_sums(batch.scores).tolist() == [math.fsum([0.1, 0.7]), 0.2, math.fsum([0.1, 0.7])]
    assert batch.group_sizes.tolist() == [2, 1, 2]
