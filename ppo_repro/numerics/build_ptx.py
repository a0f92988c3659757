"""Compile the kernels of a GPU to PTX with the compiler of the CPU's libraries, without a GPU or a CUDA toolkit.

PTX is text. The driver of any NVIDIA GPU from sm_80 on compiles it when it is loaded. Only the standard library is
imported here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# sm_80: the first GPU with asynchronous copies to shared memory; PTX 7.1 has them
TARGET = ("-target", "nvptx64-cuda", "-mcpu=sm_80+ptx71")
FLAGS = (
    *("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-jump-tables"),
    *("-Wall", "-Wextra", "-Wno-pass-failed", "-Wno-unused-parameter"),
)
THREADS = 256  # of a thread block, at most: GPU_THREADS of c/gpu/arguments.h
# Thread blocks of a kernel that must fit a multiprocessor. Of the first two kernels, one thread block computes while
# the other waits. For the others ptxas would choose fewer registers than they need, and keep numbers in memory.
AT_ONCE = {
    "integer_product_tall": 2,
    "integer_gradient_tiles": 2,
    "attend_queries_2": 4,
    "attend_queries_8": 2,
    "bounds_row": 4,
    "cut_row": 5,
    "divergence_row": 3,
    "queries_row": 3,
    "route_backward_row": 2,
    "route_row": 3,
    "sample_row": 2,
}
IGNORED = "argument unused during compilation"  # zig passes options of CPUs to every target


def with_bounds(ptx: str) -> str:
    """Write into each kernel its largest number of threads, and into those of AT_ONCE how many thread blocks must fit.

    Both limit registers, and C cannot express them.
    """

    def bounded(entry: re.Match[str]) -> str:
        at_once = f"\n.minnctapersm {AT_ONCE[entry[2]]}" if entry[2] in AT_ONCE else ""
        return f"{entry[1]}\n.maxntid {THREADS}, 1, 1{at_once}\n{{"

    return re.sub(r"(\.visible \.entry (\w+)\([^)]*\))[^{]*\{", bounded, ptx)


def compile_ptx(source: Path, out: Path, environment: Mapping[str, str], *more_flags: str) -> None:
    """Compile a C file to PTX. Raises RuntimeError, with the compiler's output, if there is an error or a warning."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        new = Path(folder) / out.name
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            *TARGET,
            *FLAGS,
            *more_flags,
            "-S",
            str(source),
            "-o",
            str(new),
        ]
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
        said = [line for line in done.stderr.splitlines() if IGNORED not in line]
        if done.returncode or said:
            raise RuntimeError(f"{out.name} was not compiled:\n" + "\n".join(said))
        new.write_text(with_bounds(new.read_text()))
        new.replace(out)  # as a whole: a process may be reading the old one
