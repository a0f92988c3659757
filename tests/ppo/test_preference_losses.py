"""Bradley-Terry and DPO losses: by hand, by definition, their gradients, and what beta does."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.numerics.elementwise import differentiable_softplus, sigmoid, softplus
from ppo_repro.ppo.preferences import (
    bradley_terry_losses,
    dpo_losses,
    dpo_margins,
    preference_accuracy,
    sequence_logprobs,
)
from tests.support.float32 import SMALLEST_NORMAL, bits, finite, tensor

scores = st.floats(-60.0, 60.0, width=32)


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def softplus_by_definition(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x, torch.ones_like(loss), retain_graph=True)[0]


@given(st.floats(-700.0, 700.0))
def test_softplus_and_sigmoid_are_their_definitions_in_float64(x: float) -> None:
    # own log and exp are good to a few units of 2^-53 each
    assert softplus(wide(x)).item() == pytest.approx(softplus_by_definition(x), rel=1e-15 * 4)
    e = math.exp(-abs(x))
    assert sigmoid(wide(x)).item() == pytest.approx((1.0 if x >= 0 else e) / (1.0 + e), rel=1e-15 * 4)


@given(st.floats(-86.0, 86.0, width=32))
def test_float32_softplus_is_the_definition_rounded(x: float) -> None:
    # float32 rounding alone: half a unit in the last place, 2^-24
    assert softplus(tensor([x])).item() == pytest.approx(softplus_by_definition(x), rel=2.0**-24 * 1.001)


@given(st.lists(finite(), min_size=1, max_size=20))
def test_loss_and_gradient_are_finite_and_never_zero_at_any_margin(values: list[float]) -> None:
    x = tensor(values).requires_grad_()
    loss = differentiable_softplus(x)
    slope = gradient(loss, x)
    assert torch.isfinite(loss).all() and (loss >= SMALLEST_NORMAL).all()
    assert (slope >= SMALLEST_NORMAL).all() and (slope <= 1.0).all()


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = tensor([0.0, math.log(3.0), -2.0, 40.0, -40.0]), tensor([0.0, 0.0, -2.0, -40.0, 40.0])
    chosen.requires_grad_()
    losses = bradley_terry_losses(chosen, rejected)
    assert losses.dtype == torch.float32
    # sigma(0) = 1/2; sigma(log 3) = 3/4; at 80 the loss is e^-80, at -80 it is 80
    by_hand = [math.log(2.0), math.log(4.0 / 3.0), math.log(2.0), math.exp(-80.0), 80.0]
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-7)
    assert gradient(losses, chosen).tolist() == pytest.approx([-0.5, -0.25, -0.5, -math.exp(-80.0), -1.0], rel=1e-7)


@given(scores, scores)
def test_bradley_terry_is_its_definition(chosen: float, rejected: float) -> None:
    c, r = wide(chosen).requires_grad_(), wide(rejected).requires_grad_()
    loss = bradley_terry_losses(c, r)
    p = 1.0 / (1.0 + math.exp(rejected - chosen))
    # the definition loses digits where p is near 1: an error of 2^-53 in p
    assert loss.item() == pytest.approx(-math.log(p) if p < 1.0 else math.exp(rejected - chosen), rel=1e-12, abs=1e-15)
    down, up = gradient(loss, c), gradient(loss, r)
    assert down.item() == -up.item() == pytest.approx(-math.exp(rejected - chosen) * p, rel=1e-12)


@given(scores, scores)
def test_the_two_orders_of_a_pair_are_probabilities_that_add_up_to_one(a: float, b: float) -> None:
    one, other = bradley_terry_losses(wide(a, b), wide(b, a)).tolist()
    assert math.exp(-one) + math.exp(-other) == pytest.approx(1.0, rel=1e-12)


def test_dpo_by_hand() -> None:
    # the policy doubled the preferred response and halved the other one: beta log 4 = log 2 at beta 1/2
    chosen, rejected = wide(math.log(0.4)).requires_grad_(), wide(math.log(0.1)).requires_grad_()
    margins = dpo_margins(chosen, rejected, wide(math.log(0.2)), wide(math.log(0.2)), 0.5)
    losses = dpo_losses(margins)
    assert margins.item() == pytest.approx(math.log(2.0), rel=1e-14)
    assert losses.item() == pytest.approx(math.log(1.5), rel=1e-14)
    assert gradient(losses, chosen).item() == pytest.approx(-0.5 / 3.0, rel=1e-14)
    assert gradient(losses, rejected).item() == pytest.approx(0.5 / 3.0, rel=1e-14)


logprob = st.floats(-30.0, 0.0)


@given(logprob, logprob, logprob, logprob, st.floats(0.01, 5.0))
def test_dpo_is_its_definition_and_weighs_a_pair_by_how_wrong_it_is(
    w: float, lose: float, ref_w: float, ref_l: float, beta: float
) -> None:
    policy_w, policy_l = wide(w).requires_grad_(), wide(lose).requires_grad_()
    margins = dpo_margins(policy_w, policy_l, wide(ref_w), wide(ref_l), beta)
    margin = beta * ((w - ref_w) - (lose - ref_l))
    losses = dpo_losses(margins)
    assert losses.item() == pytest.approx(softplus_by_definition(-margin), rel=1e-12)
    # equation 7's gradient: beta sigma(r_l - r_w) (grad log pi(y_w) - grad log pi(y_l)), with a minus sign
    weight = softplus_derivative(-margin)
    assert gradient(losses, policy_w).item() == pytest.approx(-beta * weight, rel=1e-12)
    assert gradient(losses, policy_l).item() == pytest.approx(beta * weight, rel=1e-12)
    assert margins.item() == pytest.approx(margin, rel=1e-9, abs=1e-12)


def softplus_derivative(x: float) -> float:
    return math.exp(x) / (1.0 + math.exp(x)) if x < 0 else 1.0 / (1.0 + math.exp(-x))


def test_a_pair_in_the_wrong_order_weighs_more() -> None:
    margins = wide(-8.0, -1.0, 0.0, 1.0, 8.0).requires_grad_()
    weights = -gradient(dpo_losses(margins), margins)
    assert torch.equal(weights, weights.sort(descending=True).values) and len(set(weights.tolist())) == 5
    assert weights[2].item() == 0.5 and weights[0].item() > 0.999 and 0.0 < weights[4].item() < 0.001


REFERENCE, REWARDS = (0.5, 0.3, 0.2), (0.0, 0.5, 1.0)


def tilted(beta: float) -> list[float]:
    """ref exp(r / beta) / Z, the optimum of E[r] - beta KL(pi || ref)."""
    weights = [p * math.exp(r / beta) for p, r in zip(REFERENCE, REWARDS, strict=True)]
    return [w / sum(weights) for w in weights]


def kl(p: list[float]) -> float:
    """KL(p || reference), nats."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, REFERENCE, strict=True))


