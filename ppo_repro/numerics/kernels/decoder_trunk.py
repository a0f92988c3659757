"""All layers of a trunk for one new token of each row, in one call, by products in float64.

It calls the kernels of the single operations in their order, so it gives their bits. Called one by one from Python, the
kernels of a small model take no longer than the calls themselves, and each is too short to be worth waking a second
thread; all of them together are worth one.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from ppo_repro.numerics.kernels.attention.block import Spec
from ppo_repro.numerics.kernels.attention.decoding import forward_single
from ppo_repro.numerics.kernels.attention.forward import store
from ppo_repro.numerics.kernels.attention.tiles import COLUMNS as KEYS_IN_PANEL
from ppo_repro.numerics.kernels.core.compile import inline, kernel, kernel_part
from ppo_repro.numerics.kernels.core.memory import LINE, align_to_line, doubles, floats, integers
from ppo_repro.numerics.kernels.core.scalar import INFINITY_BITS
from ppo_repro.numerics.kernels.float64 import digits
from ppo_repro.numerics.kernels.float64.digit_rows import (
    DigitRows,
    make_digit_rows,
    multiply_by_digits,
    put_in_digits,
    worth_digits,
)
from ppo_repro.numerics.kernels.float64.digits import COLUMNS as DIGIT_COLUMNS
from ppo_repro.numerics.kernels.float64.few_rows import PADDING, add_outliers, multiply_rows, put_on_grid
from ppo_repro.numerics.kernels.float64.tiles import ROWS
from ppo_repro.numerics.kernels.layer_parts import (
    ATTENTION,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    DOWN,
    FINITE,
    GATE,
    KEY_NORM,
    OUT,
    QUERY,
    QUERY_NORM,
    rotate_rows,
    silu_times_flat,
)
from ppo_repro.numerics.kernels.norms import rms_norm_rows

# A layer is a row of addresses: passing arrays of arrays takes as long as a small layer. Of each matrix: panels int32,
# scales float64 and bias float32 padded to whole panels, weights float32, starts and columns of outliers int64.
PANELS, SCALES, BIAS, WEIGHTS, STARTS, OTHERS = range(6)
# No literals: a kernel is compiled once more for each literal it is called with.
QUERY_AT, KEY_AT, VALUE_AT, OUT_AT, GATE_AT, UP_AT, DOWN_AT = np.arange(0, 42, 6)
# factors of norms float32, and keys, values and scales of the cache float32
ATTENTION_NORM_AT, QUERY_NORM_AT, KEY_NORM_AT, MLP_NORM_AT, KEYS_AT, VALUES_AT, VALUE_SCALES_AT = np.arange(42, 49)
OUTLIERS_AT = 49  # of the seven matrices, in the order above: how many outliers
# digits and squares of `digit_rows.weight_digits` of each matrix; 0 where there are none
DIGITS_AT = OUTLIERS_AT + 7
FIELDS = DIGITS_AT + 14
_IN_DIGITS = digits.IN_USE


class Shape(NamedTuple):
    """What all layers have in common."""

    spec: Spec
    hidden: int
    wide: int  # columns of gate and up
    attention_eps: float
    query_eps: float
    key_eps: float
    mlp_eps: float
    most_hidden: int  # outliers in a row of inputs, by their number of terms
    most_attended: int
    most_wide: int
    slots: int  # of the cache
    panels: int  # of the keys of a slot
    context: int
    values_row: int


class NewTokens(NamedTuple):
    """The new token of each row; it sees keys begin..end-1, by window."""

    slots: np.ndarray  # [R] int64
    positions: np.ndarray  # [R, 1] int64
    valid: np.ndarray  # [R, 1] bool
    begin: np.ndarray  # [windows, R] int64
    end: np.ndarray  # [R] int64


class Scratch(NamedTuple):
    """Memory that all layers use."""

    inputs: np.ndarray  # float64, rows on their grids
    scales: np.ndarray
    limits: np.ndarray  # float32 [R]
    own: DigitRows  # rows as digits, where they are faster
    normed: np.ndarray
    query: np.ndarray
    attended: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    inner: np.ndarray
    out: np.ndarray


@inline
def _make_scratch(rows, shape):  # type: ignore[no-untyped-def]
    spec = shape.spec
    wide, attended = shape.wide, spec.heads * spec.dim
    padded = (rows + ROWS - 1) // ROWS * ROWS
    terms = max(wide, attended, shape.hidden)
    inputs = np.zeros(padded * (terms + PADDING) + LINE)
    return Scratch(
        align_to_line(inputs),
        np.ones(padded),
        np.empty(rows, np.float32),
        make_digit_rows(rows if _IN_DIGITS else 0, terms),
        np.empty(rows * shape.hidden, np.float32),
        np.empty(rows * attended, np.float32),
        np.empty(rows * attended, np.float32),
        np.empty(rows * wide, np.float32),
        np.empty(rows * wide, np.float32),
        np.empty(rows * wide, np.float32),
        np.empty(rows * shape.hidden, np.float32),
    )


@inline
def _by_digits(row, rows):  # type: ignore[no-untyped-def]
    return row[DIGITS_AT] != 0 and worth_digits(rows)


@kernel_part
def _on_grid(row, x, terms, most, scratch):  # type: ignore[no-untyped-def]
    """Rows of x on their grids, for `_product`; the result of `put_on_grid`."""
    ended, limits = -1, scratch.limits
    if _IN_DIGITS:  # alone, so that nothing below is compiled where it is False
        ended = put_in_digits(x, terms, most, scratch.own, limits) if _by_digits(row, limits.size) else -1
    return put_on_grid(x, terms, most, scratch.inputs, scratch.scales, limits) if ended < 0 else ended


@inline
def _digit_product(row, number, terms, scratch, factors, columns, y):  # type: ignore[no-untyped-def]
    tiles = (columns + DIGIT_COLUMNS - 1) // DIGIT_COLUMNS
    weights, squares = row[DIGITS_AT + 2 * number], numba.carray(doubles(row[DIGITS_AT + 2 * number + 1]), tiles)
    multiply_by_digits(scratch.own, terms, weights, squares, factors[0], factors[1], columns, y)
    return True


@kernel_part
def _product(row, at, x, terms, ended, scratch, columns, y):  # type: ignore[no-untyped-def]
    """y = x W^T + b of the matrix at field `at`, with its outliers; flat x [R, terms] is on its grids too."""
    rows, number, factors, done = scratch.limits.size, at // 6, (row[at + SCALES], row[at + BIAS]), False
    if _IN_DIGITS:
        done = _digit_product(row, number, terms, scratch, factors, columns, y) if _by_digits(row, rows) else False
    if not done:
        panels = row[at + PANELS]
        multiply_rows(scratch.inputs, scratch.scales, rows, terms, panels, factors[0], factors[1], columns, y)
    count = row[OUTLIERS_AT + number]
    if ended > 1 or count > 0:
        weights = numba.carray(floats(row[at + WEIGHTS]), columns * terms)
        starts = numba.carray(integers(row[at + STARTS]), columns + 1)
        others = numba.carray(integers(row[at + OTHERS]), count)
        add_outliers(x, terms, scratch.limits, weights, starts, others, y, columns)


@kernel_part
def _normed(row, at, size, eps, x, y):  # type: ignore[no-untyped-def]
    """y = the norm of each row of flat x. Returns whether x is finite."""
    weight, begin, rows = numba.carray(floats(row[at]), size), np.int64(0), x.size // size
    return rms_norm_rows(x, x.view(np.int32), weight, eps, begin, rows, np.empty(rows), y)


@inline
def _add(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        x[i] = x[i] + y[i]


@inline
def _head_norm(row, at, dim, eps, x, y):  # type: ignore[no-untyped-def]
    """The norm of each head of x in place, where there is one. Returns whether x is finite."""
    finite = True
    if row[at] != 0:
        finite = _normed(row, at, dim, eps, x, y)
        for i in range(x.size):
            x[i] = y[i]
    return finite


@inline
def _attention(row, window, shape, cosine, sine, tokens, scratch, x, key, value):  # type: ignore[no-untyped-def]
    """x += attention, in place. Sets `key` and `value` to the new keys and values. Returns how it ended."""
    spec, rows, hidden = shape.spec, tokens.slots.size, shape.hidden
    own, shared = spec.heads * spec.dim, spec.kv_heads * spec.dim
    normed, query, attended = scratch.normed, scratch.query, scratch.attended
    if not _normed(row, ATTENTION_NORM_AT, hidden, shape.attention_eps, x, normed):
        return BEFORE_ATTENTION
    ended = _on_grid(row, normed, hidden, shape.most_hidden, scratch)
    if ended == 0:
        return QUERY
    _product(row, QUERY_AT, normed, hidden, ended, scratch, own, query)
    _product(row, KEY_AT, normed, hidden, ended, scratch, shared, key)
    _product(row, VALUE_AT, normed, hidden, ended, scratch, shared, value)
    if not _head_norm(row, QUERY_NORM_AT, spec.dim, shape.query_eps, query, attended):
        return QUERY_NORM
    if not _head_norm(row, KEY_NORM_AT, spec.dim, shape.key_eps, key, attended):
        return KEY_NORM
    # a literal 0 and a view of a column would be other types, for which these kernels would be compiled once more
    positions, begin = numba.carray(integers(tokens.positions.ctypes.data), rows), np.int64(0)
    rotate_rows(query, cosine, sine, positions, spec.heads, spec.dim, begin, rows)
    rotate_rows(key, cosine, sine, positions, spec.kv_heads, spec.dim, begin, rows)
    heads = (shape.slots, spec.kv_heads)
    keys = numba.carray(floats(row[KEYS_AT]), (*heads, shape.panels, spec.dim, KEYS_IN_PANEL))
    values = numba.carray(floats(row[VALUES_AT]), (*heads, shape.context, shape.values_row))
    scales = numba.carray(floats(row[VALUE_SCALES_AT]), (*heads, shape.context))
    store(begin, rows, spec, tokens.slots, tokens.positions, tokens.valid, key, value, keys, values, scales)
    worst = forward_single(
        rows, spec, query, tokens.slots, tokens.begin[window], tokens.end, keys, values, scales, attended
    )
    if worst >= INFINITY_BITS:
        return ATTENTION
    ended = _on_grid(row, attended, own, shape.most_attended, scratch)
    if ended == 0:
        return OUT
    _product(row, OUT_AT, attended, own, ended, scratch, hidden, scratch.out)
    _add(x, scratch.out)
    return FINITE


@inline
def _mlp(row, shape, scratch, x):  # type: ignore[no-untyped-def]
    """x += down(silu(gate) up), in place. Returns how it ended."""
    hidden, wide, normed = shape.hidden, shape.wide, scratch.normed
    if not _normed(row, MLP_NORM_AT, hidden, shape.mlp_eps, x, normed):
        return BEFORE_MLP
    ended = _on_grid(row, normed, hidden, shape.most_hidden, scratch)
    if ended == 0:
        return GATE
    _product(row, GATE_AT, normed, hidden, ended, scratch, wide, scratch.gate)
    _product(row, UP_AT, normed, hidden, ended, scratch, wide, scratch.up)
    silu_times_flat(scratch.gate, scratch.up, scratch.inner)
    ended = _on_grid(row, scratch.inner, wide, shape.most_wide, scratch)
    if ended == 0:
        return DOWN
    _product(row, DOWN_AT, scratch.inner, wide, ended, scratch, hidden, scratch.out)
    _add(x, scratch.out)
    return FINITE


@kernel
def _trunk(layers, windows, shape, cosine, sine, tokens, x, new):  # type: ignore[no-untyped-def]
    scratch = _make_scratch(tokens.slots.size, shape)
    for index in range(windows.size):
        row, kept = layers[index], new[index % len(new)]
        status = _attention(row, windows[index], shape, cosine, sine, tokens, scratch, x, kept[0], kept[1])
        if status == FINITE:
            status = _mlp(row, shape, scratch, x)
        if status != FINITE:
            return index, status
    return -1, FINITE


def run(
    layers: np.ndarray,
    windows: np.ndarray,
    shape: Shape,
    cosine: np.ndarray,
    sine: np.ndarray,
    tokens: NewTokens,
    x: np.ndarray,
    new: np.ndarray,
) -> tuple[int, int]:
    """Apply all layers to x [R, H] float32, in place, on the calling thread. Returns (-1, FINITE), or what ended it.

    `layers` int64 [L, FIELDS] are addresses, see above; `windows` [L] says which of `tokens.begin` each layer takes.
    cosine and sine [P, D] float32, flat. The new keys and values are stored in the cache on their grids, and as float32
    in `new` [L, 2, R Hk D], or in its only element where it has one. If it ends early, any of these may have changed.
    """
    layer, status = _trunk(layers, windows, shape, cosine, sine, tokens, x.reshape(-1), new)
    return int(layer), int(status)
