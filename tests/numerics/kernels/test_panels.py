"""Products whose last panel is narrow, or with rows taken in several passes: the same bits, and no other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.numerics.arithmetic.grid import GRADIENT_INPUT_BITS
from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.float64 import digit_product, digits, operands, product
from ppo_repro.numerics.kernels.float64.digits import BLOCK, DIGITS, PAIR, add_tile_of_2, block_digits, panel_digits
from ppo_repro.numerics.kernels.float64.digits import COLUMNS as DIGIT_COLUMNS
from ppo_repro.numerics.kernels.float64.inputs import FEWEST_ROWS, Inputs, quantise_inputs, quantised
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS, ROWS
from ppo_repro.numerics.products import NO_BIAS

_GUARD = np.float32(7.0)


def _numbers(rows: int, terms: int, seed: int, size: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, terms)) * size).astype(np.float32)


def _integers(operand: Inputs | operands.Weight, rows: int) -> np.ndarray:
    """The integers of an operand [rows, terms], as Python's."""
    if isinstance(operand, Inputs):
        whole = operand.blocks.reshape(-(-rows // ROWS), -1, ROWS)
    else:
        whole = operand.panels.reshape(-(-rows // COLUMNS), -1, COLUMNS)
    return whole.transpose(0, 2, 1).reshape(-1, whole.shape[1])[:rows].astype(np.int64).astype(object)


def _rounded(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """fl32(fl64(sum of integers) scale column_scale), by Python's integers."""
    inputs, weight = quantised(x, False), operands.pack_weight(w)
    sums = _integers(inputs, len(x)) @ _integers(weight, len(w)).T
    scales = np.ldexp(1.0, weight.exponents - operands.WEIGHT_BITS)
    return (sums.astype(np.float64) * inputs.scales[:, None] * scales + 0.0).astype(np.float32)


def _contracted(x: Inputs, weight: operands.Weight, w: np.ndarray, rows: int, columns: int) -> np.ndarray:
    memory = np.full(rows * columns + 2 * COLUMNS, _GUARD, np.float32)
    assert product.contract(x, weight, w, NO_BIAS, memory[: rows * columns].reshape(rows, columns))
    assert (memory[rows * columns :] == _GUARD).all()
    return memory[: rows * columns].reshape(rows, columns)


FORMS = pytest.mark.parametrize("in_digits", [False, True], ids=["float64", "digits"])


# 40 terms are exact in one float64, 701 are not
@FORMS
@pytest.mark.parametrize("terms", [1, 40, 701])
@pytest.mark.parametrize("rows", [ROWS, 2 * ROWS + 3])
def test_every_width_of_the_last_panel(rows: int, terms: int, in_digits: bool) -> None:
    for columns in range(1, 2 * COLUMNS + 1):
        x, w = _numbers(rows, terms, columns), _numbers(columns, terms, columns + 1)
        inputs, weight = quantised(x, in_digits), operands.pack_weight(w)
        expected = _rounded(x, w)
        assert _contracted(inputs, weight, w, rows, columns).tobytes() == expected.tobytes(), columns
        across = np.ascontiguousarray(w.T)
        grids = operands.column_grids(across)
        assert _contracted(inputs, grids, across, rows, columns).tobytes() == expected.tobytes(), columns
        other = x.copy()
        other[-1, -1] *= 2.0
        changed = _contracted(quantised(other, in_digits), weight, w, rows, columns)
        assert changed[-1].tobytes() != expected[-1].tobytes()


# 700 of the largest products are not exact in one float64
@FORMS
@pytest.mark.parametrize(("tokens", "largest"), [(40, 2**20 - 1), (701, 2**27)])
@pytest.mark.parametrize("fresh", [True, False])
def test_every_width_of_the_last_panel_of_a_gradient(tokens: int, largest: int, fresh: bool, in_digits: bool) -> None:
    rows, most = ROWS + 3, 2**GRADIENT_INPUT_BITS
    for columns in range(1, 2 * COLUMNS + 1):
        grad, x = np.sign(_numbers(tokens, rows, columns)), np.sign(_numbers(tokens, columns, columns + 1))
        up, inputs = np.full(tokens, float(largest)), product.packed_inputs(x, np.full(tokens, float(most)), in_digits)
        memory = np.full(rows * columns + 2 * COLUMNS, 3, np.int64)
        product.accumulate(grad, up, inputs, memory[: rows * columns].reshape(rows, columns), fresh)
        whole = (grad.astype(np.int64).T @ x.astype(np.int64)).astype(object) * (largest * most)
        assert (memory[: rows * columns].reshape(rows, columns) == whole + (0 if fresh else 3)).all(), columns
        assert (memory[rows * columns :] == 3).all()


@FORMS
@pytest.mark.parametrize("packed", [0, 1 << 24])
def test_rows_in_several_passes_have_the_bits_of_one(
    monkeypatch: pytest.MonkeyPatch, packed: int, in_digits: bool
) -> None:
    rows, terms, columns = 5 * ROWS + 3, 300, 40
    x, w = _numbers(rows, terms, 1), _numbers(columns, terms, 2)
    inputs, across = quantised(x, in_digits), np.ascontiguousarray(w.T)
    expected = _rounded(x, w)
    passes: list[int] = []
    monkeypatch.setattr(product, "_PACKED", packed)
    for name in ("contract_panels", "contract_digits"):
        monkeypatch.setattr(product, name, _counting(getattr(product, name), passes))
    for cached, count in ((1 << 24, 1), (2 * ROWS * terms, 3), (1, 6)):
        monkeypatch.setattr(product, "_CACHED_DIGITS" if in_digits else "_CACHED", cached)
        passes.clear()
        assert _contracted(inputs, operands.pack_weight(w), w, rows, columns).tobytes() == expected.tobytes()
        assert len(passes) == count
        passes.clear()
        grids = operands.column_grids(across)
        assert _contracted(inputs, grids, across, rows, columns).tobytes() == expected.tobytes()
        assert len(passes) == (count if packed else 1)


def _counting(kernel: Callable[..., None], passes: list[int]) -> Callable[..., None]:
    """The kernel, which also keeps the number of rows of each call."""

    def counted(x: tuple[np.ndarray, ...], *others: Any) -> None:
        passes.append(len(x[2]))
        kernel(x, *others)

    return counted


# parts of 2,048 terms are added up in two float64
@pytest.mark.parametrize("terms", [2048, 2049, 5001])
def test_more_terms_than_one_part_of_digits(terms: int) -> None:
    for rows, columns in ((ROWS, 2 * COLUMNS), (ROWS + 3, COLUMNS + 5)):
        x, w = _numbers(rows, terms, 1), _numbers(columns, terms, 2)
        expected = _rounded(x, w)
        across = np.ascontiguousarray(w.T)
        for weight, values in ((operands.pack_weight(w), w), (operands.column_grids(across), across)):
            assert _contracted(quantised(x, True), weight, values, rows, columns).tobytes() == expected.tobytes()
            assert _contracted(quantised(x, False), weight, values, rows, columns).tobytes() == expected.tobytes()


@pytest.mark.parametrize("signs", ["of one sign", "that cancel"])
def test_digits_of_the_largest_integers_lose_nothing(signs: str) -> None:
    terms = 3 * 2 * digit_product._LEAST + 1
    x, w = np.full((ROWS, terms), 1.0 - 2.0**-24, np.float32), np.full((COLUMNS, terms), -(1.0 - 2.0**-24), np.float32)
    w *= np.float32(0.98)  # a weight's grid ends a 64th below a power of two
    if signs == "that cancel":
        w[:, 1::2] *= -1
    inputs, weight = quantised(x, False), operands.pack_weight(w)
    assert (
        np.abs(_integers(inputs, ROWS)).max() > 0.99 * 2**26 and np.abs(_integers(weight, COLUMNS)).max() > 0.9 * 2**23
    )
    expected = _rounded(x, w)
    assert _contracted(quantised(x, True), weight, w, ROWS, COLUMNS).tobytes() == expected.tobytes()


@given(st.integers(1, 2**27), st.integers(1, 2**23))
def test_no_sum_of_digit_products_passes_int32(left: int, right: int) -> None:
    pairs = digit_product.most_pairs(left, right)
    high, low = [(n + 4096) // 8192 for n in (left, right)], 4096
    largest = 2 * pairs * max(high[0] * low + low * high[1], low * low, high[0] * high[1])
    assert largest < 2**31 and all(n + low < 2**15 for n in high)


@kernel
def _summed(left, right, pairs, group, memory, sums):  # type: ignore[no-untyped-def]
    """Products of a block [2 pairs, ROWS] and a panel [2 pairs, COLUMNS], with sums of `group` pairs in int32."""
    (a, b), scratch = memory, np.empty(DIGITS * BLOCK, np.int32)
    block_digits(left.ctypes.data, 2 * pairs, a.ctypes.data, PAIR * ROWS * pairs)
    panel_digits(right.ctypes.data, 2 * pairs, b.ctypes.data, PAIR * DIGIT_COLUMNS * pairs)
    apart = PAIR * ROWS * pairs, PAIR * DIGIT_COLUMNS * pairs
    add_tile_of_2(a.ctypes.data, b.ctypes.data, apart[0], apart[1], pairs, group, scratch.ctypes.data, sums.ctypes.data)


def test_groups_of_one_pair_more_would_pass_int32() -> None:
    """So the bound is needed: of the largest digits such groups lose multiples of 2^45."""
    a, b = 8191 * 8192 + 4095, 1023 * 8192 + 4095
    group = digit_product.most_pairs(a, b)
    pairs = 4 * group * (group + 1)
    left, right = np.full(2 * pairs * ROWS, float(a)), np.full(2 * pairs * COLUMNS, b, np.int32)
    results = []
    for used in (group, group + 1):
        memory = np.zeros(DIGITS * pairs * ROWS, np.int32), np.zeros(DIGITS * pairs * DIGIT_COLUMNS, np.int32)
        sums = np.zeros(BLOCK, np.int64)
        _summed(left, right, pairs, used, memory, sums)
        results.append(sums.reshape(ROWS, DIGIT_COLUMNS)[:, :COLUMNS])
    assert (results[0] == 2 * pairs * a * b).all()
    lost = results[1] - results[0]
    assert (lost != 0).all() and (lost % (1 << 45) == 0).all()


def test_digits_are_used_where_kernels_are_compiled_for_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits.numba_config, "CPU_NAME", "some")
    for features, expected in ((None, False), ("+avx512f", False), ("+avx512f,+avx512vnni", True)):
        monkeypatch.setattr(digits.numba_config, "CPU_FEATURES", features)
        assert digits._has_dot_products() is expected
    monkeypatch.setattr(digits.llvm, "llvm_version_info", (digits._KNOWN_LLVM + 1, 0, 0))
    assert not digits._has_dot_products()


def test_few_rows_stay_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for in_use in (False, True):
        monkeypatch.setattr(digits, "IN_USE", in_use)
        found = [quantise_inputs(_numbers(rows, 40, 1)).in_digits for rows in (FEWEST_ROWS - 1, FEWEST_ROWS)]
        assert found == [False, in_use]
        assert product.pack_inputs(_numbers(8, 40, 1), np.ones(8)).in_digits is in_use
