"""The load-balancing loss of one layer: by hand, by autograd on the definition, and that of transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ppo_repro.ppo.balancing import Balance, load_balancing_loss, logit_gradients
from tests.support.models import seeded


def counts_of(logits: Tensor, k: int) -> Tensor:
    """Tokens of each expert, where each token takes its k largest."""
    return logits.topk(k, -1).indices.flatten().bincount(minlength=logits.shape[1])


def test_by_hand() -> None:
    # two tokens take expert 0; probabilities 3/4 and 1/2 of it: f = (1, 0), P = (5/8, 3/8), L = 2 * 5/8
    probs = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    balance = Balance(torch.tensor([2, 0]), 2, 1.0)
    assert load_balancing_loss(probs, balance) == 1.25
    # E / T p (f - sum f p): of the first token 3/4 (1 - 3/4) = 3/16 and 1/4 (0 - 3/4), of the second 1/4 and -1/4
    assert logit_gradients(probs, balance).tolist() == [[0.1875, -0.1875], [0.25, -0.25]]
    assert load_balancing_loss(probs, Balance(torch.tensor([2, 0]), 2, 0.5)) == 0.625


@given(st.integers(1, 30), st.integers(2, 9), st.integers(0, 10**6), st.data())
def test_it_is_that_of_transformers_and_its_gradient_that_of_autograd(
    tokens: int, experts: int, seed: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, experts))
    logits = (torch.randn(tokens, experts, generator=seeded(seed)).double() * 3).requires_grad_()
    balance = Balance(counts_of(logits.detach(), k), tokens, 0.7)
    expected = load_balancing_loss_func((logits,), experts, k)
    assert isinstance(expected, Tensor)
    probs = logits.detach().softmax(-1)
    # transformers counts in float32
    assert load_balancing_loss(probs, balance) == pytest.approx(0.7 * float(expected.detach()), rel=1e-6)
    slow = 0.7 * experts * ((balance.counts.double() / tokens) * logits.softmax(-1).mean(0)).sum()
    slow.backward()
    assert load_balancing_loss(probs, balance) == pytest.approx(float(slow.detach()), rel=1e-13)
    assert logits.grad is not None
    found = logit_gradients(probs, balance)
    # float64 on both sides: what differs is a rounding of a few terms
    assert float((found - logits.grad).abs().max()) < 1e-14
    assert float(found.sum(-1).abs().max()) < 1e-14, "a constant added to all logits of a token changes nothing"
    part = logit_gradients(probs[: tokens // 2 + 1], balance)
    assert torch.equal(part, found[: tokens // 2 + 1]), (
        "a token's gradient depends on the counts, not on its neighbours"
    )


def test_even_routing_is_the_smallest_loss_and_has_no_gradient() -> None:
    probs = torch.full((6, 3), 1 / 3, dtype=torch.float64)
    even, one = Balance(torch.tensor([4, 4, 4]), 6, 1.0), Balance(torch.tensor([6, 6, 0]), 6, 1.0)
    assert load_balancing_loss(probs, even) == pytest.approx(2.0) == pytest.approx(load_balancing_loss(probs, one))
    assert float(logit_gradients(probs, even).abs().max()) < 1e-16
    # the busy experts are pushed down
    assert (logit_gradients(probs, one)[:, :2] > 0).all() and (logit_gradients(probs, one)[:, 2] < 0).all()
