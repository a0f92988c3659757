"""Products of small matrices of grid numbers: C = A B, exact and then rounded once, and C += A B, exact.

Written with vectors of eight, which the compiler splits into the widths that the CPU has.

A product of attention has 49 bits, so a float64 holds the sum of EXACT_TERMS of them, and neither their order nor
fused multiply-add changes a bit. After EXACT_TERMS the sum is split: what `high` can take goes there, and the rest,
below half a unit in the last place of `high`, is where the next terms are added. There is room for it, because one
factor of a product is float32 and therefore below the end of its grid: 16 * 2^25 (2^24 - 1) + 2^19 < 2^53.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ppo_repro.numerics.arithmetic.grid import EXACT_TERMS, HIGH_START
from ppo_repro.numerics.kernels.core.compile import inline, kernel_part

ROWS = 4  # of C in a tile; the rows of A and C must be padded to a multiple
LANES = 8
COLUMNS = 4 * LANES  # of C in the widest tile; rows of B must be readable up to a multiple of LANES
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(ir.DoubleType(), LANES)
_ZERO = ir.Constant(_VECTOR, None)
_HIGH_START = ir.Constant(_VECTOR, [ir.Constant(ir.DoubleType(), HIGH_START)] * LANES)
_GROUP = ir.Constant(_WORD, EXACT_TERMS)


def _load_vector(builder: Any, pointer: Any) -> Any:
    """Eight consecutive numbers as float64."""
    element = pointer.type.pointee
    vector = ir.VectorType(element, LANES)
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4 if element == ir.FloatType() else 8)
    return loaded if element == ir.DoubleType() else builder.fpext(loaded, _VECTOR)


def _store_vector(builder: Any, value: Any, pointer: Any) -> None:
    """Eight consecutive float64."""
    builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer()), align=8)


def _broadcast(builder: Any, value: Any) -> Any:
    """Eight times the same number."""
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, one, lanes)


def _places(builder: Any, stride: Any, vectors: int, rows: int = ROWS) -> list[Any]:
    """Offsets of the vectors of a tile, row by row."""
    starts = [builder.mul(ir.Constant(_WORD, i), stride) for i in range(rows)]
    return [builder.add(start, ir.Constant(_WORD, LANES * v)) for start in starts for v in range(vectors)]


def _add_terms(
    builder: Any,
    a: tuple[Any, Any, Any],
    b: tuple[Any, Any],
    low: list[Any],
    first: Any,
    count: Any,
    rows: int = ROWS,
) -> None:
    """low += A B over the terms first..first + count - 1; at most EXACT_TERMS, or the sum is not exact.

    `a` and `b` are the addresses of the first elements, then the strides of A's rows and of the terms.
    """
    vectors = len(low) // rows
    with cgutils.for_range(builder, count) as loop:
        t = builder.add(first, loop.index)
        a_at, b_at = builder.mul(t, a[2]), builder.mul(t, b[1])
        lanes = [builder.add(b_at, ir.Constant(_WORD, LANES * v)) for v in range(vectors)]
        right = [_load_vector(builder, builder.gep(b[0], [at])) for at in lanes]
        for i in range(rows):
            at = builder.add(a_at, builder.mul(ir.Constant(_WORD, i), a[1]))
            left = _broadcast(builder, builder.load(builder.gep(a[0], [at])))
            for v in range(vectors):
                total = low[i * vectors + v]
                term = builder.fmul(left, right[v], flags=("contract",))
                builder.store(builder.fadd(builder.load(total), term, flags=("contract",)), total)


def _carry(builder: Any, high: list[Any], low: list[Any], larger: bool) -> None:
    """Move what `high` can hold from `low` to it, exactly. `larger`: |high| >= |low| is known."""
    for above, below in zip(high, low, strict=True):
        before, rest = builder.load(above), builder.load(below)
        after = builder.fadd(before, rest)
        moved = builder.fsub(after, before)
        error = builder.fsub(rest, moved)
        if not larger:  # the last line of Knuth's TwoSum
            error = builder.fadd(builder.fsub(before, builder.fsub(after, moved)), error)
        builder.store(after, above)
        builder.store(error, below)


def set_tile(vectors: int, integers: bool, rows: int = ROWS) -> Callable[..., None]:
    """An intrinsic that computes `rows` rows of C, each as `vectors` vectors.

    C[c0 + i c_row + j] = fl64(sum_t A[a0 + i a_row + t a_term] B[b0 + t b_term + j]). With `integers`, `high` starts
    at HIGH_START; else columns of B have units of their own, no start fits all of them, and `high` starts at 0.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = [context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 4, 7)]
        _, a0, a_row, a_term, _, b0, b_term, _, c0, c_row, terms = arguments
        a, b, c = (builder.gep(p, [at]) for p, at in zip(arrays, (a0, b0, c0), strict=True))
        places, start = _places(builder, c_row, vectors, rows), _HIGH_START if integers else _ZERO
        low = [cgutils.alloca_once_value(builder, _ZERO) for _ in places]
        high = [cgutils.alloca_once_value(builder, start) for _ in places]
        # the last group, of 1 to EXACT_TERMS terms, needs no carry
        groups = builder.sdiv(builder.sub(terms, ir.Constant(_WORD, 1)), _GROUP)
        with cgutils.for_range(builder, groups) as loop:
            begin = builder.mul(loop.index, _GROUP)
            _add_terms(builder, (a, a_row, a_term), (b, b_term), low, begin, _GROUP, rows)
            _carry(builder, high, low, integers)
        done = builder.mul(groups, _GROUP)
        _add_terms(builder, (a, a_row, a_term), (b, b_term), low, done, builder.sub(terms, done), rows)
        for at, above, below in zip(places, high, low, strict=True):
            whole = builder.load(above)
            whole = builder.fsub(whole, start) if integers else whole
            _store_vector(builder, builder.fadd(whole, builder.load(below)), builder.gep(c, [at]))
        return context.get_dummy_value()

    @intrinsic
    def tile(_, a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms):  # type: ignore[no-untyped-def]
        n = types.intp
        return types.void(a, n, n, n, b, n, n, c, n, n, n), generate

    return tile


