"""The PTX that ships keeps the rules: every float instruction is one of IEEE 754, rounded once, to nearest.

Controls: PTX with contracted and with approximate operations.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ppo_repro.numerics import build
from ppo_repro.numerics.build_ptx import AT_ONCE, compile_ptx
from tests.gpu.emulator.ptx import translate

# Every float instruction that the rules have. Comparisons and moves round nothing. `max` would be lawful only where no
# NaN and no zero's sign can show, so it is not here: the kernels have none.
LAWFUL = re.compile(
    r"(fma|add|sub|mul|div|sqrt|rcp)\.rn\.f(32|64)|(neg|abs)\.f(32|64)|setp\.\w+\.f(32|64)|selp\.f(32|64)|mov\.f(32|64)"
    r"|cvt\.f64\.f32|cvt\.rn\.f32\.f64|cvt\.rn\.f(32|64)\.[us](32|64)|cvt\.rni\.f32\.f32"
)
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def unlawful(ptx: str) -> list[str]:
    """Return the float instructions that are not in the rules."""
    instructions = Counter(found[1] for found in re.finditer(r"^\s+(?:@!?%p\d+\s+)?([a-z][\w.]*)", ptx, re.M))
    floats = (name for name in instructions if re.search(r"\.(f16|bf16|f32|f64)|\.(ftz|approx|sat|full)", name))
    return [name for name in floats if not LAWFUL.fullmatch(name)]


@pytest.fixture(scope="module")
def ptx() -> str:
    return (build.SOURCES / build.ptx_name()).read_text()


def test_every_float_instruction_is_rounded_once_to_nearest(ptx: str) -> None:
    assert unlawful(ptx) == []


def test_the_rule_looks_at_instructions(ptx: str) -> None:
    assert len(re.findall(r"^\s+fma\.rn\.f32\s", ptx, re.M)) > 5000


def test_kernels_are_whole_and_keep_their_numbers_in_registers(ptx: str) -> None:
    """A call, or an array in local memory, would be slow, and the tests' reader of PTX knows neither."""
    assert re.findall(r"^\s+call|\.local|^\.func", ptx, re.M) == []


def test_every_kernel_names_its_most_threads(ptx: str) -> None:
    found = re.search(r"GPU_THREADS = (\d+)", (build.SOURCES / "gpu" / "arguments.h").read_text())
    assert found
    assert ptx.count(f".maxntid {found[1]}, 1, 1") == ptx.count(".entry") > 40


def test_an_instruction_that_the_tests_cannot_read_is_refused() -> None:
    kernel = ".visible .entry a(\n)\n{\n\tmul.lo.u32 \t%r1, %r2, %r3;\n}\n"
    assert "r1 = " in translate(kernel)
    with pytest.raises(ValueError, match=r"mul\.hi\.u32"):
        translate(kernel.replace("mul.lo", "mul.hi"))


@pytest.mark.parametrize("kernel", AT_ONCE)
def test_a_kernel_says_how_many_thread_blocks_must_fit_a_multiprocessor(ptx: str, kernel: str) -> None:
    bounds = rf"\.maxntid \d+, 1, 1\n\.minnctapersm {AT_ONCE[kernel]}\n"
    assert re.search(rf"\.entry {kernel}\([^)]*\)\n{bounds}\{{", ptx)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-ffp-contract=fast", "-ffast-math"])
def test_control_other_floats_are_named(tmp_path: Path, flag: str) -> None:
    out = tmp_path / "kernels.ptx"
    compile_ptx(build.SOURCES / "gpu" / "kernels.c", out, build.compiler_environment(tmp_path), flag, "-w")
    assert unlawful(out.read_text()) != []


@pytest.fixture(scope="module")
def ptxas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVIDIA's assembler, from its wheel, in an environment of this test alone."""
    folder = tmp_path_factory.mktemp("ptxas")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, "nvidia-cuda-nvcc-cu12"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no wheel of ptxas here: {done.stderr.strip().splitlines()[-1:]}")
    (found,) = folder.glob("nvidia/*/bin/ptxas")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvidias_assembler_keeps_all_numbers_in_registers(tmp_path: Path, ptxas: Path, architecture: str) -> None:
    command = [
        str(ptxas),
        f"-arch={architecture}",
        "--warn-on-spills",
        "--warn-on-local-memory-usage",
        str(build.SOURCES / build.ptx_name()),
        "-o",
        str(tmp_path / "cubin"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
