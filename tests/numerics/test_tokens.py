"""Rows of logits: bit for bit the definition; what is not finite ends the run."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.base.errors import NumericsError
from ppo_repro.numerics import divergence, noise, token_sampling
from ppo_repro.numerics import token_statistics as tokens
from ppo_repro.numerics.definition import sampling
from ppo_repro.numerics.definition import tokens as definition
from ppo_repro.numerics.logit_scale import LogitScale
from tests.support.models import seeded
from tests.support.sampler import drawn_case

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300]
KINDS = ["normal", "ties", "wide", "zeros", "tiny"]


def logits_of(n: int, v: int, seed: int, kind: str) -> Tensor:
    """Logits of a few shapes: among them equal ones, exponentials that are denormal or 0, zeros of both signs."""
    z = torch.randn(n, v, generator=seeded(seed)) * 3
    if kind == "ties":
        return z.round()
    if kind == "wide":
        return z * 20
    if kind == "zeros":
        return z * 0.0
    return z * 1e-40 if kind == "tiny" else z


rows = st.tuples(st.integers(1, 4), st.sampled_from(LENGTHS), st.integers(0, 10**6), st.sampled_from(KINDS))
temperatures = st.sampled_from([1.0, 0.7, 2.5])


def case(n: int, v: int, seed: int, kind: str, masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits [n, v], targets [n], and eligible tokens [n, v], among them the targets, if `masked`."""
    targets = torch.randint(0, v, (n,), generator=seeded(seed + 1))
    eligible = torch.rand(n, v, generator=seeded(seed + 2)) < 0.4
    return logits_of(n, v, seed, kind), targets, eligible.scatter_(-1, targets[:, None], True) if masked else None


def array(x: Tensor | None) -> np.ndarray | None:
    return None if x is None else x.numpy()


def same(found: Tensor, expected: np.ndarray) -> bool:
    return found.detach().numpy().tobytes() == expected.tobytes()


@given(rows, temperatures, st.booleans())
def test_statistics_and_their_gradient(drawn: tuple[int, int, int, str], temperature: float, masked: bool) -> None:
    z, targets, eligible = case(*drawn, masked)
    z.requires_grad_()
    found = (*tokens.token_statistics(z, targets, temperature, eligible, "deterministic"),)
    expected = definition.statistics(z.detach().numpy(), targets.numpy(), temperature, array(eligible))
    expected_mass = definition.cumulative(z.detach().numpy(), targets.numpy(), temperature, array(eligible))
    scored = tokens.scoring_statistics(z, targets, temperature, eligible, "deterministic")
    assert all(same(a, b) for a, b in zip(scored, (*expected, expected_mass), strict=True))
    assert all(same(a, b) for a, b in zip(found, expected[:2], strict=True))
    native = tokens.scoring_statistics(z, targets, temperature, eligible, "native")
    assert same(native.prob_sq_sums, expected[2])
    assert same(native.cumulative_probs, expected_mass)
    seeds = torch.randn(2, len(z), generator=seeded(drawn[2] + 3)) * (torch.arange(len(z)) > 0)  # the first row's: 0
    torch.autograd.backward(found, tuple(seeds))
    arguments = z.detach().numpy(), targets.numpy(), temperature, array(eligible), *seeds.numpy()
    assert z.grad is not None
    assert same(z.grad, definition.statistics_gradient(*arguments))


def test_the_cumulative_probability_has_the_token_and_all_that_come_before_it() -> None:
    p = torch.tensor([[0.1, 0.4, 0.1, 0.25, 0.15]] * 5, dtype=torch.float64)
    found = tokens.scoring_statistics(p.log().float(), torch.arange(5), 1.0, None, "deterministic").cumulative_probs
    assert (found - torch.tensor([0.9, 0.4, 1.0, 0.65, 0.8])).abs().max() < 1e-6
    kept = torch.tensor([[True, True, False, True, False]] * 5)
    cut = tokens.scoring_statistics(p.log().float(), torch.arange(5), 1.0, kept, "deterministic").cumulative_probs
    assert (cut[[0, 1, 3]] - torch.tensor([1.0, 0.4 / 0.75, 0.65 / 0.75])).abs().max() < 1e-6
    assert cut[[2, 4]].isnan().all()


def test_logits_that_the_temperature_makes_equal_have_the_order_of_top_p() -> None:
    """The control is temperature 1."""
    z = torch.tensor([[2.0 - 2.0**-22, 2.0 - 2.0**-23]] * 2)
    for temperature, first in ((1.9, 0), (1.0, 1)):
        assert int(token_sampling.cut_tokens(z / temperature, 1, 1.0)[0][0].int().argmax()) == first
        found = tokens.scoring_statistics(z, torch.arange(2), temperature, None, "deterministic").cumulative_probs
        assert found[first] < 0.51
        assert found[1 - first] == 1.0


