"""Code with LLVM's vector types that fills operands: eight rows on their grids at a time, turned so that terms follow.

Addresses are integers, in bytes. Results do not depend on the width of the machine's registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from llvmlite.ir import Value
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
_FLOAT, _DOUBLE, _I32, _I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)


def _vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def _spread(b: Builder, element: ir.Type, scalar: Value) -> Value:
    """All lanes equal to `scalar`."""
    undefined = ir.Constant(_vector(element), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(_vector(_I32), [0] * LANES))


def _pointer(b: Builder, kind: ir.Type, address: Value, offset: int = 0) -> Value:
    return b.inttoptr(b.add(address, ir.Constant(_I64, offset)), kind.as_pointer())


def _call(b: Builder, name: str, kind: ir.Type, *arguments: Value) -> Value:
    function = ir.FunctionType(kind, [a.type for a in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, function, name), arguments)


def _rint(b: Builder, x: Value) -> Value:
    return _call(b, "llvm.rint.v8f64", _vector(_DOUBLE), x)


def _inside(b: Builder, x: Value, room: Value, limit: Value) -> Value:
    """x, but 0 unless |x room| < limit."""
    inside = b.fcmp_ordered("<", _call(b, "llvm.fabs.v8f32", _vector(_FLOAT), b.fmul(x, room)), limit)
    return b.select(inside, x, ir.Constant(_vector(_FLOAT), [0.0] * LANES))


def _transpose(b: Builder, rows: list[Value]) -> list[Value]:
    """Eight vectors whose lane i of vector k was lane k of vector i."""
    for size in (4, 2, 1):  # swap the off-diagonal blocks of this size
        upper = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
        lower = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
        for r in range(LANES):
            if not r & size:
                first, second = rows[r], rows[r + size]
                rows[r] = b.shuffle_vector(first, second, ir.Constant(_vector(_I32), upper))
                rows[r + size] = b.shuffle_vector(first, second, ir.Constant(_vector(_I32), lower))
    return rows


def rows_on_grids(integers: bool, columns: int) -> Any:
    """An intrinsic (source, stride, room, limits, ups, target, terms): 8 rows of `terms` numbers, a multiple of 8.

    target[k, i] = rne(source[i, k] ups[i]), or 0 where |source[i, k] room| < limits[i] does not hold. source float32,
    `stride` bytes between its rows; limits [8] float32, ups [8] float64; target float64, or int32, [terms, columns].
    """
    element, size = (_I32, 4) if integers else (_DOUBLE, 8)

    @intrinsic
    def write(_: Any, source: Any, stride: Any, room: Any, limits: Any, ups: Any, target: Any, terms: Any) -> Any:
        def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
            source, stride, room, limits, ups, target, terms = args
            room = _spread(b, _FLOAT, room)
            with cgutils.for_range(b, b.udiv(terms, ir.Constant(_I64, LANES))) as part:
                row, rows = b.add(source, b.mul(part.index, ir.Constant(_I64, 4 * LANES))), []
                for i in range(LANES):
                    x = b.load(_pointer(b, _vector(_FLOAT), row), align=4)
                    limit = _spread(b, _FLOAT, b.load(_pointer(b, _FLOAT, limits, 4 * i), align=4))
                    up = _spread(b, _DOUBLE, b.load(_pointer(b, _DOUBLE, ups, 8 * i), align=8))
                    number = _rint(b, b.fmul(b.fpext(_inside(b, x, room, limit), _vector(_DOUBLE)), up))
                    rows.append(b.fptosi(number, _vector(_I32)) if integers else number)
                    row = b.add(row, stride)
                out = b.add(target, b.mul(part.index, ir.Constant(_I64, LANES * size * columns)))
                for k, term in enumerate(_transpose(b, rows)):
                    b.store(term, _pointer(b, _vector(element), out, k * size * columns), align=size)
            return ctx.get_dummy_value()

        arguments = types.intp, types.intp, types.float32, types.intp, types.intp, types.intp, types.intp
        return types.void(*arguments), generate

    return write


def largest_square(integers: bool, columns: int) -> Any:
    """An intrinsic (source, terms) -> float64: of the sums of squares of the columns of [terms, columns], the largest.

    source float64 or int32. The sums are rounded, by far less than a millionth.
    """
    element, size, vectors = (_I32, 4, columns // LANES) if integers else (_DOUBLE, 8, columns // LANES)

    @intrinsic
    def largest(_: Any, source: Any, terms: Any) -> Any:
        def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
            source, terms = args
            sums = [cgutils.alloca_once(b, _vector(_DOUBLE)) for _ in range(vectors)]
            for total in sums:
                b.store(ir.Constant(_vector(_DOUBLE), [0.0] * LANES), total)
            with cgutils.for_range(b, terms) as term:
                row = b.add(source, b.mul(term.index, ir.Constant(_I64, size * columns)))
                for v, total in enumerate(sums):
                    x = b.load(_pointer(b, _vector(element), row, size * LANES * v), align=size)
                    x = b.sitofp(x, _vector(_DOUBLE)) if integers else x
                    square = b.fmul(x, x, flags=("contract",))
                    b.store(b.fadd(b.load(total), square, flags=("contract",)), total)
            result: Value = ir.Constant(_DOUBLE, 0.0)
            for total in sums:
                number = b.load(total)
                for lane in range(LANES):
                    x = b.extract_element(number, ir.Constant(_I32, lane))
                    result = b.select(b.fcmp_ordered(">", x, result), x, result)
            return result

        return types.float64(types.intp, types.intp), generate

    return largest


def rounded_sums(columns: int, start: float) -> Any:
    """An intrinsic (high, low, scales, column_scales, bias, target, stride, rows): a block of sums as float32.

    target[i, c] = (fl32(((high - start) + low)[i, c] scales[i] column_scales[c]) + 0) + bias[c], `stride` bytes between
    its rows. high, low float64 [rows, columns], scales and column_scales float64, bias float32.
    """

    @intrinsic
    def write(
        _: Any, high: Any, low: Any, scales: Any, column_scales: Any, bias: Any, target: Any, stride: Any, rows: Any
    ) -> Any:
        def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
            high, low, scales, column_scales, bias, target, stride, rows = args
            starts, zeros = ir.Constant(_vector(_DOUBLE), [start] * LANES), ir.Constant(_vector(_FLOAT), [0.0] * LANES)
            with cgutils.for_range(b, rows) as row:
                scale = b.load(_pointer(b, _DOUBLE, b.add(scales, b.mul(row.index, ir.Constant(_I64, 8)))), align=8)
                scale = _spread(b, _DOUBLE, scale)
                at, out = b.mul(row.index, ir.Constant(_I64, 8 * columns)), b.add(target, b.mul(row.index, stride))
                for c in range(0, columns, LANES):
                    h, w = (b.load(_pointer(b, _vector(_DOUBLE), b.add(x, at), 8 * c), align=8) for x in (high, low))
                    column_scale = b.load(_pointer(b, _vector(_DOUBLE), column_scales, 8 * c), align=8)
                    total = b.fmul(b.fmul(b.fadd(b.fsub(h, starts), w), scale), column_scale)
                    y = b.fadd(b.fptrunc(total, _vector(_FLOAT)), zeros)
                    y = b.fadd(y, b.load(_pointer(b, _vector(_FLOAT), bias, 4 * c), align=4))
                    b.store(y, _pointer(b, _vector(_FLOAT), out, 4 * c), align=4)
            return ctx.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return write


def _reduced(b: Builder, numbers: Value, combine: Any) -> Value:
    result = b.extract_element(numbers, ir.Constant(_I32, 0))
    for lane in range(1, numbers.type.count):
        result = combine(result, b.extract_element(numbers, ir.Constant(_I32, lane)))
    return result


@intrinsic
def largest_bits_at(_: Any, source: Any, count: Any) -> Any:
    """The bits of the largest magnitude of `count` float32 numbers at an address."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        source, count = args
        wide, lanes = ir.VectorType(_I32, 4 * LANES), ir.Constant(_I64, 4 * LANES)
        mask, zeros = ir.Constant(wide, [0x7FFFFFFF] * 4 * LANES), ir.Constant(wide, [0] * 4 * LANES)
        vectors, rest = cgutils.alloca_once_value(b, zeros), cgutils.alloca_once_value(b, ir.Constant(_I32, 0))

        def larger(x: Value, y: Value) -> Value:
            return b.select(b.icmp_signed(">", x, y), x, y)

        parts = b.udiv(count, lanes)
        with cgutils.for_range(b, parts) as part:
            at = b.add(source, b.mul(part.index, ir.Constant(_I64, 16 * LANES)))
            b.store(larger(b.and_(b.load(_pointer(b, wide, at), align=4), mask), b.load(vectors)), vectors)
        done = b.mul(parts, lanes)
        with cgutils.for_range(b, b.sub(count, done)) as one:
            at = b.add(source, b.mul(b.add(done, one.index), ir.Constant(_I64, 4)))
            number = b.and_(b.load(_pointer(b, _I32, at), align=4), ir.Constant(_I32, 0x7FFFFFFF))
            b.store(larger(number, b.load(rest)), rest)
        return larger(b.load(rest), _reduced(b, b.load(vectors), larger))

    return types.int32(types.intp, types.intp), generate


