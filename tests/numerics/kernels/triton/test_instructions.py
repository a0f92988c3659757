"""What compiled kernels consist of, without a card: no approximation, no contraction, no spilled register."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ppo_repro.numerics.kernels.triton import instructions
from tests.support.paths import ROOT

HEAD = ".version 8.7\n.target sm_90a\n.visible .entry k(\n)\n{\n"


def faults(line: str, product: str = "", spilled: int = 0, capability: int = 90) -> tuple[str, ...]:
    case = instructions.Case("k", None, {}, {}, product)
    return instructions._judged(case, f"{HEAD}\t{line};\n}}\n", 20, spilled, capability).faults


@pytest.mark.parametrize(
    "line",
    ["add.f32 \t%f1, %f2, %f3", "div.rn.f64 %fd1, %fd2, %fd3", "sqrt.rn.f32 %f1, %f2", "cvt.rn.f32.f64 %f1, %fd1",
     "// ex2.approx.ftz.f32 in a comment", "mad.lo.s32 %r1, %r2, %r3, %r4"],
)  # fmt: skip
def test_correctly_rounded_instructions_are_no_fault(line: str) -> None:
    assert faults(line) == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ex2.approx.f32 %f1, %f2", "approximate: ex2.approx.f32"),
        ("ex2.approx.ftz.f32 %f1, %f2", "approximate: ex2.approx.ftz.f32"),
        ("div.full.f32 %f1, %f2, %f3", "approximate: div.full.f32"),
        ("sqrt.approx.ftz.f32 %f1, %f2", "approximate: sqrt.approx.ftz.f32"),
        ("@%p1 mul.ftz.f32 %f1, %f2, %f3", "approximate: mul.ftz.f32"),
        ("fma.rn.f32 %f1, %f2, %f3, %f4", "fused: fma.rn.f32"),
        ("fma.rn.f64 %fd1, %fd2, %fd3, %fd4", "fused: fma.rn.f64"),
    ],
)
def test_other_instructions_are_named(line: str, said: str) -> None:
    assert faults(line) == (said,)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_spilled_registers_and_missing_products_are_named(capability: int) -> None:
    add, product = "add.f32 %f1, %f2, %f3", "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {}"
    assert faults(add, spilled=40, capability=capability) == ("40 bytes of registers in memory",)
    assert faults(add, product=".s32.s8.s8", capability=capability) == ("no product of .s32.s8.s8",)
    assert faults(product, product=".s32.s8.s8", capability=capability) == ()


def test_only_cards_without_products_in_float64_may_fuse_them() -> None:
    fma, product = "fma.rn.f64 %fd1, %fd2, %fd3, %fd4", "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {}"
    assert faults(fma, product=".f64.f64", capability=100) == (), "of a sum that is exact"
    assert faults(fma, product=".f64.f64") == ("fused: fma.rn.f64", "no product of .f64.f64")
    assert faults(f"{product};\n\t{fma}", product=".f64.f64") == ("fused: fma.rn.f64",), "beside the products"
    assert faults(f"{product};\n\t{fma}", product=".f64.f64", capability=100) == ("fused: fma.rn.f64",)


def printed(*arguments: str) -> tuple[int, str]:
    pytest.importorskip("triton", reason="needs Triton: pip install 'ppo_repro[gpu]'")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_every_kernel_has_no_fault(capability: str) -> None:
    code, text = printed("ppo_repro.numerics.kernels.triton.instructions", "--capability", capability)
    assert code == 0, text


@pytest.mark.slow
def test_kernels_with_a_fault_are_found() -> None:
    """The negative controls, compiled: a library's exp, a quotient of float32, contraction left on, no int8 product."""
    code, text = printed("tests.support.processes.bad_kernels")
    assert code == 0, text
    found = json.loads(text.splitlines()[-1])
    assert any("ex2.approx" in fault for fault in found["exp"])
    assert any("div.full" in fault or "rcp" in fault for fault in found["quotient"])
    assert any("fma" in fault for fault in found["contraction"])
    assert any("fma" in fault for fault in found["attention, contracted"])
    assert any("bytes of registers" in fault for fault in found["large tile"])
    assert found["no product"] == ["no product of .s32.s8.s8"] and found["right"] == []
