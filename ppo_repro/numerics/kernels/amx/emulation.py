"""The functions of `hardware` with ordinary instructions, for tests on CPUs without AMX.

The eight tiles lie one after another at the address `registers`, and after them the palette.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from llvmlite.ir import Value
from numba.core import cgutils

from ppo_repro.numerics.kernels.core import vectors
from ppo_repro.numerics.kernels.core.vectors import I8, I32, I64, LANES, TILE, VOID, at, constant, spread

TILES, ROW_BYTES, PALETTE = 8, 64, 64
STATE = TILES * TILE + PALETTE  # bytes that the registers take in memory
_ROWS = TILES * TILE + 48  # where the palette has the number of rows of each tile


def _address(b: Builder, registers: Value, offset: int) -> Value:
    return b.add(registers, ir.Constant(I64, offset))


def _row(b: Builder, address: Value, row: Value) -> Value:
    return b.add(address, b.mul(row, ir.Constant(I64, ROW_BYTES)))


def _rows(b: Builder, registers: Value, tile: int) -> Value:
    return b.zext(b.load(at(b, I8, registers, _ROWS + tile)), I64)


def _call(b: Builder, name: str, body: Callable[..., None], *arguments: Value) -> None:
    """Call a function of the module; it is made at its first use."""
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(VOID, [I64] * len(arguments)), name)
        function.linkage = "internal"
        own = ir.IRBuilder(function.append_basic_block("entry"))
        body(own, *function.args)
        own.ret_void()
    b.call(function, arguments)


def _copy(b: Builder, source: Value, target: Value, rows: Value) -> None:
    with cgutils.for_range(b, rows) as loop:
        vectors.store(b, vectors.load(b, I32, _row(b, source, loop.index)), _row(b, target, loop.index))


def _byte(b: Builder, words: Value, number: int) -> Value:
    """Signed byte `number` of each 32-bit word."""
    left, right = (constant(I32, n) for n in (24 - 8 * number, 24))
    return b.ashr(b.shl(words, left), right)


def _add_products(b: Builder, target: Value, left: Value, right: Value, rows: Value) -> None:
    with cgutils.for_range(b, rows) as loop:
        own, factors = _row(b, target, loop.index), _row(b, left, loop.index)
        total = vectors.load(b, I32, own)
        for k in range(LANES):
            factor = spread(b, I32, b.load(at(b, I32, factors, 4 * k), align=4))
            words = vectors.load(b, I32, right, ROW_BYTES * k)
            for number in range(4):
                total = b.add(total, b.mul(_byte(b, factor, number), _byte(b, words, number)))
        vectors.store(b, total, own)


def configure(b: Builder, registers: Value, palette: Value) -> None:
    target = _address(b, registers, TILES * TILE)
    vectors.store(b, vectors.load(b, I32, palette), target)


def release(b: Builder, registers: Value) -> None:
    vectors.store(b, constant(I32, 0), registers, TILES * TILE)


def zero(b: Builder, registers: Value, tile: int) -> None:
    for row in range(16):
        vectors.store(b, constant(I32, 0), registers, tile * TILE + row * ROW_BYTES)


def load(b: Builder, registers: Value, tile: int, address: Value) -> None:
    zero(b, registers, tile)
    target = _address(b, registers, tile * TILE)
    _call(b, "emulated_tile_copy", _copy, address, target, _rows(b, registers, tile))


def add_products(b: Builder, registers: Value, target: int, left: int, right: int) -> None:
    addresses = (_address(b, registers, tile * TILE) for tile in (target, left, right))
    _call(b, "emulated_tile_products", _add_products, *addresses, _rows(b, registers, target))


def store(b: Builder, registers: Value, tile: int, address: Value) -> None:
    source = _address(b, registers, tile * TILE)
    _call(b, "emulated_tile_copy", _copy, source, address, _rows(b, registers, tile))
