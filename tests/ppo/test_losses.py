"""The clipped surrogate, its flags and the clipped value loss: by hand, by definition, and their gradients."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.numerics import elementwise
from ppo_repro.ppo import kl
from ppo_repro.ppo.losses import (
    Band,
    ClipFlag,
    clip_flags,
    clipped_surrogate,
    clipped_value_loss,
    flag_names,
    probability_ratios,
    value_clip_binds,
)
from ppo_repro.records.schema import UPDATES
from tests.support.float32 import SMALLEST_NORMAL, TINIEST, bits, finite, pairs_of_categoricals, tensor

EPS = 0.2
BAND = Band(EPS, EPS)
LOW, HIGH = np.float32(1.0 - EPS), np.float32(1.0 + EPS)
EDGES = [float(np.nextafter(b, d, dtype=np.float32)) for b in (LOW, HIGH) for d in (np.float32(0), b, np.float32(9))]
ratio_values = st.one_of(st.sampled_from([0.0, TINIEST, 1.0, *EDGES]), finite(0.0, 3.0), finite(0.0, 1e38))
advantage_values = st.one_of(
    st.sampled_from([0.0, -0.0, TINIEST, -TINIEST, SMALLEST_NORMAL / 2, -SMALLEST_NORMAL, 1.0, -1.0]), finite()
)
tokens = st.lists(st.tuples(ratio_values, advantage_values), min_size=1, max_size=30)


def columns(rows: list[tuple[float, ...]]) -> tuple[Tensor, ...]:
    return tuple(tensor(list(column)) for column in zip(*rows, strict=True))


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    """Of each token's loss with respect to its own input."""
    return torch.autograd.grad(loss, x, torch.ones_like(loss))[0]


def surrogate_gradient(ratios: Tensor, advantages: Tensor, band: Band = BAND) -> Tensor:
    ratios = ratios.clone().requires_grad_()
    return gradient(clipped_surrogate(ratios, advantages, band), ratios)


def binds(ratios: Tensor, advantages: Tensor) -> np.ndarray:
    """Where the clip removes the gradient, in NumPy."""
    r, a = ratios.numpy(), advantages.numpy()
    return ((r > HIGH) & (a > 0)) | ((r < LOW) & (a < 0))


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope", "flag"),
    [  # the band is [0.75, 1.25]
        (2.0, 0.5, -1.0, -2.0, "wrong_low"),
        (2.0, 0.75, -1.5, -2.0, "none"),
        (2.0, 1.0, -2.0, -2.0, "none"),
        (2.0, 1.25, -2.5, -2.0, "none"),
        (2.0, 1.5, -2.5, 0.0, "clip_high"),
        (2.0, 64.0, -2.5, 0.0, "clip_high"),
        (-2.0, 0.0, 1.5, 0.0, "clip_low"),
        (-2.0, 0.5, 1.5, 0.0, "clip_low"),
        (-2.0, 0.75, 1.5, 2.0, "none"),
        (-2.0, 1.0, 2.0, 2.0, "none"),
        (-2.0, 1.25, 2.5, 2.0, "none"),
        (-2.0, 1.5, 3.0, 2.0, "wrong_high"),
        (-2.0, 64.0, 128.0, 2.0, "wrong_high"),
        (0.0, 0.5, 0.0, 0.0, "none"),
        (0.0, 1.0, 0.0, 0.0, "none"),
        (0.0, 1.5, 0.0, 0.0, "none"),
    ],
)
def test_surrogate_by_hand(advantage: float, ratio: float, loss: float, slope: float, flag: str) -> None:
    r, a = tensor([ratio]), tensor([advantage])
    assert clipped_surrogate(r, a, Band(0.25, 0.25)).item() == loss
    assert surrogate_gradient(r, a, Band(0.25, 0.25)).item() == slope
    assert flag_names(clip_flags(r, a, Band(0.25, 0.25))) == [flag]


