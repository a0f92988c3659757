"""The AMX instructions of the CPU. Intel, Architecture Instruction Set Extensions Programming Reference, ch. 3.

`registers`, an address, is where `emulation` keeps its tiles. Here the CPU has them.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from llvmlite.ir import Value

from ppo_repro.numerics.kernels.core.vectors import I8, I64, VOID, at, call

STATE = 0  # bytes that the registers take in memory
_ROW_BYTES = ir.Constant(I64, 64)


def _tile(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def configure(b: Builder, registers: Value, palette: Value) -> None:
    """Load the tile configuration of this thread, 64 bytes at `palette`."""
    call(b, "llvm.x86.ldtilecfg", VOID, at(b, I8, palette))


def release(b: Builder, registers: Value) -> None:
    """Make the tiles unusable until the next `configure`."""
    call(b, "llvm.x86.tilerelease", VOID)


def zero(b: Builder, registers: Value, tile: int) -> None:
    call(b, "llvm.x86.tilezero", VOID, _tile(tile))


def load(b: Builder, registers: Value, tile: int, address: Value) -> None:
    """The configured rows of a tile from rows of 64 bytes at `address`; the other rows become 0."""
    call(b, "llvm.x86.tileloadd64", VOID, _tile(tile), at(b, I8, address), _ROW_BYTES)


def add_products(b: Builder, registers: Value, target: int, left: int, right: int) -> None:
    """target[r, c] += sum_k left[r, k] right[k / 4, 4 c + k % 4] over 64 signed bytes, in 32 bits."""
    call(b, "llvm.x86.tdpbssd", VOID, _tile(target), _tile(left), _tile(right))


def store(b: Builder, registers: Value, tile: int, address: Value) -> None:
    """The configured rows of a tile to rows of 64 bytes at `address`."""
    call(b, "llvm.x86.tilestored64", VOID, _tile(tile), at(b, I8, address), _ROW_BYTES)
