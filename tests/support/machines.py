"""Caps on the instruction sets of libraries.

`python -m tests.support.machines avx2 COMMAND` runs a command in which torch, MKL, oneDNN, NumPy, its BLAS, the C
library and the compiler of kernels use AVX2 and nothing above it; `sse4.2` takes AVX, AVX2 and fused multiply-add
away too.
"""

from __future__ import annotations

import os
import sys

from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

UNLIKE_OTHERS = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}  # no environment of `all_capped` has it
# each takes instructions away from one or more of torch, MKL, NumPy and the C library
CAPS = [
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    UNLIKE_OTHERS,
    {"NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX2 FMA3"},
    {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA,-FMA4"},  # other bits of exp, log and cos
]


def numpy_features_above(level: str) -> list[str]:
    """What NumPy would use on this CPU beyond a level; it warns where it is told to disable what is not there."""
    kept = ("AVX", "F16C", "FMA3", "AVX2") if level == "avx2" else ()
    # those that come with SSE4.2 are never taken away
    below = {"SSSE3", "SSE41", "POPCNT", "SSE42", *kept}
    capped = os.environ.get("NPY_DISABLE_CPU_FEATURES", "").split()  # this command may run under a cap itself
    return [name for name in __cpu_dispatch__ if (__cpu_features__[name] or name in capped) and name not in below]


def all_capped(level: str) -> dict[str, str]:
    """The environment in which every library is capped at `avx2` or `sse4.2`."""
    c_library = ["AVX512F", "AVX512VL", "AVX512BW", "AVX512DQ", "AVX512CD"]
    if level == "avx2":
        own = {
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "OPENBLAS_CORETYPE": "Haswell",
            "NUMBA_CPU_NAME": "haswell",
        }
    else:
        c_library += ["AVX2", "FMA", "FMA4", "AVX"]
        own = {
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "OPENBLAS_CORETYPE": "Nehalem",
            "NUMBA_CPU_NAME": "nehalem",
        }
    return {
        **own,
        "NUMBA_CPU_FEATURES": "",  # else those of this CPU are added
        "NPY_DISABLE_CPU_FEATURES": " ".join(numpy_features_above(level)),
        "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={','.join(f'-{name}' for name in c_library)}",
    }


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("avx2", "sse4.2"):
        sys.exit("usage: python -m tests.support.machines avx2|sse4.2 COMMAND...")
    os.environ.update(all_capped(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