@given(tokens)
def test_surrogate_is_its_definition_bit_for_bit(rows: list[tuple[float, float]]) -> None:
    r, a = columns(rows)
    with np.errstate(over="ignore"):  # a huge ratio times a huge advantage is infinite on both sides
        expected = -np.minimum(r.numpy() * a.numpy(), np.clip(r.numpy(), LOW, HIGH) * a.numpy())
    found = clipped_surrogate(r, a, BAND)
    assert found.dtype == torch.float32 and bits(found) == expected.view(np.int32).tolist()


@given(tokens)
def test_gradient_is_zero_where_the_clip_binds_and_unclipped_elsewhere(rows: list[tuple[float, float]]) -> None:
    r, a = columns(rows)
    leaf = r.clone().requires_grad_()
    unclipped = gradient(-(leaf * a), leaf).numpy()
    expected = torch.from_numpy(np.where(binds(r, a), np.float32(0), unclipped))
    assert bits(surrogate_gradient(r, a)) == bits(expected)
    assert bits(torch.from_numpy(unclipped)) == bits(-a)


@given(tokens)
def test_flags_name_the_removed_gradients_and_all_of_the_band(rows: list[tuple[float, float]]) -> None:
    r, a = columns(rows)
    flags = clip_flags(r, a, BAND)
    assert flags.dtype == torch.uint8
    names = flag_names(flags)
    above, below = (r.numpy() > HIGH).tolist(), (r.numpy() < LOW).tolist()
    removed = (surrogate_gradient(r, a) == 0).tolist()
    for name, high, low, no_gradient, advantage in zip(names, above, below, removed, a.tolist(), strict=True):
        assert (name in ("clip_high", "wrong_high")) == (high and advantage != 0)
        assert (name in ("clip_low", "wrong_low")) == (low and advantage != 0)
        assert (name in ("clip_high", "clip_low")) == (no_gradient and advantage != 0)


@given(tokens, st.sampled_from([0.5, 2.0, 3.0]))
def test_flags_see_the_sign_of_the_advantage_alone(rows: list[tuple[float, float]], factor: float) -> None:
    r, a = columns([(r, a) for r, a in rows if abs(a) != TINIEST] or [(1.0, 1.0)])  # half of that one is zero
    flags = clip_flags(r, a, BAND)
    assert torch.equal(clip_flags(r, a * factor, BAND), flags)
    mirror = {
        "none": "none",
        "clip_high": "wrong_high",
        "wrong_high": "clip_high",
        "clip_low": "wrong_low",
        "wrong_low": "clip_low",
    }
    assert flag_names(clip_flags(r, -a, BAND)) == [mirror[name] for name in flag_names(flags)]


@given(tokens, st.floats(0.01, 0.98), st.floats(0.01, 0.98))
def test_a_wider_band_removes_no_further_gradient(rows: list[tuple[float, float]], one: float, other: float) -> None:
    r, a = columns(rows)
    narrow, wide = (clip_flags(r, a, Band(eps, eps)) for eps in sorted((one, other)))
    assert bool(((wide == ClipFlag.NONE) | (wide == narrow)).all())


@given(st.lists(finite(), min_size=1, max_size=30))
def test_equal_log_probs_give_a_ratio_of_exactly_one(logprobs: list[float]) -> None:
    x = tensor([*logprobs, 0.0, -0.0, TINIEST, -TINIEST, -SMALLEST_NORMAL])
    assert bits(probability_ratios(x, x.clone())) == bits(torch.ones_like(x))
    assert torch.equal(
        clip_flags(probability_ratios(x, x), torch.ones_like(x), Band(1e-6, 1e-6)),
        torch.zeros(len(x), dtype=torch.uint8),
    )


