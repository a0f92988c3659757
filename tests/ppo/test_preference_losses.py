"""Bradley-Terry and DPO losses: by hand, by definition, their gradients, and the optimum that DPO finds."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.ppo.preferences import bradley_terry_losses, dpo_losses, dpo_margins, sequence_logprobs
from tests.support.float32 import bits, finite, tensor


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x, torch.ones_like(loss), retain_graph=True)[0]


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = tensor([0.0, math.log(3.0), -2.0, 40.0, -40.0]), tensor([0.0, 0.0, -2.0, -40.0, 40.0])
    chosen.requires_grad_()
    losses = bradley_terry_losses(chosen, rejected)
    # sigma(0) = 1/2; sigma(log 3) = 3/4; at 80 the loss is e^-80, at -80 it is 80
    by_hand = [math.log(2.0), math.log(4.0 / 3.0), math.log(2.0), math.exp(-80.0), 80.0]
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-7)
    assert gradient(losses, chosen).tolist() == pytest.approx([-0.5, -0.25, -0.5, -math.exp(-80.0), -1.0], rel=1e-7)


logprob = st.floats(-30.0, 0.0)


@given(logprob, logprob, logprob, logprob, st.floats(0.01, 5.0))
def test_dpo_is_its_definition_and_weighs_a_pair_by_how_wrong_it_is(
    w: float, lose: float, ref_w: float, ref_l: float, beta: float
) -> None:
    policy_w, policy_l = wide(w).requires_grad_(), wide(lose).requires_grad_()
    margins = dpo_margins(policy_w, policy_l, wide(ref_w), wide(ref_l), beta)
    margin = beta * ((w - ref_w) - (lose - ref_l))
    assert margins.item() == pytest.approx(margin, rel=1e-9, abs=1e-12)
    losses = dpo_losses(margins)
    assert losses.item() == pytest.approx(max(-margin, 0.0) + math.log1p(math.exp(-abs(margin))), rel=1e-12)
    # equation 7's gradient: -beta sigma(r_l - r_w) (grad log pi(y_w) - grad log pi(y_l))
    weight = math.exp(-margin) / (1.0 + math.exp(-margin)) if margin > 0 else 1.0 / (1.0 + math.exp(margin))
    assert gradient(losses, policy_w).item() == pytest.approx(-beta * weight, rel=1e-12)
    assert gradient(losses, policy_l).item() == pytest.approx(beta * weight, rel=1e-12)


REFERENCE, REWARDS = (0.5, 0.3, 0.2), (0.0, 0.5, 1.0)


def dpo_optimum(beta: float) -> list[float]:
    """The policy over three responses that minimises the expected DPO loss, by gradient descent.

    All pairs are shown, each preferred with the Bradley-Terry probability of the rewards.
    """
    reference = wide(*REFERENCE).log()
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    probability = wide(*(1.0 / (1.0 + math.exp(REWARDS[j] - REWARDS[i])) for i, j in pairs))
    first, second = (torch.tensor(index) for index in zip(*pairs, strict=True))
    logits = reference.clone()
    for _ in range(200):
        leaf = logits.requires_grad_()
        logprobs = leaf - leaf.logsumexp(0)
        margins = dpo_margins(logprobs[first], logprobs[second], reference[first], reference[second], beta)
        slope = torch.autograd.grad((dpo_losses(margins) * probability).sum(), leaf)[0]
        logits = (logits - slope / (beta * beta)).detach()  # the curvature is at most 6/4 beta^2 on this example
    return logits.softmax(0).tolist()


@pytest.mark.parametrize("beta", [0.2, 0.5, 2.0])
def test_dpo_finds_the_closed_form_optimum(beta: float) -> None:
    """ref exp(r / beta) / Z, the optimum of E[r] - beta KL(pi || ref)."""
    tilted = [p * math.exp(r / beta) for p, r in zip(REFERENCE, REWARDS, strict=True)]
    # what is left after 200 gradient steps is far below
    assert dpo_optimum(beta) == pytest.approx([w / sum(tilted) for w in tilted], abs=1e-9)


@given(st.lists(st.lists(finite(-50.0, 0.0), min_size=1, max_size=9), min_size=1, max_size=6))
def test_a_response_log_prob_is_the_correctly_rounded_sum_and_its_gradient_reaches_every_token(
    responses: list[list[float]],
) -> None:
    lengths = torch.tensor([len(r) for r in responses])
    leaf = tensor([x for r in responses for x in r]).requires_grad_()
    sums = sequence_logprobs(leaf, lengths)
    assert sums.tolist() == [float(sum(map(Fraction, tensor(r).tolist()))) for r in responses]
    seeds = torch.arange(1, len(responses) + 1, dtype=torch.float64)
    found = torch.autograd.grad(sums, leaf, seeds)[0]
    assert bits(found) == bits(torch.repeat_interleave(seeds, lengths).to(torch.float32))
