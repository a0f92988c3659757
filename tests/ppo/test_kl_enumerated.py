"""What estimators and losses of a KL divergence are in expectation, summed over every response of a small language."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.ppo import kl
from tests.ppo.enumerated import (
    CONTEXTS,
    RESPONSES,
    Response,
    expectation,
    logprobs,
    sequence_kl,
    table,
    token_kl,
    visits,
)

SEEDS = st.integers(0, 10_000)
# of float64 sums of 22 responses, with values below 20
ROUNDING = 1e-12
# `elementwise.exp` is float32: 1e-7 relative, and 2^-24 of an argument below 10; a k3 is below 20 here
FLOAT32 = 2e-5


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value, logits)
    return found


def summed(kind: str, p: Tensor, q: Tensor, reverse: bool) -> float:
    """The exact expectation under p of the sum over a response of an estimator's values."""

    def of(y: Response) -> Tensor:
        return kl.estimate(kind, logprobs(p, y) - logprobs(q, y), reverse).to(torch.float64).sum()

    return float(expectation(p, of))


@given(SEEDS, SEEDS)
def test_k1_and_k3_are_unbiased_for_the_divergence_of_whole_responses(a: int, b: int) -> None:
    p, q = table(a), table(b)
    for kind in ("k1", "k3"):
        assert summed(kind, p, q, False) == pytest.approx(float(sequence_kl(p, q)), abs=FLOAT32)


@given(SEEDS, SEEDS)
def test_the_reverse_estimators_are_unbiased_per_token_in_the_contexts_that_p_visits(a: int, b: int) -> None:
    p, q = table(a), table(b)
    per_token = float((visits(p) * token_kl(q, p)).sum())
    for kind in ("k1", "k3"):
        assert summed(kind, p, q, True) == pytest.approx(per_token, abs=FLOAT32)
    # which is not KL(q || p) of whole responses: there q visits the contexts
    if a != b:
        assert abs(per_token - float(sequence_kl(q, p))) > 1e-6


def test_k2_is_biased_at_third_order() -> None:
    """For q = p + d the error of k2 falls with the third power of d, in both directions."""
    p, direction = table(1), table(2)
    errors = {}
    for size in (0.1, 0.05):
        q = p + size * direction
        for reverse, exact in ((False, token_kl(p, q)), (True, token_kl(q, p))):
            bias = summed("k2", p, q, reverse) - float((visits(p) * exact).sum())
            errors[size, reverse] = bias
    for reverse in (False, True):
        # 2^3 = 8 to first order of d
        assert 6.5 < errors[0.1, reverse] / errors[0.05, reverse] < 9.5


def expected_gradient(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """The mean over responses sampled from p of the gradient of `kl.loss` summed over the tokens."""
    sampled = p.detach()
    weights = torch.stack([logprobs(sampled, y).sum().exp() for y in RESPONSES])
    summed_losses = torch.stack(
        [kl.loss(kind, logprobs(p, y), logprobs(q, y)).to(torch.float64).sum() for y in RESPONSES]
    )
    return gradient((weights * summed_losses).sum(), p)


@settings(max_examples=20)
@given(SEEDS, SEEDS)
def test_the_losses_have_the_gradients_their_docstring_says(a: int, b: int) -> None:
    """In the contexts that pi visits, per token. kl.loss takes the gradient in float32 for k3."""
    pi, ref = table(a).requires_grad_(), table(b)
    fixed = visits(pi.detach())
    forward = gradient((fixed * token_kl(pi, ref)).sum(), pi)
    backward = gradient((fixed * token_kl(ref, pi)).sum(), pi)
    assert float(expected_gradient("k1", pi, ref).abs().max()) < ROUNDING
    assert torch.allclose(expected_gradient("k2", pi, ref), forward, rtol=0, atol=ROUNDING)
    assert torch.allclose(expected_gradient("k3", pi, ref), backward, rtol=0, atol=FLOAT32)
    # control: they are not each other's, and neither is zero
    if a != b:
        assert (forward - backward).abs().max() > 1e-3
        assert forward.abs().max() > 1e-3


@settings(max_examples=20)
@given(SEEDS, SEEDS)
def test_what_a_penalty_in_the_reward_of_a_token_does_to_that_token(a: int, b: int) -> None:
    """E[grad log pi c], where pi goes: grad KL for k1, less that of the other direction for k3, 0 for exact."""
    pi, ref = table(a).requires_grad_(), table(b)
    sampled = pi.detach()
    fixed = visits(sampled)
    forward = gradient((fixed * token_kl(pi, ref)).sum(), pi)
    backward = gradient((fixed * token_kl(ref, pi)).sum(), pi)

    def score_function(charge: Callable[[Response], Tensor]) -> Tensor:
        terms = [logprobs(sampled, y).sum().exp() * (logprobs(pi, y) * charge(y)).sum() for y in RESPONSES]
        return gradient(torch.stack(terms).sum(), pi)

    def estimated(kind: str) -> Callable[[Response], Tensor]:
        return lambda y: kl.estimate(kind, logprobs(sampled, y) - logprobs(ref, y)).to(torch.float64)

    def exact(y: Response) -> Tensor:
        divergences = token_kl(sampled, ref)
        return torch.stack([divergences[CONTEXTS.index(y[:t])] for t in range(len(y))])

    assert torch.allclose(score_function(estimated("k1")), forward, rtol=0, atol=FLOAT32)
    assert torch.allclose(score_function(estimated("k3")), forward - backward, rtol=0, atol=FLOAT32)
    assert float(score_function(exact).abs().max()) < ROUNDING
