"""AMX tile registers: sums of products of 8-bit digits in 32-bit integers.

Tiles 0 to 5 are accumulators, one for each power of 256; tile 6 holds a digit of A, tile 7 a digit of B. Left operands
A have four digits, right operands B three: the 12 products of digits lie on six powers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from llvmlite.ir import Value
from numba import types
from numba.extending import intrinsic

from ppo_repro.numerics.kernels.amx import emulation, hardware
from ppo_repro.numerics.kernels.core.environment import EMULATED_AMX
from ppo_repro.numerics.kernels.core.vectors import (
    DOUBLE,
    FLOAT,
    I8,
    I32,
    I64,
    TILE,
    VOID,
    at,
    call,
    constant,
    load,
    spread,
    store,
    vector,
)

A_DIGITS, B_DIGITS = 4, 3
A_SIZE, B_SIZE = A_DIGITS * TILE, B_DIGITS * TILE  # bytes of a block of 16 by 64 integers
LEVELS = A_DIGITS + B_DIGITS - 1  # powers of 256
SAVED = LEVELS * TILE  # bytes of the saved accumulators
_A_TILE, _B_TILE, _ROW_BYTES = 6, 7, 64

_cpu: Any = emulation if EMULATED_AMX else hardware
STATE: int = _cpu.STATE  # bytes of memory at `registers`, an address that each of the operations below takes


# Digit of A, digit of B. A product waits for the one before it on the same power, for about the time of three others;
# here three others lie between them, from block to block too. And two neighbours share a digit, which is loaded once.
PRODUCTS = (0, 0), (0, 2), (3, 2), (1, 2), (1, 0), (2, 0), (2, 2), (2, 1), (0, 1), (1, 1), (3, 1), (3, 0)


def configuration(rows: int) -> np.ndarray:
    """The 64-byte palette for A operands and accumulators of `rows` <= 16 rows."""
    c = np.zeros(64, np.uint8)
    c[0] = 1
    for tile in range(8):
        c[16 + 2 * tile] = _ROW_BYTES
        c[48 + tile] = 16 if tile == _B_TILE else rows
    return c


@intrinsic
def configure(_: Any, registers: Any, palette: Any) -> Any:
    """Load the tile configuration of this thread, 64 bytes at an address."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        _cpu.configure(b, *args)
        return ctx.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def release(_: Any, registers: Any) -> Any:
    """Release the tiles, so that the system need not save them when it switches threads."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        _cpu.release(b, *args)
        return ctx.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def clear(_: Any, registers: Any) -> Any:
    """Zero the accumulators."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        for level in range(LEVELS):
            _cpu.zero(b, args[0], level)
        return ctx.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def multiply(_: Any, registers: Any, a: Any, b: Any) -> Any:
    """Add the products of all digits of 64 terms; at both addresses the digits are TILE bytes apart."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        registers, left, right = args
        loaded_i = loaded_j = -1
        for i, j in PRODUCTS:
            if i != loaded_i:
                _cpu.load(b, registers, _A_TILE, b.add(left, ir.Constant(I64, i * TILE)))
            if j != loaded_j:
                _cpu.load(b, registers, _B_TILE, b.add(right, ir.Constant(I64, j * TILE)))
            loaded_i, loaded_j = i, j
            _cpu.add_products(b, registers, i + j, _A_TILE, _B_TILE)
        return ctx.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def expect(_: Any, address: Any) -> Any:
    """Prefetch two cache lines at an address that will be written soon."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        write, near, data = (ir.Constant(I32, value) for value in (1, 3, 1))
        for line in range(2):
            call(b, "llvm.prefetch.p0", VOID, at(b, I8, args[0], 64 * line), write, near, data)
        return ctx.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def fetch(_: Any, address: Any) -> Any:
    """Prefetch the cache line at an address that will be read soon into the second-level cache."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        read, second, data = (ir.Constant(I32, value) for value in (0, 2, 1))
        call(b, "llvm.prefetch.p0", VOID, at(b, I8, args[0]), read, second, data)
        return ctx.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def save(_: Any, registers: Any, scratch: Any) -> Any:
    """Store the accumulator of 256^level at scratch + level TILE."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        for level in range(LEVELS):
            _cpu.store(b, args[0], level, b.add(args[1], ir.Constant(I64, level * TILE)))
        return ctx.get_dummy_value()

    return types.void(types.intp, types.intp), generate


def _sums(b: Builder, scratch: Value) -> Value:
    """sum_l 256^l level_l as int64 for 16 columns of one row, from saved accumulators."""
    total = b.sext(load(b, I32, scratch), vector(I64))
    for level in range(1, LEVELS):
        wide = b.sext(load(b, I32, scratch, level * TILE), vector(I64))
        total = b.add(total, b.shl(wide, constant(I64, 8 * level)))
    return total


@intrinsic
def write(_: Any, scratch: Any, row_scale: Any, column_scales: Any, bias: Any, target: Any) -> Any:
    """target[0..15] = fl32(fl64(sum) scales) + 0 + bias; after the + 0, a bias of 0 changes no bit."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        total = b.sitofp(_sums(b, args[0]), vector(DOUBLE))
        scale = b.fmul(load(b, DOUBLE, args[2]), spread(b, DOUBLE, args[1]))
        result = b.fadd(b.fptrunc(b.fmul(total, scale), vector(FLOAT)), constant(FLOAT, 0.0))
        store(b, b.fadd(result, load(b, FLOAT, args[3])), args[4])
        return ctx.get_dummy_value()

    return types.void(types.intp, types.float64, types.intp, types.intp, types.intp), generate


@intrinsic
def add_integers(_: Any, scratch: Any, target: Any, mask: Any) -> Any:
    """target[0..15] = (target[0..15] & mask) + sum as int64."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        before = b.and_(load(b, I64, args[1]), spread(b, I64, args[2]))
        store(b, b.add(before, _sums(b, args[0])), args[1])
        return ctx.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), generate
