"""AMX tile registers: sums of products of 8-bit digits in 32-bit integers.

Tiles 0 to 5 are accumulators, tile 6 holds a digit of A, tile 7 a digit of B. A `kind` says how many digits A and B
have: 10 (digits of A) + (digits of B). Intel, Architecture Instruction Set Extensions Programming Reference, ch. 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from llvmlite.ir import Value
from numba import types
from numba.extending import intrinsic

from ppo_repro.numerics.kernels.core.vectors import (
    DOUBLE,
    FLOAT,
    I8,
    I32,
    I64,
    TILE,
    at,
    call,
    choose,
    constant,
    load,
    spread,
    store,
    vector,
)

ACCUMULATORS = 6
ROW_BYTES = 64
VOID = ir.VoidType()


@dataclass(frozen=True)
class Program:
    """The accumulator of each digit product, and the accumulators of each power of 256."""

    products: tuple[tuple[int, int, int], ...]  # digit of A, digit of B, accumulator
    level_tiles: tuple[tuple[int, ...], ...]


def program(a_digits: int, b_digits: int) -> Program:
    """All digit products in an order that reuses the loaded digit of B.

    A product waits for the previous one into the same accumulator. So a level that occurs again within three products
    gets a second accumulator while there are some left.
    """
    levels = a_digits + b_digits - 1
    tiles = [[level] for level in range(levels)]
    spare = list(range(levels, ACCUMULATORS))
    products: list[tuple[int, int, int]] = []
    for i in range(a_digits):
        for j in range(b_digits) if i % 2 == 0 else range(b_digits - 1, -1, -1):
            level = i + j
            recent = [accumulator for _, _, accumulator in products[-3:]]
            free = [tile for tile in tiles[level] if tile not in recent]
            if not free and spare:
                tiles[level].append(spare.pop(0))
                free = tiles[level][-1:]
            products.append((i, j, free[0] if free else tiles[level][0]))
    return Program(tuple(products), tuple(tuple(t) for t in tiles))


KINDS = {10 * a + b: program(a, b) for a, b in ((2, 2), (3, 3), (3, 2), (4, 3), (4, 2))}


def configuration(rows: int) -> np.ndarray:
    """The 64-byte palette for A operands and accumulators of `rows` <= 16 rows."""
    c = np.zeros(64, np.uint8)
    c[0] = 1
    for tile in range(8):
        c[16 + 2 * tile] = ROW_BYTES
        c[48 + tile] = 16 if tile == 7 else rows
    return c


@intrinsic
def configure(_: Any, address: Any) -> Any:
    """Load the tile configuration of this thread, 64 bytes at an address."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        call(b, "llvm.x86.ldtilecfg", VOID, at(b, I8, args[0]))
        return ctx.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def release(_: Any) -> Any:
    """Release the tiles, so that the system need not save them when it switches threads."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        call(b, "llvm.x86.tilerelease", VOID)
        return ctx.get_dummy_value()

    return types.void(), generate


def _tile(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


@intrinsic
def clear(_: Any) -> Any:
    """Zero the accumulators."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        for tile in range(ACCUMULATORS):
            call(b, "llvm.x86.tilezero", VOID, _tile(tile))
        return ctx.get_dummy_value()

    return types.void(), generate


@intrinsic
def multiply(_: Any, kind: Any, a: Any, b: Any) -> Any:
    """Add the products of all digits of 64 terms; at both addresses the digits are TILE bytes apart."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        stride = ir.Constant(I64, ROW_BYTES)

        def emit(p: Program) -> None:
            loaded_a = loaded_b = -1
            for i, j, accumulator in p.products:
                if i != loaded_a:
                    call(b, "llvm.x86.tileloadd64", VOID, _tile(6), at(b, I8, args[1], i * TILE), stride)
                if j != loaded_b:
                    call(b, "llvm.x86.tileloadd64", VOID, _tile(7), at(b, I8, args[2], j * TILE), stride)
                loaded_a, loaded_b = i, j
                call(b, "llvm.x86.tdpbssd", VOID, _tile(accumulator), _tile(6), _tile(7))

        choose(b, args[0], {number: partial(emit, p) for number, p in KINDS.items()})
        return ctx.get_dummy_value()

    return types.void(types.int64, types.intp, types.intp), generate


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
def save(_: Any, scratch: Any) -> Any:
    """Store accumulator t at scratch + t TILE."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        stride = ir.Constant(I64, ROW_BYTES)
        for tile in range(ACCUMULATORS):
            call(b, "llvm.x86.tilestored64", VOID, _tile(tile), at(b, I8, args[0], tile * TILE), stride)
        return ctx.get_dummy_value()

    return types.void(types.intp), generate


def _levels(b: Builder, scratch: Value, p: Program) -> list[Value]:
    """The integer sum of each power of 256 for 16 columns of one row, from saved accumulators."""
    sums = []
    for tiles in p.level_tiles:
        total = load(b, I32, scratch, tiles[0] * TILE)
        for tile in tiles[1:]:
            total = b.add(total, load(b, I32, scratch, tile * TILE))
        sums.append(total)
    return sums


@intrinsic
def write(_: Any, kind: Any, scratch: Any, row_scale: Any, column_scales: Any, bias: Any, target: Any) -> Any:
    """target[0..15] = fl32(sum_l 256^l level_l scales) + 0 + bias; after the + 0, a bias of 0 changes no bit."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        def emit(p: Program) -> None:
            wide = [b.sitofp(level, vector(DOUBLE)) for level in _levels(b, args[1], p)]
            total = wide[-1]
            for level in reversed(wide[:-1]):  # integers below 2^53: a fused multiply-add changes nothing
                total = call(b, "llvm.fma.v16f64", vector(DOUBLE), total, constant(DOUBLE, 256.0), level)
            scale = b.fmul(load(b, DOUBLE, args[3]), spread(b, DOUBLE, args[2]))
            result = b.fadd(b.fptrunc(b.fmul(total, scale), vector(FLOAT)), constant(FLOAT, 0.0))
            store(b, b.fadd(result, load(b, FLOAT, args[4])), args[5])

        choose(b, args[0], {number: partial(emit, KINDS[number]) for number in (22, 33)})
        return ctx.get_dummy_value()

    return types.void(types.int64, types.intp, types.float64, types.intp, types.intp, types.intp), generate


@intrinsic
def add_integers(_: Any, kind: Any, scratch: Any, target: Any, mask: Any) -> Any:
    """target[0..15] = (target[0..15] & mask) + sum_l 256^l level_l as int64."""

    def generate(ctx: Any, b: Builder, __: Any, args: Any) -> Value:
        def emit(p: Program) -> None:
            total = b.and_(load(b, I64, args[2]), spread(b, I64, args[3]))
            for power, level in enumerate(_levels(b, args[1], p)):
                total = b.add(total, b.shl(b.sext(level, vector(I64)), constant(I64, 8 * power)))
            store(b, total, args[2])

        choose(b, args[0], {number: partial(emit, p) for number, p in KINDS.items() if number != 22})
        return ctx.get_dummy_value()

    return types.void(types.int64, types.intp, types.intp, types.int64), generate