def dpo_optimum(beta: float) -> list[float]:
    """The policy over three responses that minimises the expected DPO loss, by gradient descent.

    All pairs are shown, each preferred with the Bradley-Terry probability of the rewards.
    """
    reference = wide(*REFERENCE).log()
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    probability = wide(*(1.0 / (1.0 + math.exp(REWARDS[j] - REWARDS[i])) for i, j in pairs))
    first, second = (torch.tensor(index) for index in zip(*pairs, strict=True))

    def expected_loss(logits: Tensor) -> Tensor:
        logprobs = logits - logits.logsumexp(0)
        margins = dpo_margins(logprobs[first], logprobs[second], reference[first], reference[second], beta)
        return (dpo_losses(margins) * probability).sum()

    logits = reference.clone()
    for _ in range(200):
        leaf = logits.requires_grad_()
        slope = torch.autograd.grad(expected_loss(leaf), leaf)[0]
        logits = (logits - slope / (beta * beta)).detach()  # the curvature is at most 6/4 beta^2 on this example
    return logits.softmax(0).tolist()


@pytest.mark.parametrize("beta", [0.2, 0.5, 2.0])
def test_dpo_finds_the_closed_form_optimum(beta: float) -> None:
    # what is left after 200 gradient steps is far below
    assert dpo_optimum(beta) == pytest.approx(tilted(beta), abs=1e-9)


def test_a_large_beta_stays_close_to_the_reference_and_a_small_one_moves_away() -> None:
    distances = [kl(dpo_optimum(beta)) for beta in (0.2, 0.5, 2.0)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 1.0 and distances[2] < 0.03
    weights = 0.5, 0.3 * math.e, 0.2 * math.e**2  # ref exp(r / 0.5) by hand
    assert tilted(0.5) == pytest.approx([w / sum(weights) for w in weights], rel=1e-14)


@given(st.lists(st.lists(finite(-50.0, 0.0), min_size=1, max_size=9), min_size=1, max_size=6))
def test_a_response_log_prob_is_the_correctly_rounded_sum_and_its_gradient_reaches_every_token(
    responses: list[list[float]],
) -> None:
    lengths = torch.tensor([len(r) for r in responses])
    leaf = tensor([x for r in responses for x in r]).requires_grad_()
    sums = sequence_logprobs(leaf, lengths)
    assert sums.dtype == torch.float64
    assert sums.tolist() == [float(sum(map(Fraction, tensor(r).tolist()))) for r in responses]
    seeds = torch.arange(1, len(responses) + 1, dtype=torch.float64)
    found = torch.autograd.grad(sums, leaf, seeds)[0]
    assert bits(found) == bits(torch.repeat_interleave(seeds, lengths).to(torch.float32))


def test_the_order_of_tokens_does_not_change_a_sum_while_a_float32_sum_changes() -> None:
    values = tensor([1e8, -1e8, 1.0])
    backwards = values.flip(0)
    lengths = torch.tensor([3])
    assert bits(sequence_logprobs(values, lengths)) == bits(sequence_logprobs(backwards, lengths))
    assert (values[0] + values[1]) + values[2] != (backwards[0] + backwards[1]) + backwards[2]


def test_accuracy_counts_ties_one_half() -> None:
    assert preference_accuracy(wide(1.0, -1.0, 0.0, -0.0)) == 0.5
    assert preference_accuracy(wide(1e-300, 2.0)) == 1.0 and preference_accuracy(wide(-1.0)) == 0.0
