"""Code with LLVM's vector types, sixteen lanes each, where its loop vectoriser does not find good code by itself.

Pointers are integers (addresses in bytes). Results do not depend on the width of the machine's registers.
Digits are signed, base 256: x = d0 + 256 d1 + 65536 d2 + ..., -128 <= d < 128.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from llvmlite.ir import Value
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
FLOAT, DOUBLE = ir.FloatType(), ir.DoubleType()
I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
VOID = ir.VoidType()
TILE = 1024  # bytes of a tile: 16 rows of 64


def vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def constant(element: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(vector(element), [value] * LANES)


def spread(b: Builder, element: ir.Type, scalar: Value) -> Value:
    """All lanes equal to `scalar`."""
    undefined = ir.Constant(vector(element), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(vector(I32), [0] * LANES))


def at(b: Builder, kind: ir.Type, address: Value, offset: int = 0) -> Value:
    """The address plus `offset` bytes as a pointer."""
    total = b.add(address, ir.Constant(I64, offset)) if offset else address
    return b.inttoptr(total, ir.PointerType(kind))


def load(b: Builder, element: ir.Type, address: Value, offset: int = 0) -> Value:
    return b.load(at(b, vector(element), address, offset), align=1)


def store(b: Builder, value: Value, address: Value, offset: int = 0) -> None:
    b.store(value, at(b, value.type, address, offset), align=1)


def call(b: Builder, name: str, result: ir.Type, *arguments: Value) -> Value:
    function = ir.FunctionType(result, [a.type for a in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, function, name), arguments)


def digits_of(b: Builder, integers: Value, count: int) -> list[Value]:
    """The digits of 16 32-bit integers, lowest first, as i8."""
    digits = []
    for s in range(count):
        digit = b.trunc(integers, vector(I8))
        digits.append(digit)
        if s < count - 1:
            integers = b.ashr(b.sub(integers, b.sext(digit, vector(I32))), constant(I32, 8))
    return digits


def _rounded(b: Builder, scaled: Value) -> Value:
    """rne of float32 numbers below 2^31 as 32-bit integers."""
    return b.fptosi(call(b, "llvm.rint.v16f32", vector(FLOAT), scaled), vector(I32))


def _below(b: Builder, x: Value, limits: Value) -> Value:
    """x, but 0 where |x| >= the limit; a limit of NaN is no limit."""
    reached = b.fcmp_ordered(">=", call(b, "llvm.fabs.v16f32", vector(FLOAT), x), limits)
    return b.select(reached, constant(FLOAT, 0.0), x)


def row_quantiser(digits: int, transposed: bool) -> Any:
    """An intrinsic (source, scale, limit, target): the digits of rne(source[0..15] scale), digit s to target + s TILE.

    Numbers of magnitude `limit` and above count as 0; a limit of NaN is no limit. A digit is written as 16 bytes, for
    an A operand; or `transposed`, as four words 64 bytes apart, for a B operand whose columns are the rows of the
    source.
    """

    @intrinsic
    def write(_: Any, source: Any, scale: Any, limit: Any, target: Any) -> Any:
        def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
            inside = _below(b, load(b, FLOAT, args[0]), spread(b, FLOAT, args[2]))
            integers = _rounded(b, b.fmul(inside, spread(b, FLOAT, args[1])))
            for s, digit in enumerate(digits_of(b, integers, digits)):
                if not transposed:
                    store(b, digit, args[3], s * TILE)
                    continue
                words = b.bitcast(digit, ir.VectorType(I32, 4))
                for word in range(4):
                    element = b.extract_element(words, ir.Constant(I32, word))
                    b.store(element, at(b, I32, args[3], s * TILE + 64 * word), align=4)
            return ctx.get_dummy_value()

        return types.void(types.intp, types.float32, types.float32, types.intp), generate

    return write


def _store_words(b: Builder, rows: list[Value], digits: int, target: Value) -> None:
    """Four rows of 16 integers to a B operand: word c of digit s, at target + s TILE + 4 c, holds column c."""
    words: list[Value] = [constant(I32, 0)] * digits
    for row, integers in enumerate(rows):
        for s, digit in enumerate(digits_of(b, integers, digits)):
            words[s] = b.or_(words[s], b.shl(b.zext(digit, vector(I32)), constant(I32, 8 * row)))
    for s, word in enumerate(words):
        store(b, word, target, s * TILE)


def column_quantiser(digits: int) -> Any:
    """An intrinsic (source, stride, scales, limits, target): 4 rows of 16 columns to a B operand, see `_store_words`.

    `scales` and `limits` are 16 floats, one for each column, with the meaning they have in `row_quantiser`.
    """

    @intrinsic
    def write(_: Any, source: Any, stride: Any, scales: Any, limits: Any, target: Any) -> Any:
        def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
            factors, bounds = load(b, FLOAT, args[2]), load(b, FLOAT, args[3])
            rows, address = [], args[0]
            for _ in range(4):
                rows.append(_rounded(b, b.fmul(_below(b, load(b, FLOAT, address), bounds), factors)))
                address = b.add(address, args[1])
            _store_words(b, rows, digits, args[4])
            return ctx.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return write


def scaled_row_quantiser(digits: int) -> Any:
    """An intrinsic (source, stride, scales, target): 4 rows of 16 columns to a B operand, see `_store_words`.

    `scales` are 8 floats, two for each row: a scale outside the range of float32 is a product of two inside it.
    """

    @intrinsic
    def write(_: Any, source: Any, stride: Any, scales: Any, target: Any) -> Any:
        def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
            rows, address = [], args[0]
            for row in range(4):
                x = load(b, FLOAT, address)
                for offset in (8 * row, 8 * row + 4):
                    x = b.fmul(x, spread(b, FLOAT, b.load(at(b, FLOAT, args[2], offset), align=4)))
                rows.append(_rounded(b, x))
                address = b.add(address, args[1])
            _store_words(b, rows, digits, args[3])
            return ctx.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return write


@intrinsic
def transpose_tile(_: Any, tile: Any) -> Any:
    """Transpose the 16 by 16 words of a tile in place: a B operand becomes an A operand."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        rows = [load(b, I32, args[0], 64 * r) for r in range(LANES)]
        for size in (8, 4, 2, 1):  # swap the off-diagonal blocks of this size
            upper = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
            lower = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
            for r in range(LANES):
                if not r & size:
                    first, second = rows[r], rows[r + size]
                    rows[r] = b.shuffle_vector(first, second, ir.Constant(vector(I32), upper))
                    rows[r + size] = b.shuffle_vector(first, second, ir.Constant(vector(I32), lower))
        for r in range(LANES):
            store(b, rows[r], args[0], 64 * r)
        return ctx.get_dummy_value()

    return types.void(types.intp), generate
