"""Log-probs, entropies and distances beside float64. Their bits are tested in `test_tokens.py`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.numerics.token_statistics import kl_divergence, prob_sq_sum, score, token_statistics
from tests.support.models import seeded


def case(n: int, v: int, seed: int, spread: float, cut: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits [n, v], targets [n] and, if `cut`, eligible [n, v] that holds each target."""
    generator = seeded(seed)
    logits = torch.randn(n, v, generator=generator) * spread
    targets = torch.randint(0, v, (n,), generator=generator)
    if not cut:
        return logits, targets, None
    eligible = torch.rand(n, v, generator=generator) < 0.4
    return logits, targets, eligible.scatter_(-1, targets[:, None], True)


def reference(logits: Tensor, temperature: float, eligible: Tensor | None) -> Tensor:
    """Log-probs in float64; -inf where not eligible. The division is the float32 one of the definition."""
    scaled = (logits / temperature).double()
    return (scaled if eligible is None else scaled.masked_fill(~eligible, -math.inf)).log_softmax(-1)


def entropy_of(log_p: Tensor) -> Tensor:
    return -torch.where(log_p.exp() > 0, log_p.exp() * log_p, 0.0).sum(-1)


cases = st.tuples(
    st.integers(1, 5), st.integers(1, 300), st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 3.0, 30.0]), st.booleans()
)
temperatures = st.sampled_from([1.0, 0.7, 2.5])


@given(cases, temperatures)
def test_statistics_are_those_of_the_renormalised_distribution(
    drawn: tuple[int, int, int, float, bool], temperature: float
) -> None:
    logits, targets, eligible = case(*drawn)
    logprobs, entropies = token_statistics(logits, targets, temperature, eligible, "deterministic")
    log_p = reference(logits, temperature, eligible)
    expected = log_p.gather(-1, targets[:, None])[:, 0]
    # float32 result of magnitude up to 300, half a unit there is 2^-17; exp is right to 1e-7
    assert torch.allclose(logprobs.double(), expected, rtol=1e-6, atol=1e-6)
    # shifted logits are rounded to float32
    assert torch.allclose(entropies.double(), entropy_of(log_p), rtol=1e-6, atol=1e-6)
    squares = prob_sq_sum(logits, temperature, eligible).double()
    # exp is right to 1e-7
    assert torch.allclose(squares, log_p.exp().square().sum(-1), rtol=5e-6, atol=0)


@pytest.mark.parametrize("cut", [False, True])
def test_probabilities_of_the_eligible_tokens_sum_to_one(cut: bool) -> None:
    logits, _, eligible = case(4, 50, 0, 3.0, cut)
    total = torch.zeros(4, dtype=torch.float64)
    for token in range(50):
        targets = torch.full((4,), token)
        logprobs, _ = token_statistics(logits, targets, 0.7, eligible, "deterministic")
        total += torch.where(eligible[:, token], logprobs.double().exp(), 0.0) if cut else logprobs.double().exp()
    # 50 float32 log-probs, each right to half a unit in the last place
    assert torch.allclose(total, torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-6)


def test_the_tail_of_a_large_vocabulary_counts() -> None:
    # half of the mass is spread over all tokens but one; H = ln 2 + ln(V) / 2
    v = 151_936
    logits = torch.zeros(1, v)
    logits[0, 7] = math.log(v)
    other = logits + torch.randn(1, v, generator=seeded(0)) * 0.1
    _, entropy = token_statistics(logits, torch.tensor([7]), 1.0, None, "deterministic")
    # each small mass is rounded to a unit of 2^-39, up to 1.4e-7 of it, all in the same direction here
    log_p, log_q = reference(logits, 1.0, None), reference(other, 1.0, None)
    assert float(entropy) == pytest.approx(float(entropy_of(log_p)), abs=1e-6)
    assert float(entropy) == pytest.approx(math.log(2) + math.log(v) / 2, abs=5e-5)  # the tail is one token short
    expected = float((log_p.exp() * (log_p - log_q)).sum())
    assert float(kl_divergence(logits, other, 1.0, None)) == pytest.approx(expected, abs=1e-7)