@given(st.lists(st.tuples(finite(-40.0, 0.0), finite(-40.0, 0.0)), min_size=1, max_size=30))
def test_ratios_are_exponentials_of_the_difference_and_their_own_gradient(rows: list[tuple[float, float]]) -> None:
    new, anchor = columns(rows)
    new.requires_grad_()
    ratios = probability_ratios(new, anchor)
    assert bits(gradient(ratios, new)) == bits(ratios)
    assert bits(ratios) == bits(elementwise.exp((new - anchor).detach())), "not the exponential of a library"
    for found, x in zip(ratios.tolist(), (new - anchor).tolist(), strict=True):
        assert found == pytest.approx(math.exp(x), rel=1e-7)  # what `elementwise.exp` promises


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [  # old value 1, return 3, clip range 0.25
        (1.0, 2.0, -2.0, False),
        (1.125, 1.7578125, -1.875, False),  # (3 - 1.125)^2 / 2
        (1.25, 1.53125, -1.75, False),
        (1.5, 1.53125, 0.0, True),  # clipped to 1.25, which is farther from 3
        (3.0, 1.53125, 0.0, True),
        (4.75, 1.53125, 1.75, False),  # just as far on the other side: a tie keeps the gradient
        (5.0, 2.0, 2.0, False),
        (0.5, 3.125, -2.5, False),  # clipped to 0.75, which is nearer
        (-1.0, 8.0, -4.0, False),
    ],
)
def test_value_loss_by_hand(value: float, loss: float, slope: float, clipped: bool) -> None:
    new, old, returns = tensor([value]).requires_grad_(), tensor([1.0]), tensor([3.0])
    found = clipped_value_loss(new, old, returns, 0.25)
    assert found.item() == loss and gradient(found, new).item() == slope
    assert value_clip_binds(new, old, returns, 0.25).item() is clipped


sixteenths = st.integers(-128, 128).map(lambda n: n / 16)  # every step below is exact in float32


@given(st.lists(st.tuples(sixteenths, sixteenths, sixteenths), min_size=1, max_size=30), st.sampled_from([0.25, 2.0]))
def test_value_loss_is_its_definition_exactly(rows: list[tuple[float, float, float]], clip_range: float) -> None:
    new, old, returns = columns(rows)
    new.requires_grad_()
    loss, binding = clipped_value_loss(new, old, returns, clip_range), value_clip_binds(new, old, returns, clip_range)
    slopes = gradient(loss, new)
    for i, row in enumerate(rows):
        v, v_old, target = map(Fraction, row)
        bound = Fraction(clip_range)
        plain = (v - target) ** 2
        limited = (v_old + max(-bound, min(bound, v - v_old)) - target) ** 2
        assert Fraction(loss[i].item()) == max(plain, limited) / 2
        assert Fraction(slopes[i].item()) == (0 if limited > plain else v - target)
        assert binding[i].item() == (limited > plain)


wide = finite(-1e15, 1e15)


@given(st.lists(st.tuples(wide, wide, wide), min_size=1, max_size=30), st.floats(1e-3, 10))
def test_value_loss_is_never_below_the_unclipped_one(rows: list[tuple[float, float, float]], clip_range: float) -> None:
    new, old, returns = columns(rows)
    new.requires_grad_()
    loss, binding = clipped_value_loss(new, old, returns, clip_range), value_clip_binds(new, old, returns, clip_range)
    error = (new - returns).detach()
    unclipped = error * error * 0.5
    assert loss.dtype == torch.float32
    assert bool((loss >= unclipped).all()) and bits(loss[~binding]) == bits(unclipped[~binding])
    assert bits(gradient(loss, new)) == bits(torch.where(binding, 0.0, error))


@given(st.lists(st.tuples(wide, wide), min_size=1, max_size=30), st.floats(1e-3, 10))
def test_an_unmoved_value_is_never_clipped(rows: list[tuple[float, float]], clip_range: float) -> None:
    values, returns = columns(rows)
    assert not value_clip_binds(values, values.clone(), returns, clip_range).any()


@given(st.lists(st.tuples(finite(-4, 4), finite(-4, 4), finite(-4, 4)), min_size=1, max_size=30))
def test_a_step_within_the_range_is_never_clipped(rows: list[tuple[float, float, float]]) -> None:
    """Although old + (new - old) is often rounded to another number than new."""
    new, old, returns = columns(rows)
    assert not value_clip_binds(new, old, returns, 10.0).any()


