"""Exact products of grid integers by dot products of 16-bit digits, where a CPU has instructions for them (VNNI).

An integer is high 2^13 + low, |low| <= 2^12. By Karatsuba's rule three products of digits give the four of
(a1 2^13 + a0)(b1 2^13 + b0): a1 b1, a0 b0, and (a1 + a0)(b1 + b0), which less the other two is a1 b0 + a0 b1. An
instruction adds 32 products to int32 sums in the time in which one multiplies and adds 8 float64, so three digit
products take three quarters of the time. Sums of a group of terms, few enough for int32, are added up in int64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from llvmlite.ir import Value
from numba import types
from numba.core import cgutils
from numba.core import config as numba_config
from numba.extending import intrinsic

from ppo_repro.numerics.kernels.float64.tiles import COLUMNS as PANEL
from ppo_repro.numerics.kernels.float64.tiles import DOUBLE, FLOAT, I32, I64, ROWS, _number, _pointer

LANES, VECTORS = 16, 3
COLUMNS = LANES * VECTORS  # of a tile: two panels
BLOCK = ROWS * COLUMNS
DIGITS, BASE = 3, 13  # the third digit is the sum of the two
_KNOWN_LLVM = 20  # from some later version on the instruction takes vectors of int16
PAIR = 4  # bytes of a digit of two terms, which lie side by side
_HALF, _MASK = 1 << (BASE - 1), (1 << BASE) - 1
_EIGHT = 8  # numbers that are taken apart at a time


def _has_dot_products() -> bool:
    """Whether kernels are compiled for a CPU with VNNI instructions of 512 bits, by an LLVM known to take them."""
    if numba_config.CPU_NAME or numba_config.CPU_FEATURES is not None:
        has = "+avx512vnni" in (numba_config.CPU_FEATURES or "")
    else:
        has = bool(llvm.get_host_cpu_features().get("avx512vnni", False))
    return has and llvm.llvm_version_info[0] <= _KNOWN_LLVM


# whether products of many rows are computed so; the kernels themselves run anywhere, then slowly
IN_USE = _has_dot_products()


def _vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def _all(element: ir.Type, value: int, lanes: int) -> ir.Constant:
    return ir.Constant(_vector(element, lanes), [value] * lanes)


def _spread(b: Builder, element: ir.Type, scalar: Value, lanes: int = LANES) -> Value:
    undefined = ir.Constant(_vector(element, lanes), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(_vector(I32, lanes), [0] * lanes))


def _digits_of(b: Builder, x: Value) -> list[Value]:
    """The three digits of eight int32."""
    half, mask, base = (_all(I32, n, _EIGHT) for n in (_HALF, _MASK, BASE))
    low = b.sub(b.and_(b.add(x, half), mask), half)
    high = b.ashr(b.sub(x, low), base)
    return [high, low, b.add(high, low)]


def _store_pair(b: Builder, first: Value, second: Value, target: Value, apart: Value) -> None:
    """The digits of two terms, eight columns or rows of each, `apart` bytes from digit to digit."""
    below, shift = _all(I32, 0xFFFF, _EIGHT), _all(I32, 16, _EIGHT)
    for one, other in zip(_digits_of(b, first), _digits_of(b, second), strict=True):
        b.store(b.or_(b.and_(one, below), b.shl(other, shift)), _pointer(b, one.type, target), align=4)
        target = b.add(target, apart)


@contextmanager
def _each_pair(b: Builder, terms: Value) -> Iterator[tuple[Value, Value]]:
    """A loop over pairs of terms: the first of a pair, and whether there is a second."""
    pairs = b.lshr(b.add(terms, _number(1)), _number(1))
    with cgutils.for_range(b, pairs) as loop:
        first = b.mul(loop.index, _number(2))
        yield first, b.icmp_signed("<", b.add(first, _number(1)), terms)


def _load_or_zero(b: Builder, kind: ir.VectorType, address: Value, exists: Value) -> Value:
    """A vector, or zeros where it does not exist; nothing beyond the end is read."""
    place = cgutils.alloca_once_value(b, ir.Constant(kind, None))
    b.store(ir.Constant(kind, None), place)
    with b.if_then(exists, likely=True):
        b.store(b.load(_pointer(b, kind, address), align=4), place)
    return b.load(place)


@intrinsic
def block_digits(_: Any, source: Any, terms: Any, target: Any, apart: Any) -> Any:
    """Digits of a block of a left operand: source float64 [terms, ROWS], target int32 [DIGITS][pairs, ROWS].

    Addresses; digits are `apart` bytes apart.
    """

    def generate(context: Any, b: Builder, __: Any, args: Any) -> Value:
        source, terms, target, apart = args
        doubles, row = _vector(DOUBLE, _EIGHT), 8 * ROWS
        with _each_pair(b, terms) as (term, has_second):
            at = b.add(source, b.mul(term, _number(row)))
            first = b.load(_pointer(b, doubles, at), align=8)
            second = _load_or_zero(b, doubles, b.add(at, _number(row)), has_second)
            place = b.add(target, b.mul(term, _number(PAIR * ROWS // 2)))
            first, second = (b.fptosi(x, _vector(I32, _EIGHT)) for x in (first, second))
            _store_pair(b, first, second, place, apart)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@intrinsic
def panel_digits(_: Any, source: Any, terms: Any, target: Any, apart: Any) -> Any:
    """Digits of a panel of a right operand: source int32 [terms, PANEL], target int32 [DIGITS][pairs, COLUMNS].

    It fills PANEL columns from `target` on. Addresses; digits are `apart` bytes apart.
    """

    def generate(context: Any, b: Builder, __: Any, args: Any) -> Value:
        source, terms, target, apart = args
        integers = _vector(I32, _EIGHT)
        with _each_pair(b, terms) as (term, has_second):
            at = b.add(source, b.mul(term, _number(4 * PANEL)))
            place = b.add(target, b.mul(term, _number(PAIR * COLUMNS // 2)))
            for c in range(0, PANEL, _EIGHT):
                first = b.load(_pointer(b, integers, at, 4 * c), align=4)
                second = _load_or_zero(b, integers, b.add(at, _number(4 * (PANEL + c))), has_second)
                _store_pair(b, first, second, b.add(place, _number(PAIR * c)), apart)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


def _dot(b: Builder, total: Value, left: Value, right: Value) -> Value:
    """total + the sums of the two products of 16-bit numbers in each lane."""
    if IN_USE:
        kind = _vector(I32)
        function = ir.FunctionType(kind, [kind] * 3)
        name = "llvm.x86.avx512.vpdpwssd.512"
        return b.call(cgutils.get_or_insert_function(b.module, function, name), [total, left, right])
    shift = _all(I32, 16, LANES)
    low = [b.ashr(b.shl(x, shift), shift) for x in (left, right)]
    return b.add(total, b.add(b.mul(*low), b.mul(b.ashr(left, shift), b.ashr(right, shift))))


def _add_pairs(b: Builder, vectors: int, left: Value, right: Value, pairs: Value, out: Value) -> None:
    """Int32 sums over `pairs` of one digit to out [ROWS, vectors, LANES]."""
    kind = _vector(I32)
    sums = [cgutils.alloca_once_value(b, ir.Constant(kind, None)) for _ in range(ROWS * vectors)]
    for total in sums:
        b.store(ir.Constant(kind, None), total)
    with cgutils.for_range(b, pairs) as pair:
        at_left = b.add(left, b.mul(pair.index, _number(PAIR * ROWS)))
        at_right = b.add(right, b.mul(pair.index, _number(PAIR * COLUMNS)))
        columns = [b.load(_pointer(b, kind, at_right, PAIR * LANES * v), align=4) for v in range(vectors)]
        for i in range(ROWS):
            x = _spread(b, I32, b.load(_pointer(b, I32, at_left, PAIR * i), align=4))
            for v, column in enumerate(columns):
                total = sums[i * vectors + v]
                b.store(_dot(b, b.load(total), x, column), total)
    for index, total in enumerate(sums):
        b.store(b.load(total), _pointer(b, kind, out, 4 * LANES * index), align=4)


def _combine(b: Builder, vectors: int, scratch: Value, sums: Value) -> None:
    """sums [ROWS, COLUMNS] int64 += the digit sums in scratch memory, by their weights."""
    wide, base = _vector(I64), _all(I64, BASE, LANES)
    apart = 4 * LANES * vectors * ROWS
    for index in range(ROWS * vectors):
        at, row, v = 4 * LANES * index, index // vectors, index % vectors
        high, low, both = (
            b.load(_pointer(b, _vector(I32), scratch, digit * apart + at), align=4) for digit in range(DIGITS)
        )
        middle = b.sub(b.sub(both, high), low)
        high, middle, low = (b.sext(x, wide) for x in (high, middle, low))
        total = b.add(b.shl(b.add(b.shl(high, base), middle), base), low)
        place = _pointer(b, wide, sums, 8 * (row * COLUMNS + v * LANES))
        b.store(b.add(b.load(place, align=8), total), place, align=8)


def _tile(vectors: int) -> Callable[..., None]:
    """An intrinsic (left, right, left_apart, right_apart, pairs, group, scratch, sums): sums += left right, exactly.

    left int32 [DIGITS][pairs, ROWS], right int32 [DIGITS][pairs, COLUMNS], digits left_apart and right_apart bytes
    apart; scratch of DIGITS BLOCK int32; sums int64 [ROWS, COLUMNS], of which `vectors` x LANES columns are changed.
    All but `pairs` and `group`, the pairs whose sums int32 holds, are addresses or bytes.
    """

    def generate(context: Any, b: Builder, _: Any, args: Any) -> Value:
        left, right, left_apart, right_apart, pairs, group_size, scratch, sums = args
        groups = b.udiv(b.add(pairs, b.sub(group_size, _number(1))), group_size)
        with cgutils.for_range(b, groups) as group:
            first = b.mul(group.index, group_size)
            rest = b.sub(pairs, first)
            count = b.select(b.icmp_signed("<", rest, group_size), rest, group_size)
            a, w, out = b.add(left, b.mul(first, _number(PAIR * ROWS))), right, scratch
            w = b.add(w, b.mul(first, _number(PAIR * COLUMNS)))
            for _ in range(DIGITS):
                _add_pairs(b, vectors, a, w, count, out)
                a, w, out = b.add(a, left_apart), b.add(w, right_apart), b.add(out, _number(4 * LANES * vectors * ROWS))
            _combine(b, vectors, scratch, sums)
        return context.get_dummy_value()

    @intrinsic
    def tile(_, left, right, left_apart, right_apart, pairs, group, scratch, sums):  # type: ignore[no-untyped-def]
        return types.void(*[types.intp] * 8), generate

    return tile


add_tile_of_1, add_tile_of_2, add_tile_of_3 = (_tile(vectors) for vectors in (1, 2, VECTORS))


@intrinsic
def rounded_integers(_, sums, scales, column_scales, bias, target, stride, rows, width):  # type: ignore[no-untyped-def]
    """target[i, c] = (fl32(fl64(sums) scales[i] column_scales[c]) + 0) + bias[c], `stride` bytes between its rows.

    sums int64 [ROWS, COLUMNS]; scales and column_scales float64, bias and target float32. `width` columns, rounded up
    to a multiple of eight. All but `stride`, `rows` and `width` are addresses.
    """

    def generate(context: Any, b: Builder, __: Any, args: Any) -> Value:
        sums, scales, column_scales, bias, target, stride, rows, width = args
        doubles, floats = _vector(DOUBLE, _EIGHT), _vector(FLOAT, _EIGHT)
        zeros = ir.Constant(floats, [0.0] * _EIGHT)
        parts = b.lshr(b.add(width, _number(_EIGHT - 1)), _number(3))
        with cgutils.for_range(b, rows) as row:
            scale = b.load(_pointer(b, DOUBLE, b.add(scales, b.mul(row.index, _number(8)))), align=8)
            scale = _spread(b, DOUBLE, scale, _EIGHT)
            at, out = b.add(sums, b.mul(row.index, _number(8 * COLUMNS))), b.add(target, b.mul(row.index, stride))
            with cgutils.for_range(b, parts) as part:
                wide, narrow = (b.mul(part.index, _number(size * _EIGHT)) for size in (8, 4))
                integers = b.load(_pointer(b, _vector(I64, _EIGHT), b.add(at, wide)), align=8)
                factors = b.load(_pointer(b, doubles, b.add(column_scales, wide)), align=8)
                total = b.fmul(b.fmul(b.sitofp(integers, doubles), scale), factors)
                y = b.fadd(b.fptrunc(total, floats), zeros)
                y = b.fadd(y, b.load(_pointer(b, floats, b.add(bias, narrow)), align=4))
                b.store(y, _pointer(b, floats, b.add(out, narrow)), align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8), generate