# sizes of the logits, and how far the likeliest token lies above the others
@pytest.mark.parametrize(("scale", "lead"), [(1.0, 0.0), (3.0, 0.0), (3.0, 15.0), (1.0, 20.0), (2.0, 22.0)])
def test_statistics_over_a_large_vocabulary_are_at_least_as_accurate_as_float32(scale: float, lead: float) -> None:
    logits = torch.randn(8, 151_936, generator=seeded(0)) * scale
    logits[:, 0] += lead
    other = logits + torch.randn(8, 151_936, generator=seeded(1)) * 0.05
    found = score(logits, other, torch.zeros(8, dtype=torch.int64), 1.0, None, "deterministic")

    def by_torch(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        log_p, log_q = (x.to(dtype).log_softmax(-1) for x in (logits, other))
        p = log_p.exp()
        return -(p * log_p).sum(-1), (p * (log_p - log_q)).sum(-1), p.square().sum(-1)

    ours = found.entropies, found.ref_kl, found.prob_sq_sums
    for got, stock, true in zip(ours, by_torch(torch.float32), by_torch(torch.float64), strict=True):
        errors = [float((x.double() - true).abs().max()) for x in (got, stock)]
        assert errors[0] <= errors[1]


@given(cases, temperatures, st.sampled_from([0.0, 1e-3, 1.0]))
def test_the_divergence_is_its_definition_and_not_negative(
    drawn: tuple[int, int, int, float, bool], temperature: float, distance: float
) -> None:
    logits, _, eligible = case(*drawn)
    other = logits + distance * torch.randn(logits.shape, generator=seeded(drawn[2] + 1))
    got = kl_divergence(logits, other, temperature, eligible)
    log_p, log_q = reference(logits, temperature, eligible), reference(other, temperature, eligible)
    terms = torch.where(log_p.exp() > 0, log_p.exp() * (log_p - log_q), 0.0)
    # exp is right to 1e-7, and both normalisers carry that error into every difference
    assert torch.allclose(got.double(), terms.sum(-1), rtol=1e-5, atol=5e-7)
    assert bool((got >= -5e-7).all())
    if distance == 0.0:
        assert not got.any()


@given(cases, temperatures)
def test_gradients_are_those_of_autograd_in_float64(
    drawn: tuple[int, int, int, float, bool], temperature: float
) -> None:
    logits, targets, eligible = case(*drawn)
    seeds = torch.randn(2, len(logits), generator=seeded(drawn[2] + 1))
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    torch.autograd.backward(token_statistics(ours, targets, temperature, eligible, "deterministic"), tuple(seeds))
    scaled = theirs / temperature
    if eligible is not None:
        scaled = scaled.masked_fill(~eligible, -math.inf)
    log_p = scaled.log_softmax(-1)
    # a term that is cut off contributes nothing, but its 0 * -inf would
    finite = log_p if eligible is None else torch.where(eligible, log_p, 0.0)
    terms = finite.exp() * finite
    logprobs, entropies = log_p.gather(-1, targets[:, None])[:, 0], -terms.sum(-1)
    torch.autograd.backward((logprobs, entropies), tuple(seeds.double()))
    # terms of up to 3 * 100 * p, float32 logits near 100 divided once more: 1e-5
    assert torch.allclose(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)
    if eligible is not None:
        assert not ours.grad[~eligible].any()


def test_native_statistics_are_close_to_deterministic_ones() -> None:
    for cut in (False, True):
        logits, targets, eligible = case(50, 300, 0, 3.0, cut)
        for here, native in zip(
            token_statistics(logits, targets, 0.7, eligible, "deterministic"),
            token_statistics(logits, targets, 0.7, eligible, "native"),
            strict=True,
        ):
            # two float32 computations of numbers near 10
            assert torch.allclose(here, native, rtol=1e-6, atol=3e-6)


def masked_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, other logits, targets and the tokens that are eligible: targets are among them."""
    generator = torch.Generator().manual_seed(5)
    logits, other = torch.randn(6, 9, generator=generator), torch.randn(6, 9, generator=generator)
    eligible = torch.rand(6, 9, generator=generator) < 0.6
    targets = torch.randint(0, 9, (6,), generator=generator)
    return logits, other, targets, eligible.scatter(1, targets[:, None], True)


def reference_kl(logits: torch.Tensor, other: torch.Tensor, temperature: float, eligible: torch.Tensor | None):
    """sum p (log p - log q) in float64 over the eligible tokens alone, row by row."""
    rows = []
    for row in range(len(logits)):
        keep = slice(None) if eligible is None else eligible[row]
        p = torch.log_softmax(logits[row][keep].to(torch.float64) / temperature, -1)
        q = torch.log_softmax(other[row][keep].to(torch.float64) / temperature, -1)
        rows.append((p.exp() * (p - q)).sum())
    return torch.stack(rows)


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("cut", [False, True])
def test_the_divergence_as_a_loss_has_the_gradient_of_the_divergence(mode: str, cut: bool) -> None:
    logits, other, _, eligible = masked_case()
    mask = eligible if cut else None
    leaf, exact = logits.clone().requires_grad_(), logits.to(torch.float64).requires_grad_()
    loss = kl_divergence(leaf, other, 0.7, mask, mode)
    expected = reference_kl(exact, other, 0.7, mask)
    seeds = torch.arange(1.0, 7.0)
    loss.backward(seeds)
    expected.backward(seeds.to(torch.float64))
    assert loss.dtype == torch.float32 and exact.grad is not None and leaf.grad is not None
    # float32 logits of size 3 divided by 0.7: 1e-6 relative
    assert torch.allclose(loss.to(torch.float64), expected, rtol=0, atol=2e-6)
    assert torch.allclose(leaf.grad.to(torch.float64), exact.grad, rtol=0, atol=1e-5)


def test_equal_distributions_have_no_divergence_and_no_gradient() -> None:
    logits, _, _, eligible = masked_case()
    leaf = logits.clone().requires_grad_()
    loss = kl_divergence(leaf, logits, 1.0, eligible, "deterministic")
    loss.backward(torch.ones(6))
    assert leaf.grad is not None and not loss.any() and not leaf.grad.any(), "exactly zero, not nearly"


def test_native_gradients_are_numbers_where_tokens_were_cut() -> None:
    """0 times minus infinity is NaN: tokens that are not eligible must not reach the entropy's gradient."""
    logits, _, targets, eligible = masked_case()
    leaf, exact = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    for x, mode in ((leaf, "native"), (exact, "deterministic")):
        logprobs, entropies = token_statistics(x, targets, 0.7, eligible, mode)
        (logprobs.sum() - 0.5 * entropies.sum()).backward()
    assert leaf.grad is not None and exact.grad is not None and torch.isfinite(leaf.grad).all()
    assert not leaf.grad[~eligible].any()
    # float32 softmax
    assert torch.allclose(leaf.grad, exact.grad, rtol=0, atol=1e-5)