@intrinsic
def large_numbers_at(_: Any, source: Any, parts: Any, room: Any, least: Any) -> Any:
    """How many of 8 x `parts` float32 numbers x at an address have |x room| >= least, int32."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        source, parts, room, least = args
        room, least = _spread(b, _FLOAT, room), _spread(b, _FLOAT, least)
        counts = cgutils.alloca_once_value(b, ir.Constant(_vector(_I32), [0] * LANES))
        with cgutils.for_range(b, parts) as part:
            at = b.add(source, b.mul(part.index, ir.Constant(_I64, 4 * LANES)))
            x = b.load(_pointer(b, _vector(_FLOAT), at), align=4)
            large = b.fcmp_ordered(">=", _call(b, "llvm.fabs.v8f32", _vector(_FLOAT), b.fmul(x, room)), least)
            b.store(b.add(b.load(counts), b.zext(large, _vector(_I32))), counts)
        return _reduced(b, b.load(counts), b.add)

    return types.int32(types.intp, types.intp, types.float32, types.float32), generate


def terms_on_grids(integers: bool, columns: int) -> Any:
    """An intrinsic (source, stride, ups, target, terms): target[t, c] = rne(source[t, c] ups[t]).

    source float32, `stride` bytes between its terms; ups float64 [terms]; target float64, or int32, [terms, columns].
    """
    element, size = (_I32, 4) if integers else (_DOUBLE, 8)

    @intrinsic
    def write(_: Any, source: Any, stride: Any, ups: Any, target: Any, terms: Any) -> Any:
        def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
            source, stride, ups, target, terms = args
            with cgutils.for_range(b, terms) as term:
                row = b.add(source, b.mul(term.index, stride))
                out = b.add(target, b.mul(term.index, ir.Constant(_I64, size * columns)))
                up = b.load(_pointer(b, _DOUBLE, b.add(ups, b.mul(term.index, ir.Constant(_I64, 8)))), align=8)
                for c in range(0, columns, LANES):
                    x = b.fpext(b.load(_pointer(b, _vector(_FLOAT), row, 4 * c), align=4), _vector(_DOUBLE))
                    number = _rint(b, b.fmul(x, _spread(b, _DOUBLE, up)))
                    number = b.fptosi(number, _vector(_I32)) if integers else number
                    b.store(number, _pointer(b, _vector(element), out, size * c), align=size)
            return ctx.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return write


def columns_on_grids(columns: int) -> Any:
    """An intrinsic (source, stride, room, limits, ups, target, terms): target[t, c] = rne(source[t, c] ups[c]).

    0 where |source[t, c] room| < limits[c] does not hold. source float32, `stride` bytes between its terms; limits
    [columns] float32, ups [columns] float64; target int32 [terms, columns].
    """

    @intrinsic
    def write(_: Any, source: Any, stride: Any, room: Any, limits: Any, ups: Any, target: Any, terms: Any) -> Any:
        def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
            source, stride, room, limits, ups, target, terms = args
            parts, room = range(0, columns, LANES), _spread(b, _FLOAT, room)
            bounds = [b.load(_pointer(b, _vector(_FLOAT), limits, 4 * c), align=4) for c in parts]
            units = [b.load(_pointer(b, _vector(_DOUBLE), ups, 8 * c), align=8) for c in parts]
            with cgutils.for_range(b, terms) as term:
                row = b.add(source, b.mul(term.index, stride))
                out = b.add(target, b.mul(term.index, ir.Constant(_I64, 4 * columns)))
                for c, bound, unit in zip(parts, bounds, units, strict=True):
                    x = _inside(b, b.load(_pointer(b, _vector(_FLOAT), row, 4 * c), align=4), room, bound)
                    number = _rint(b, b.fmul(b.fpext(x, _vector(_DOUBLE)), unit))
                    b.store(b.fptosi(number, _vector(_I32)), _pointer(b, _vector(_I32), out, 4 * c), align=4)
            return ctx.get_dummy_value()

        arguments = types.intp, types.intp, types.float32, types.intp, types.intp, types.intp, types.intp
        return types.void(*arguments), generate

    return write