@given(rows, st.sampled_from([(1.0, 0.0), (8.0, 0.0), (0.3, 0.0), (1.0, 30.0), (3.0, 0.7)]))
def test_what_follows_the_head(drawn: tuple[int, int, int, str], scale: tuple[float, float]) -> None:
    """Bit for bit the definition, which is near float64. Control: scales differ by more than the bound."""
    head = logits_of(*drawn)
    head.requires_grad_()
    seed = torch.randn(head.shape, generator=seeded(drawn[2] + 3))
    found = LogitScale(*scale)(head * 1, deterministic=True)
    found.backward(seed)
    assert head.grad is not None
    assert same(found, definition.scale_logits(head.detach().numpy(), *scale))
    assert same(head.grad, definition.scale_logits_gradient(found.detach().numpy(), seed.numpy(), *scale))
    wide = head.detach().double().requires_grad_()
    expected = LogitScale(*scale)(wide, deterministic=False)
    expected.backward(seed.double())
    assert wide.grad is not None
    assert torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-40)
    assert torch.allclose(head.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)


def test_each_number_after_the_head_counts() -> None:
    z = logits_of(3, 40, 0, "normal")
    found = [LogitScale(*scale)(z.clone(), deterministic=True) for scale in ((1.0, 0.0), (8.0, 0.0), (8.0, 0.1))]
    assert min(float((a - b).abs().max()) for a, b in pairwise(found)) > 0.01


@given(rows, temperatures, st.booleans(), st.sampled_from([0.0, 0.1, 3.0]))
def test_divergence_and_its_gradient(
    drawn: tuple[int, int, int, str], temperature: float, masked: bool, distance: float
) -> None:
    z, _, eligible = case(*drawn, masked)
    q = z + torch.randn(z.shape, generator=seeded(drawn[2] + 4)) * distance
    z.requires_grad_()
    found = divergence.kl_divergence(z, q, temperature, eligible)
    arguments = z.detach().numpy(), q.numpy(), temperature, array(eligible)
    assert same(found, definition.divergence(*arguments))
    seed = torch.randn(len(z), generator=seeded(drawn[2] + 3))
    found.backward(seed)
    assert z.grad is not None
    assert same(z.grad, definition.divergence_gradient(*arguments, seed.numpy()))


@given(rows, st.sampled_from([0, 1, 5, 40]), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_kept_tokens(drawn: tuple[int, int, int, str], top_k: int, top_p: float) -> None:
    z = logits_of(*drawn)
    found = token_sampling.cut_tokens(z, top_k, top_p)
    rows = [sampling.cut(row, top_k, top_p) for row in z.numpy()]
    assert all(same(a, np.stack(b)) for a, b in zip(found, zip(*rows, strict=True), strict=True))
    assert found[0].any(-1).all()
    assert (found[1][found[0]] < (top_k or z.shape[1])).all()
    if top_p == 1.0 and (top_k == 0 or top_k >= z.shape[1]):
        assert found[0].all()
        assert (found[2] == 0).all()


@given(rows, temperatures, st.booleans())
def test_sampled_tokens(drawn: tuple[int, int, int, str], temperature: float, cut: bool) -> None:
    z = logits_of(*drawn)
    generator = seeded(drawn[2])
    seeds = torch.randint(-(2**62), 2**62, (len(z),), generator=generator)
    positions = torch.randint(0, 2**31, (len(z),), generator=generator)
    kept = token_sampling.cut_tokens(z / temperature, 20, 0.9)[:2] if cut else None
    found = token_sampling.sample_tokens(z, seeds, positions, temperature, kept)
    for i, row in enumerate(z.numpy()):
        of_row = None if kept is None else (kept[0][i].numpy(), kept[1][i].numpy())
        token, logprob = sampling.sample(row, int(seeds[i]), int(positions[i]), temperature, of_row)
        assert (found[0][i], found[1][i]) == (token, logprob)


@settings(max_examples=20)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1))
def test_noise(seed: int, position: int) -> None:
    found = noise.normal_noise(torch.tensor([seed]), torch.tensor([position]), 70)
    assert same(found[0], sampling.normal_noise(seed, position, np.arange(70)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_end_the_run(value: float) -> None:
    z, seeds, positions = drawn_case(3, 40, 0)
    bad = z.clone()
    bad[1, 17] = value
    calls = [
        lambda: tokens.token_statistics(bad, positions % 40, 1.0, None, "deterministic"),
        lambda: tokens.token_statistics(bad, positions % 40, 1.0, None, "native"),
        lambda: tokens.scoring_statistics(bad, positions % 40, 1.0, None, "native"),
        lambda: divergence.kl_divergence(bad, z, 1.0, None),
        lambda: divergence.kl_divergence(z, bad, 1.0, None),
        lambda: token_sampling.cut_tokens(bad, 5, 1.0),
        lambda: token_sampling.sample_tokens(bad, seeds, positions, 1.0, None),
    ]
    for call in calls:
        with pytest.raises(NumericsError, match="not finite, or further apart than float32 reaches"):
            call()


def test_logits_that_are_too_far_apart_end_the_run_and_no_target_is_outside() -> None:
    with pytest.raises(NumericsError):
        tokens.token_statistics(torch.tensor([[3e38, -3e38]]), torch.tensor([0]), 1.0, None, "deterministic")
    with pytest.raises(NumericsError):  # the division by the temperature overflows
        tokens.token_statistics(torch.tensor([[3e38, 3e38]]), torch.tensor([0]), 0.5, None, "deterministic")
    for target in (-1, 2):
        with pytest.raises(IndexError):
            tokens.token_statistics(torch.zeros(1, 2), torch.tensor([target]), 1.0, None, "deterministic")
