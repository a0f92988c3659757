"""Products of small matrices of grid numbers in float64: C = A B or C += A B.

Written with vectors of eight, which the compiler splits into the widths that the CPU has. The sums are exact, so
neither their order nor fused multiply-add changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ppo_repro.numerics.kernels.core.compile import inline, kernel

ROWS = 4  # of C in a tile; the rows of A and C must be padded to a multiple
LANES = 8
COLUMNS = 4 * LANES  # of C in the widest tile; rows of B must be readable up to a multiple of LANES
_VECTOR = ir.VectorType(ir.DoubleType(), LANES)


def _load_vector(builder: Any, pointer: Any) -> Any:
    """Eight consecutive numbers as float64."""
    element = pointer.type.pointee
    vector = ir.VectorType(element, LANES)
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4 if element == ir.FloatType() else 8)
    return loaded if element == ir.DoubleType() else builder.fpext(loaded, _VECTOR)


def _broadcast(builder: Any, value: Any) -> Any:
    """Eight times the same number."""
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, one, lanes)


def _tile(vectors: int, add: bool) -> Callable[..., None]:
    """An intrinsic that computes ROWS rows of C, each as `vectors` vectors; with `add`, C += A B.

    C[c0 + i c_row + j] = sum_t A[a0 + i a_row + t a_term] B[b0 + t b_term + j].
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = [context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 4, 7)]
        _, a0, a_row, a_term, _, b0, b_term, _, c0, c_row, terms = arguments
        a, b, c = (builder.gep(p, [at]) for p, at in zip(arrays, (a0, b0, c0), strict=True))
        lane = [ir.Constant(ir.IntType(64), LANES * v) for v in range(vectors)]
        row = [ir.Constant(ir.IntType(64), i) for i in range(ROWS)]
        targets = [builder.gep(c, [builder.add(builder.mul(r, c_row), at)]) for r in row for at in lane]
        start = [_load_vector(builder, p) if add else ir.Constant(_VECTOR, None) for p in targets]
        sums = [cgutils.alloca_once_value(builder, value) for value in start]
        with cgutils.for_range(builder, terms) as loop:
            b_at, a_at = builder.mul(loop.index, b_term), builder.mul(loop.index, a_term)
            right = [_load_vector(builder, builder.gep(b, [builder.add(b_at, at)])) for at in lane]
            for i, r in enumerate(row):
                left = builder.load(builder.gep(a, [builder.add(a_at, builder.mul(r, a_row))]))
                left = _broadcast(builder, left)
                for v in range(vectors):
                    total = sums[i * vectors + v]
                    term = builder.fmul(left, right[v], flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), term, flags=("contract",)), total)
        for target, total in zip(targets, sums, strict=True):
            builder.store(builder.load(total), builder.bitcast(target, _VECTOR.as_pointer()), align=8)
        return context.get_dummy_value()

    @intrinsic
    def tile(_, a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms):  # type: ignore[no-untyped-def]
        n = types.intp
        return types.void(a, n, n, n, b, n, n, c, n, n, n), generate

    return tile


_set1, _set2, _set4 = (_tile(vectors, False) for vectors in (1, 2, 4))
_add1, _add2, _add4 = (_tile(vectors, True) for vectors in (1, 2, 4))


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


@kernel
def set_rows(a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms, columns):  # type: ignore[no-untyped-def]
    """ROWS rows of C = A B, `columns` rounded up to LANES; A, C float64, B float32 or float64, flat with offsets."""
    _by_width(_set1, _set2, _set4, a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms, columns)


@kernel
def add_rows(a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms, columns):  # type: ignore[no-untyped-def]
    """`set_rows` for C += A B."""
    _by_width(_add1, _add2, _add4, a, a0, a_row, a_term, b, b0, b_term, c, c0, c_row, terms, columns)
