"""Kernels of a GPU on a machine without one: a stand-in for libcuda.so.1 whose kernels run as fibers on the host.

`stand_in` builds it from the kernels' source, or from the PTX that ships, turned back into C by `ptx.py`. The host code
of ppo_repro runs over it unchanged. `emulate.c` says what it checks, and what it cannot: threads run one at a time.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from ppo_repro.numerics import build

HERE = Path(__file__).parent
KERNELS = build.SOURCES / "gpu" / "kernels.c"
# the kernels' warnings are seen where PTX is compiled; PTX as C has as many variables as registers
_FLAGS = ("-Wno-error", "-w", "-fvisibility=hidden", "-fPIC")


def _host() -> build.Platform:
    here = build.this_platform()
    assert here is not None, "the emulator needs a platform that has kernels"
    return here


def compile_for_host(out: Path, *arguments: str) -> Path:
    """Compile C for this machine; without fma in its instructions the kernels would be slow."""
    cpu = _host().variants[-2 if len(_host().variants) > 1 else 0].flags
    command = [*build.compiler(_host().target), *cpu, *_FLAGS, *arguments, "-o", str(out)]
    done = subprocess.run(
        command, env=build.compiler_environment(out.parent), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{out.name} was not compiled:\n{done.stderr}")
    return out


def stand_in(folder: Path, form: str = "source", *more_flags: str, source: Path = KERNELS) -> Path:
    """Build a library with the functions of the CUDA driver that ppo_repro calls, over the kernels of a file.

    `form`: "source", the kernels for the host; "ptx", the PTX turned back into C. `more_flags` break rules on purpose.
    """
    kernels = folder / f"{form}.o"
    if form == "ptx":
        from ppo_repro.numerics.build_ptx import compile_ptx
        from tests.gpu.emulator.ptx import translate

        compile_ptx(source, folder / "kernels.ptx", build.compiler_environment(folder), *more_flags)
        text = folder / "kernels.c"
        text.write_text(translate((folder / "kernels.ptx").read_text()))
        compile_for_host(kernels, "-O1", "-c", str(text))
    else:
        compile_for_host(kernels, *more_flags, "-c", str(source))
    parts = [str(HERE / "emulate.c"), str(HERE / "libcuda.c"), str(kernels)]
    return compile_for_host(folder / f"libcuda-{form}.so", "-shared", f"-I{HERE}", *parts, "-ldl")
