"""Sums of which several processes hold one part each: the bits of one process, whatever the parts.

Control: partial sums that are rounded before they are added up. Accuracy: beside float64.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import logprobs
from ppo_repro.numerics.arithmetic.contraction import input_operand, linear, weight_operand
from ppo_repro.numerics.arithmetic.divided import Share
from ppo_repro.numerics.sharding.layers import share_of
from tests.support.thread_ranks import ThreadRanks, in_threads

SIZES = st.integers(2, 4)


def numbers(seed: int, *shape: int, outliers: bool = False) -> Tensor:
    """Float32 numbers of many magnitudes, with exact zeros, and where asked a few far above the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-6, 7, shape, generator=generator)
    x = x.masked_fill(torch.rand(shape, generator=generator) < 0.1, 0.0)
    if outliers:
        x = torch.where(torch.rand(shape, generator=generator) < 0.04, x * 2.0**12, x)
    return x


def product(x: Tensor, w: Tensor, bias: Tensor, share: Share | None = None) -> Tensor:
    return linear(input_operand(x, "x", share), weight_operand(w, "w", share), bias, share)


def divided_product(size: int, x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    def work(ranks: ThreadRanks) -> Tensor:
        share = share_of(x.shape[1], ranks)
        return product(share.own(x), share.own(w), bias, share)

    return in_threads(size, work)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(1, 5), st.integers(4, 300), st.integers(1, 6), st.integers(0, 2**31), st.booleans())
def test_a_product_has_the_bits_of_one_process(
    size: int, rows: int, terms: int, columns: int, seed: int, outliers: bool
) -> None:
    x, w = numbers(seed, rows, terms, outliers=outliers), numbers(seed + 1, columns, terms, outliers=outliers)
    bias = numbers(seed + 2, columns)
    whole = product(x, w, bias)
    for found in divided_product(size, x, w, bias):
        assert torch.equal(found.view(torch.int32), whole.view(torch.int32))


def test_more_terms_than_one_integer_holds_the_sum_of() -> None:
    x, w = numbers(1, 2, 20_000), numbers(2, 3, 20_000)
    whole = product(x, w, torch.zeros(3))
    assert all(torch.equal(found, whole) for found in divided_product(3, x, w, torch.zeros(3)))


def test_an_outlier_that_one_process_has_moves_the_grid_of_all() -> None:
    x = torch.full((1, 64), 0.3)
    x[0, 60] = 3e6
    w = numbers(3, 4, 64)
    whole = product(x, w, torch.zeros(4))
    assert all(torch.equal(found, whole) for found in divided_product(2, x, w, torch.zeros(4)))
    exact = (x.double() @ w.double().t()).float()
    assert torch.allclose(whole, exact, rtol=3e-7, atol=0.0), "the others keep their bits beside 3e6"


def test_by_hand() -> None:
    x, w = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    assert [found.tolist() for found in divided_product(2, x, w, torch.tensor([0.5]))] == [[[4321.5]]] * 2


def rounded_parts(size: int, x: Tensor, w: Tensor) -> Tensor:
    """Deliberately broken: each part on its own grid, rounded before they are added up."""
    parts = [(share.start, share.stop) for share in (share_of(x.shape[1], ThreadRanks(r, size)) for r in range(size))]
    sums = [product(x[:, a:b], w[:, a:b], torch.zeros(len(w))) for a, b in parts]
    return torch.stack(sums).sum(0)


def test_parts_that_are_rounded_before_the_sum_have_other_bits() -> None:
    x, w = numbers(5, 40, 96), numbers(6, 40, 96)
    whole = product(x, w, torch.zeros(40))
    (found, _) = divided_product(2, x, w, torch.zeros(40))
    assert torch.equal(found, whole) and not torch.equal(rounded_parts(2, x, w), whole)


def test_a_product_is_as_accurate_as_float32() -> None:
    x, w = numbers(7, 30, 256), numbers(8, 30, 256)
    exact = x.double() @ w.double().t()
    scale = x.double().abs().amax(1, keepdim=True) * w.double().abs().amax(1) * 256**0.5
    (found, _) = divided_product(2, x, w, torch.zeros(30))
    # inputs are rounded to 2^-27 of the largest of their row, weights to 2^-24, and the result to 2^-24
    assert ((found.double() - exact).abs() / scale).max() < 2.0**-23