def _add_tile(vectors: int) -> Callable[..., None]:
    """As `set_tile`, but HIGH + LOW += A B exactly, of integers; LOW is small enough for EXACT_TERMS more terms."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = [context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 4, 7, 8)]
        _, a0, a_row, a_term, _, b0, b_term, _, _, c0, c_row, terms = arguments
        a, b, *sums = (builder.gep(p, [at]) for p, at in zip(arrays, (a0, b0, c0, c0), strict=True))
        places = _places(builder, c_row, vectors)
        targets = [[builder.gep(c, [at]) for at in places] for c in sums]
        high, low = ([cgutils.alloca_once_value(builder, _load_vector(builder, p)) for p in part] for part in targets)
        groups = builder.sdiv(builder.add(terms, ir.Constant(_WORD, EXACT_TERMS - 1)), _GROUP)
        with cgutils.for_range(builder, groups) as loop:
            first = builder.mul(loop.index, _GROUP)
            left = builder.sub(terms, first)
            count = builder.select(builder.icmp_signed("<", left, _GROUP), left, _GROUP)
            _add_terms(builder, (a, a_row, a_term), (b, b_term), low, first, count)
            _carry(builder, high, low, True)
        for part, numbers in zip(targets, (high, low), strict=True):
            for pointer, number in zip(part, numbers, strict=True):
                _store_vector(builder, builder.load(number), pointer)
        return context.get_dummy_value()

    @intrinsic
    def tile(_, a, a0, a_row, a_term, b, b0, b_term, high, low, c0, c_row, terms):  # type: ignore[no-untyped-def]
        n = types.intp
        return types.void(a, n, n, n, b, n, n, high, low, n, n, n), generate

    return tile


_set1, _set2, _set4 = (set_tile(vectors, True) for vectors in (1, 2, 4))
_score1, _score2, _score4 = (set_tile(vectors, False) for vectors in (1, 2, 4))
_add1, _add2, _add4 = (_add_tile(vectors) for vectors in (1, 2, 4))


@inline
def _by_width(tile1, tile2, tile4, a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms, columns):  # type: ignore[no-untyped-def]
    """ROWS rows of C, the widest tiles first; `columns` is rounded up to LANES."""
    while columns > 0:
        if columns > 3 * LANES:
            tile4(a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms)
            done = 4 * LANES
        elif columns > LANES:
            tile2(a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms)
            done = 2 * LANES
        else:
            tile1(a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms)
            done = LANES
        b0, c0, columns = b0 + done, c0 + done, columns - done


@kernel_part
def set_rows(a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms, columns):  # type: ignore[no-untyped-def]
    """ROWS rows of C = fl64(A B) of integers, `columns` rounded up to LANES.

    A, C float64, B float32 or float64, flat with offsets.
    """
    _by_width(_set1, _set2, _set4, a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms, columns)


@kernel_part
def set_scores(a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms, columns):  # type: ignore[no-untyped-def]
    """`set_rows` for columns of B that are integers times a power of two, each its own."""
    _by_width(_score1, _score2, _score4, a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms, columns)


@kernel_part
def add_rows(a, a0, a_row, a_term, b, b0, b_term, high, low, c0, c_row, terms, columns):  # type: ignore[no-untyped-def]
    """HIGH + LOW += A B exactly, of integers; the sums start at HIGH_START and 0."""
    while columns > 0:
        if columns > 3 * LANES:
            _add4(a, a0, a_row, a_term, b, b0, b_term, high, low, c0, c_row, terms)
            done = 4 * LANES
        elif columns > LANES:
            _add2(a, a0, a_row, a_term, b, b0, b_term, high, low, c0, c_row, terms)
            done = 2 * LANES
        else:
            _add1(a, a0, a_row, a_term, b, b0, b_term, high, low, c0, c_row, terms)
            done = LANES
        b0, c0, columns = b0 + done, c0 + done, columns - done
