"""Code with LLVM's vector types, sixteen lanes each, where its loop vectoriser does not find good code by itself.

Pointers are integers (addresses in bytes). Results do not depend on the width of the machine's registers.
Digits are signed, base 256: x = d0 + 256 d1 + 65536 d2 + ..., -128 <= d < 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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


def choose(b: Builder, selector: Value, cases: Mapping[int, Callable[[], None]]) -> None:
    """Emit a switch over the values of `selector`; a value without a case stops the process."""
    unknown, end = b.append_basic_block("unknown"), b.append_basic_block("end")
    switch = b.switch(selector, unknown)
    for value, emit in cases.items():
        block = b.append_basic_block(f"case{value}")
        switch.add_case(ir.Constant(selector.type, value), block)
        b.position_at_end(block)
        emit()
        b.branch(end)
    b.position_at_end(unknown)
    call(b, "llvm.trap", ir.VoidType())
    b.unreachable()
    b.position_at_end(end)


def row_quantiser(transposed: bool) -> Any:
    """An intrinsic (digits, source, scale, target): the digits of rne(source[0..15] scale), digit s to target + s TILE.

    A digit is written as 16 bytes, for an A operand; or `transposed`, as four words 64 bytes apart, for a B operand
    whose columns are the rows of the source. 2 or 3 digits.
    """

    @intrinsic
    def write(_: Any, digits: Any, source: Any, scale: Any, target: Any) -> Any:
        def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
            scaled = b.fmul(load(b, FLOAT, args[1]), spread(b, FLOAT, args[2]))
            integers = b.fptosi(call(b, "llvm.rint.v16f32", vector(FLOAT), scaled), vector(I32))

            def emit(count: int) -> None:
                for s, digit in enumerate(digits_of(b, integers, count)):
                    if not transposed:
                        store(b, digit, args[3], s * TILE)
                        continue
                    words = b.bitcast(digit, ir.VectorType(I32, 4))
                    for word in range(4):
                        element = b.extract_element(words, ir.Constant(I32, word))
                        b.store(element, at(b, I32, args[3], s * TILE + 64 * word), align=4)

            choose(b, args[0], {count: partial(emit, count) for count in (2, 3)})
            return ctx.get_dummy_value()

        return types.void(types.int64, types.intp, types.float32, types.intp), generate

    return write


def column_quantiser(counts: tuple[int, ...], scale_by_column: bool) -> Any:
    """An intrinsic (digits, source, stride, scales, target): 4 rows of 16 columns, the 4 rows of a column in one word.

    Word c of digit s goes to target + s TILE + 4 c, the layout of a B operand. `scales` are 16 floats, one for each
    column; or 8 floats, two for each row: a scale outside the range of float32 is a product of two inside it.
    """

    @intrinsic
    def write(_: Any, digits: Any, source: Any, stride: Any, scales: Any, target: Any) -> Any:
        def scaled(b: Builder, address: Value, scales: Value, row: int) -> Value:
            x = load(b, FLOAT, address)
            if scale_by_column:
                return b.fmul(x, load(b, FLOAT, scales))
            for offset in (8 * row, 8 * row + 4):
                x = b.fmul(x, spread(b, FLOAT, b.load(at(b, FLOAT, scales, offset), align=4)))
            return x

        def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
            rows = []
            address = args[1]
            for row in range(4):
                rounded = call(b, "llvm.rint.v16f32", vector(FLOAT), scaled(b, address, args[3], row))
                rows.append(b.fptosi(rounded, vector(I32)))
                address = b.add(address, args[2])

            def emit(count: int) -> None:
                words: list[Value] = [constant(I32, 0)] * count
                for row, integers in enumerate(rows):
                    for s, digit in enumerate(digits_of(b, integers, count)):
                        words[s] = b.or_(words[s], b.shl(b.zext(digit, vector(I32)), constant(I32, 8 * row)))
                for s, word in enumerate(words):
                    store(b, word, args[4], s * TILE)

            choose(b, args[0], {count: partial(emit, count) for count in counts})
            return ctx.get_dummy_value()

        return types.void(types.int64, *[types.intp] * 4), generate

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