def test_rounding_of_a_step_within_the_range_is_no_clipping() -> None:
    new, old = tensor([0.1]), tensor([8.3])
    rounded = old + (new - old)
    assert rounded > new and rounded - new < 1e-6
    assert not value_clip_binds(new, old, tensor([-1.0]), 10.0).any()


def test_clipping_does_not_bound_the_ratio() -> None:
    """Wrong claim: "the policy cannot change by more than 20% per update". Adam's momentum carries it on."""
    logits = torch.zeros(2, requires_grad=True)
    anchor = torch.log_softmax(logits, 0)[:1].detach()
    optimizer = torch.optim.Adam([logits], lr=0.05)
    history = []
    for _ in range(40):
        optimizer.zero_grad()
        ratios = probability_ratios(torch.log_softmax(logits, 0)[:1], anchor)
        clipped_surrogate(ratios, torch.ones(1), BAND).sum().backward()
        history.append((ratios.item(), logits.grad.abs().max().item()))
        optimizer.step()
    crossed = next(i for i, (ratio, _) in enumerate(history) if ratio > HIGH)
    assert crossed < 10 and all(slope == 0 for _, slope in history[crossed:]), "the clip removes the gradient"
    assert all(ratio > HIGH for ratio, _ in history[crossed:]) and history[-1][0] > 1.3, "and bounds nothing"


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gradient_at_a_ratio_of_one_is_the_policy_gradient(advantage: float) -> None:
    """Wrong claim: "the gradient is zero if r A >= clip(r) A". In the band both are equal, so nothing would learn."""
    r, a = tensor([1.0]), tensor([advantage])
    claimed_zero = (r * a >= r.clamp(1 - EPS, 1 + EPS) * a).item()
    assert claimed_zero and surrogate_gradient(r, a).item() == -advantage


def test_a_large_value_error_keeps_its_gradient() -> None:
    """Wrong claim: "clip the value loss to [-10, 10] for stability". That removes the largest errors' gradient."""
    value = tensor([1000.0]).requires_grad_()
    limited = (0.5 * value**2).clamp(-10, 10)
    assert gradient(limited, value).item() == 0
    for old in (1000.0, 0.0):  # not yet moved, and moved away from the return
        assert gradient(clipped_value_loss(value, tensor([old]), tensor([0.0]), EPS), value).item() == 1000


@given(pairs_of_categoricals())
def test_mean_new_minus_old_is_a_divergence_with_the_wrong_sign(pair: tuple[list[float], list[float]]) -> None:
    """Wrong claim: "stop early once mean(new - old) > 0.015". Its expectation under old is -KL(old || new) <= 0."""
    old, new = pair
    old_logprobs = torch.tensor([math.log(p) for p in old], dtype=torch.float64)
    new_logprobs = torch.tensor([math.log(p) for p in new], dtype=torch.float64)
    claimed = math.fsum(p * x for p, x in zip(old, (new_logprobs - old_logprobs).tolist(), strict=True))
    exact = math.fsum(p * math.log(p / q) for p, q in zip(old, new, strict=True))
    assert claimed == pytest.approx(-exact, abs=1e-13) and claimed <= 1e-13  # float64 roundings
    ours = math.fsum(p * x for p, x in zip(old, kl.k3(old_logprobs - new_logprobs).tolist(), strict=True))
    assert ours == pytest.approx(exact, abs=8e-7) and ours >= 0  # the float32 exponential inside k3


def test_the_documented_columns_list_every_flag_name() -> None:
    names = {flag.name.lower() for flag in ClipFlag}
    (text,) = (column.description for column in UPDATES.columns if column.name == "clip_flag")
    assert all(re.search(rf"\b{name}\b", text) for name in names)
    assert flag_names(torch.tensor(list(ClipFlag), dtype=torch.uint8)) == [flag.name.lower() for flag in ClipFlag]
