"""Precision high: kernels, definition and Python's integers have the same bits; other rules have other numbers.

The numbers are of every kind: ties, zeros of both signs, denormal, far apart, huge, the largest sums, not finite.
"""

from __future__ import annotations

from fractions import Fraction
from math import frexp
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from ppo_repro.numerics import build
from ppo_repro.numerics.definition.elementary import Array, F
from ppo_repro.numerics.definition.gradients import Contributions, join_slots, slot_sums
from ppo_repro.numerics.definition.linear import linear_backward
from ppo_repro.numerics.definition.model import Matrix
from ppo_repro.numerics.definition.product import BLOCK, Asked, product
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.interface import ints
from ppo_repro.numerics.linear import linear
from ppo_repro.numerics.linear import product as kernels_product
from ppo_repro.numerics.matrices import Packing, packed
from ppo_repro.numerics.sequences import Rows, slots_of
from tests.support.definition import array, assert_same
from tests.support.variants import ABLE, opened, using

SLOTS = 8
KINDS = ("normal", "far apart", "outliers", "one outlier", "small", "denormal", "zeros", "largest", "ties", "huge")


def numbers(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> Array:
    x = rng.standard_normal(shape).astype(F)
    match kind:
        case "far apart":
            x *= np.exp2(rng.integers(-40, 40, shape)).astype(F)
        case "outliers":
            x[rng.random(shape) < 0.01] *= 1e4
        case "one outlier":  # in every block, on a channel: all rows are mostly small
            x[:, ::BLOCK] *= 1e4
        case "small":  # about half of the numbers of a block are small integers, so some blocks are mostly small
            x = np.where(rng.random(shape) < 0.5, rng.integers(-31, 32, shape), rng.integers(32, 4096, shape)).astype(F)
            x += (rng.integers(-2048, 2049, shape) / 4096).astype(F)
        case "denormal":
            x *= np.exp2(rng.integers(-149, -55, shape)).astype(F)
        case "zeros":
            x[rng.random(shape) < 0.9] = -0.0
            x[::3] = 0.0
        case "largest":  # sums of a block up to 128 4095^2
            x = np.where(rng.random(shape) < 0.02, -1, 1).astype(F) * F(1.9999999)
        case "ties":
            x = (rng.integers(-8191, 8192, shape) / 2).astype(F)
        case "huge":
            x *= np.exp2(rng.integers(30, 57, shape)).astype(F)
    return x


def integers(x: list[float]) -> tuple[list[int], list[int], int, bool]:
    """A block as Python's integers, their remainders, s, and whether it is mostly small.

    `round` of a fraction goes to the nearest, ties to even.
    """
    largest = max(abs(number) for number in x)
    s = min(12 - frexp(largest)[1], 63)
    exact = [Fraction(number) * Fraction(2) ** s for number in x]
    whole = [max(-4095, min(4095, round(number))) for number in exact]
    rest = [round((a - b) * 2**11) for a, b in zip(exact, whole, strict=True)]
    small = [abs(number) < 32 for number, given in zip(whole, x, strict=True) if given]
    return whole, rest, s, 2 * sum(small) > len(x)


def dot(a: list[int], b: list[int]) -> int:
    return sum(i * j for i, j in zip(a, b, strict=True))


def by_integers(x: Array, w: Array, asked: Asked = "x and w") -> Array:
    """x w^T in Python, [M, K], [N, K] -> [M, N]."""
    y = np.zeros((len(x), len(w)), F)
    for start in range(0, x.shape[1], BLOCK):
        rows, columns = ([integers(row[start : start + BLOCK].tolist()) for row in a] for a in (x, w))
        for m, (x_block, x_rest, x_s, x_small) in enumerate(rows):
            for n, (w_block, w_rest, w_s, w_small) in enumerate(columns):
                total, rest = dot(x_block, w_block), dot(x_block, w_rest) + dot(x_rest, w_block)
                assert max(abs(total), abs(rest)) < 2**31
                block = np.ldexp(F(total), -x_s - w_s)
                if w_small or (x_small and asked == "x and w"):
                    block += np.ldexp(F(rest), -x_s - w_s - 11)
                y[m, n] += block
    return y


def layer_of(w: Array, transposed: bool) -> nn.Module:
    layer = Conv1D(*w.shape) if transposed else nn.Linear(*w.shape[::-1])
    layer.weight.data = torch.from_numpy(np.ascontiguousarray(w.T if transposed else w))
    layer.bias = None
    return layer


def by_kernel(x: Array, w: Array) -> Array:
    """x w^T by the kernel."""
    return kernels_product(torch.from_numpy(x), packed(layer_of(w, False), Packing(precision="high"))).numpy()


def rows_of(lengths: list[int]) -> tuple[Array, Array]:
    """Sequence and position of each row; every third position of a sequence is missing."""
    position = [np.arange(2 * n)[np.arange(2 * n) % 3 > 0][:n] for n in lengths]
    return np.repeat(np.arange(len(lengths)), [len(p) for p in position]), np.concatenate(position)


def assert_layer_is_the_definition(x: Array, w: Array, d: Array, lengths: list[int], transposed: bool) -> None:
    """y, dx and dw of a layer alone."""
    sequence, position = rows_of(lengths)
    layer, count = layer_of(w, transposed), len(lengths)
    sums = GradientSums(layer.named_parameters(), SLOTS)
    slots = slots_of(range(count), count, SLOTS)
    given_x = torch.from_numpy(x).requires_grad_()
    y = linear(given_x, layer, Rows(sequence=ints(sequence), position=ints(position), slots=slots, sums=sums), "high")
    y.backward(torch.from_numpy(d))
    matrix, parts = Matrix(w, None, "high"), [Contributions() for _ in lengths]
    for s, grads in enumerate(parts):
        of = sequence == s
        linear_backward(grads, "m", matrix, d[of], x[of], position[of])
    dw = join_slots(slot_sums(w.shape, [grads["m.w"] for grads in parts], SLOTS))
    found = array(sums.finish()["weight"])
    assert_same(array(y), product(x, w, "high"), "y")
    assert given_x.grad is not None
    assert_same(array(given_x.grad), product(d, w.T, "high", "w"), "dx")
    assert_same(found.T if transposed else found, dw, "dw")


@pytest.mark.parametrize("variant", ABLE, ids=[variant.name for variant in ABLE])
@given(
    st.lists(st.sampled_from((1, 2, 7, 90, 130)), min_size=1, max_size=3),
    st.integers(1, 150),
    st.sampled_from((1, 2, 15, 16, 17, 127, 128, 129, 130, 257, 300)),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_kernels_are_the_definition(
    variant: build.Variant, lengths: list[int], n: int, k: int, of_x: str, of_w: str, transposed: bool, seed: int
) -> None:
    rng, rows = np.random.default_rng(seed), sum(lengths)
    with using(opened(variant)):
        x, w, d = numbers(of_x, (rows, k), rng), numbers(of_w, (n, k), rng), numbers(of_x, (rows, n), rng)
        assert_layer_is_the_definition(x, w, d, lengths, transposed)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from((1, 3, 128, 131)),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.sampled_from(get_args(Asked)[:2]),
    st.integers(0),
)
def test_the_definition_is_pythons_integers(
    m: int, n: int, k: int, of_x: str, of_w: str, asked: Asked, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, w = numbers(of_x, (m, k), rng), numbers(of_w, (n, k), rng)
    assert_same(product(x, w, "high", asked), by_integers(x, w, asked), "y")


@given(st.lists(st.floats(-(2.0**59), 2.0**59, width=32), min_size=1, max_size=140), st.integers(0, 100))
def test_any_floats_are_pythons_integers(row: list[float], seed: int) -> None:
    x = np.array([row], F)
    w = np.random.default_rng(seed).permuted(x, axis=1)
    assert_same(product(x, w, "high"), by_integers(x, w), "y")
    assert_same(by_kernel(x, w), by_integers(x, w), "kernel")


CASES: dict[str, tuple[list[float], list[float], float]] = {  # x, w, x w^T; another rule gives another number
    "a tie goes to the even integer: away from zero gives 1": ([2048.0, 0.5], [0.0, 1.0], 0.0),
    "a tie at 1.5 goes to 2: down gives 1": ([2048.0, 1.5], [0.0, 1.0], 2.0),
    "4,095.75 is clipped to 4,095: a clip at 4,096 gives 4,096": ([4095.75], [1.0], 4095.0),
    "a block has 128 terms: with 64 the last one counts": ([2048.0] + [0.0] * 126 + [0.25], [0.0] * 127 + [1.0], 0.0),
    "a block has its own scale: that of the row gives 0": ([2048.0] + [0.0] * 127 + [0.25], [0.0] * 128 + [1.0], 0.25),
    "13 bits: with 12 it is 2,048": ([2047.5], [1.0], 2047.5),
    "the smallest power is 2^-63, a remainder's 2^-74: without a limit it is 2^-75": ([2.0**-75], [1.0], 0.0),
    "2^-64 is a remainder": ([2.0**-64], [1.0], 2.0**-64),
    "2^-63 is one 2^-63": ([2.0**-63], [1.0], 2.0**-63),
    "a remainder of 11 bits: without it the result is 0": ([2048.0, *[0.25] * 3], [0.0, *[1.0] * 3], 0.75),
    "a remainder of w counts too, where x is mostly small": ([2048.0, *[0.25] * 3], [0.25, *[2048.0] * 3], 2048.0),
    "half of the numbers are not most": ([2048.0, 2048.0, 0.25, 0.25], [0.0, 0.0, 1.0, 1.0], 0.0),
    "31 is small": ([2048.0, *[31.25] * 3], [0.0, *[1.0] * 3], 93.75),
    "32 is not: 31.75 becomes 32": ([2048.0, *[31.75] * 3], [0.0, *[1.0] * 3], 96.0),
    "zeros are not small": ([2048.0, 0.0, 0.0, 0.25, 0.25], [0.0, 1.0, 1.0, 1.0, 1.0], 0.0),
    "a remainder has 11 bits: with 12 it is 2^-12": ([2048.0, *[2.0**-12] * 3], [0.0, 1.0, 0.0, 0.0], 0.0),
    "the clip leaves a remainder": ([4095.75, *[0.25] * 3], [1.0, 0.0, 0.0, 0.0], 4095.75),
    "-0 becomes +0": ([-0.0], [1.0], 0.0),
    "the sum is exact: float32 rounds each addition": ([4095.0] * 12 + [3.0], [4095.0] * 12 + [3.0], 201228304.0),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_rule_gives(case: str) -> None:
    x, w, right = CASES[case]
    a, b = np.array([x], F), np.array([w], F)
    assert_same(product(a, b, "high"), np.array([[right]], F), "definition")
    assert_same(by_kernel(a, b), np.array([[right]], F), "kernel")


@pytest.mark.parametrize("variant", ABLE, ids=[variant.name for variant in ABLE])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**60])
def test_a_block_that_is_not_finite_or_too_large_makes_its_results_nan(variant: build.Variant, bad: float) -> None:
    x, w = np.ones((14, 300), F), np.ones((40, 300), F)
    x[3, 200], w[33, 7] = bad, bad
    wanted = np.full((14, 40), False)
    wanted[3], wanted[:, 33] = True, True
    with using(opened(variant)):
        found = by_kernel(x, w)
    assert np.array_equal(np.isnan(found), wanted)
    assert np.array_equal(np.isnan(product(x, w, "high")), wanted)
    assert (found[~wanted] == 300).all()