def test_a_number_that_is_not_finite_is_named() -> None:
    x = torch.ones(1, 8)
    x[0, 6] = float("inf")
    with pytest.raises(NumericsError, match=r"^x is not finite"):
        divided_product(2, x, torch.ones(2, 8), torch.zeros(2))


def statistics(
    logits: Tensor, other: Tensor, targets: Tensor, eligible: Tensor | None, share: Share | None
) -> tuple[Tensor, ...]:
    """Everything that is computed of logits, and gradients of what is differentiable."""
    variable = logits.clone().requires_grad_()
    logprobs_, entropies = logprobs.token_statistics(variable, targets, 0.7, eligible, "exact", share)
    divergence = logprobs.kl_loss(variable, other, 0.7, eligible, "exact", share)
    seeds = [numbers(9 + i, len(logits)) for i in range(3)]
    torch.autograd.backward([logprobs_, entropies, divergence], seeds)
    scores = logprobs.score(logits, other, targets, 0.7, eligible, "exact", share)
    top = logprobs.top_logits(logits, 0.7, 3, share)
    reverse = logprobs.kl_divergence(other, logits, 0.7, eligible, share)
    assert variable.grad is not None
    found = logprobs_, entropies, divergence, reverse, *vars(scores).values(), top[0], top[1], variable.grad
    return tuple(x.detach() for x in found)


@settings(max_examples=12, deadline=None)
@given(SIZES, st.integers(1, 4), st.integers(4, 200), st.integers(0, 2**31), st.booleans())
def test_statistics_over_a_vocabulary_have_the_bits_of_one_process(
    size: int, rows: int, vocabulary: int, seed: int, cut: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, other = (torch.randn(rows, vocabulary, generator=generator) * 4 for _ in range(2))
    logits[:, -1] = logits[:, 0]  # a tie between processes
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    eligible = None
    if cut:
        eligible = (torch.rand(rows, vocabulary, generator=generator) < 0.3).scatter_(1, targets[:, None], True)
    whole = statistics(logits, other, targets, eligible, None)

    def work(ranks: ThreadRanks) -> tuple[Tensor, ...]:
        share = share_of(vocabulary, ranks)
        own = None if eligible is None else share.own(eligible)
        *found, gradient = statistics(share.own(logits), share.own(other), targets, own, share)
        return *found, share.joined(gradient)

    for found in in_threads(size, work):
        for i, (mine, expected) in enumerate(zip(found, whole, strict=True)):
            assert mine.dtype == expected.dtype and torch.equal(mine, expected), i


def test_statistics_of_rounded_parts_have_other_bits() -> None:
    logits = numbers(11, 50, 64)
    whole = logprobs.token_statistics(logits, torch.zeros(50, dtype=torch.int64), 1.0, None, "exact")[0]
    parts = [
        logprobs.token_statistics(part, torch.zeros(50, dtype=torch.int64), 1.0, None, "exact")[0]
        for part in (logits[:, :32], logits[:, 32:])
    ]
    totals = [part[:, 0] - own for part, own in zip((logits[:, :32], logits[:, 32:]), parts, strict=True)]
    assert not torch.equal(logits[:, 0] - torch.logaddexp(*totals), whole)


def test_statistics_beside_float64() -> None:
    logits = numbers(12, 20, 90)
    targets = torch.arange(20)

    def work(ranks: ThreadRanks) -> tuple[Tensor, Tensor]:
        share = share_of(90, ranks)
        return logprobs.token_statistics(share.own(logits), targets, 1.0, None, "exact", share)

    found, _ = in_threads(2, work)
    exact = logits.double().log_softmax(-1)
    assert torch.allclose(found[0].double(), exact[torch.arange(20), targets], rtol=3e-7, atol=3e-7)
    entropy = -(exact.exp() * exact).sum(-1)
    assert torch.allclose(found[1].double(), entropy, rtol=1e-6, atol=1e-6)
