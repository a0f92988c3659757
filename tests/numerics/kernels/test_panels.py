"""Products whose last panel is narrow, or with rows taken in several passes: the same bits, and no other memory."""

from __future__ import annotations

import numpy as np
import pytest

from ppo_repro.numerics.arithmetic.grid import GRADIENT_INPUT_BITS
from ppo_repro.numerics.kernels.float64 import operands, product
from ppo_repro.numerics.kernels.float64.tiles import COLUMNS, ROWS
from ppo_repro.numerics.products import NO_BIAS

_GUARD = np.float32(7.0)


def _numbers(rows: int, terms: int, seed: int, size: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, terms)) * size).astype(np.float32)


def _integers(operand: operands.Inputs | operands.Weight, rows: int) -> np.ndarray:
    """The integers of an operand [rows, terms], as Python's."""
    if isinstance(operand, operands.Inputs):
        whole = operand.blocks.reshape(-(-rows // ROWS), -1, ROWS)
    else:
        whole = operand.panels.reshape(-(-rows // COLUMNS), -1, COLUMNS)
    return whole.transpose(0, 2, 1).reshape(-1, whole.shape[1])[:rows].astype(np.int64).astype(object)


def _rounded(x: operands.Inputs, weight: operands.Weight, rows: int, columns: int) -> np.ndarray:
    """fl32(fl64(sum of integers) scale column_scale), by Python's integers."""
    sums = _integers(x, rows) @ _integers(weight, columns).T
    scales = np.ldexp(1.0, weight.exponents - operands.WEIGHT_BITS)
    return (sums.astype(np.float64) * x.scales[:, None] * scales + 0.0).astype(np.float32)


def _contracted(x: operands.Inputs, weight: operands.Weight, w: np.ndarray, rows: int, columns: int) -> np.ndarray:
    memory = np.full(rows * columns + 2 * COLUMNS, _GUARD, np.float32)
    assert product.contract(x, weight, w, NO_BIAS, memory[: rows * columns].reshape(rows, columns))
    assert (memory[rows * columns :] == _GUARD).all()
    return memory[: rows * columns].reshape(rows, columns)


# 40 terms are exact in one float64, 700 are not
@pytest.mark.parametrize("terms", [40, 700])
@pytest.mark.parametrize("rows", [ROWS, 2 * ROWS + 3])
def test_every_width_of_the_last_panel(rows: int, terms: int) -> None:
    for columns in range(1, 2 * COLUMNS + 1):
        x, w = _numbers(rows, terms, columns), _numbers(columns, terms, columns + 1)
        inputs, weight = operands.quantise_inputs(x), operands.pack_weight(w)
        expected = _rounded(inputs, weight, rows, columns)
        assert _contracted(inputs, weight, w, rows, columns).tobytes() == expected.tobytes(), columns
        across = np.ascontiguousarray(w.T)
        grids = operands.column_grids(across)
        assert _contracted(inputs, grids, across, rows, columns).tobytes() == expected.tobytes(), columns
        other = x.copy()
        other[-1, -1] *= 2.0
        changed = _contracted(operands.quantise_inputs(other), weight, w, rows, columns)
        assert changed[-1].tobytes() != expected[-1].tobytes()


# 700 of the largest products are not exact in one float64
@pytest.mark.parametrize(("tokens", "largest"), [(40, 2**20 - 1), (700, 2**27 - 1)])
@pytest.mark.parametrize("fresh", [True, False])
def test_every_width_of_the_last_panel_of_a_gradient(tokens: int, largest: int, fresh: bool) -> None:
    rows, most = ROWS + 3, 2**GRADIENT_INPUT_BITS - 1
    for columns in range(1, 2 * COLUMNS + 1):
        grad, x = np.sign(_numbers(tokens, rows, columns)), np.sign(_numbers(tokens, columns, columns + 1))
        up, inputs = np.full(tokens, float(largest)), product.pack_inputs(x, np.full(tokens, float(most)))
        memory = np.full(rows * columns + 2 * COLUMNS, 3, np.int64)
        product.accumulate(grad, up, inputs, memory[: rows * columns].reshape(rows, columns), fresh)
        whole = (grad.astype(np.int64).T @ x.astype(np.int64)).astype(object) * (largest * most)
        assert (memory[: rows * columns].reshape(rows, columns) == whole + (0 if fresh else 3)).all(), columns
        assert (memory[rows * columns :] == 3).all()


@pytest.mark.parametrize("packed", [0, 1 << 24])
def test_rows_in_several_passes_have_the_bits_of_one(monkeypatch: pytest.MonkeyPatch, packed: int) -> None:
    rows, terms, columns = 5 * ROWS + 3, 300, 40
    x, w = _numbers(rows, terms, 1), _numbers(columns, terms, 2)
    inputs, across = operands.quantise_inputs(x), np.ascontiguousarray(w.T)
    expected = _rounded(inputs, operands.pack_weight(w), rows, columns)
    passes: list[int] = []
    monkeypatch.setattr(product, "_PACKED", packed)
    monkeypatch.setattr(product, "contract_panels", _counting(passes))
    for cached, count in ((1 << 24, 1), (2 * ROWS * terms, 3), (1, 6)):
        monkeypatch.setattr(product, "_CACHED", cached)
        passes.clear()
        assert _contracted(inputs, operands.pack_weight(w), w, rows, columns).tobytes() == expected.tobytes()
        assert len(passes) == count
        passes.clear()
        grids = operands.column_grids(across)
        assert _contracted(inputs, grids, across, rows, columns).tobytes() == expected.tobytes()
        assert len(passes) == (count if packed else 1)


def _counting(passes: list[int]):  # type: ignore[no-untyped-def]
    """The kernel, which also keeps the number of rows of each call."""
    kernel = product.contract_panels

    def counted(x, *others):  # type: ignore[no-untyped-def]
        passes.append(len(x[2]))
        kernel(x, *others)

    return counted
