"""Compiles kernels with a fault each, and one without, and prints what `instructions` says of them, as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import triton
import triton.language as tl

from ppo_repro.numerics.kernels.triton.cases import CASES
from ppo_repro.numerics.kernels.triton.instructions import Case, compiled


@triton.jit
def library(x, y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.exp(tl.load(x + i)))


@triton.jit
def quotient(x, y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(y + i, 1.0 / tl.load(x + i))


@triton.jit
def polynomial(x, y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    tl.store(y + i, value * value + value)


def main() -> None:
    types, constants = {"x": "*fp32", "y": "*fp32"}, {"BLOCK": 128}
    cases = {
        "exp": (Case("exp", library, types, constants), False),
        "quotient": (Case("quotient", quotient, types, constants), False),
        "contraction": (Case("contraction", polynomial, types, constants), True),
        "no product": (Case("no product", polynomial, types, constants, ".s32.s8.s8"), False),
        "right": (Case("right", polynomial, types, constants), False),
    }
    attention = next(case for case in CASES if case.name == "attention: weights")
    cases["attention, contracted"] = attention, True
    dk = next(case for case in CASES if case.name == "attention: dk, grids")
    cases["large tile"] = replace(dk, constants={**dk.constants, "BM": 32}, warps=8), False
    faults = {name: compiled(case, 90, fusion).faults for name, (case, fusion) in cases.items()}
    print(json.dumps(faults))


if __name__ == "__main__":
    main()
