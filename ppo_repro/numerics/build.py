"""Compile the C kernels with the clang of ziglang: one library for each kind of CPU, all with the same bits.

On Linux, also compile the library that drives an NVIDIA GPU, and the PTX of its kernels (`build_ptx.py`).

`hatch_build.py` runs this file when ppo_repro is installed from source. Only the standard library is imported here.
"""

from __future__ import annotations

import hashlib
import os
import platform
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "c"
_PTX = Path(__file__).with_name("build_ptx.py")
FLAGS = (
    *("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-pthread", "-s", "-Wall", "-Wextra", "-Wmissing-prototypes", "-Werror"),
)
LIBRARY_FLAGS = ("-shared", "-fPIC", "-fvisibility=hidden")


class Variant(NamedTuple):
    """Kind of CPU: zig's flags for it, and the words that /proc/cpuinfo must have."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()


class Platform(NamedTuple):
    """Operating system on one architecture: zig's target, the tag of wheels, and the variants, the fastest first."""

    target: str
    tag: str
    variants: tuple[Variant, ...]


_V3 = frozenset(["avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_VNNI = _V4 | {"avx512_vnni"}
_V4_FLAGS = ("+prefer_no_gather+prefer_no_scatter", "-mprefer-vector-width=512")
_X86_64 = (
    # without fast_dpwssd, clang makes two instructions of each product of pairs
    Variant("x86_64_v4_vnni", ("-mcpu=x86_64_v4+avx512vnni+fast_dpwssd" + _V4_FLAGS[0], _V4_FLAGS[1]), _VNNI),
    Variant("x86_64_v4", ("-mcpu=x86_64_v4" + _V4_FLAGS[0], _V4_FLAGS[1]), _V4),
    Variant("x86_64_v3_vnni", ("-mcpu=x86_64_v3+avxvnni+fast_dpwssd",), _V3 | {"avx_vnni"}),
    Variant("x86_64_v3", ("-mcpu=x86_64_v3",), _V3),
    Variant("x86_64", ("-mcpu=x86_64",)),
)
_AARCH64 = (Variant("aarch64", ()),)
PLATFORMS = {  # by platform.system() and platform.machine(); the numbers are versions of glibc and of macOS
    ("Linux", "x86_64"): Platform("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", _X86_64),
    ("Linux", "aarch64"): Platform("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", _AARCH64),
    ("Darwin", "arm64"): Platform("aarch64-macos.11.0", "macosx_11_0_arm64", _AARCH64),
}


def this_platform() -> Platform | None:
    """Return the platform of this process; None if there are no kernels for it."""
    return PLATFORMS.get((platform.system(), platform.machine()))


def digest() -> str:
    """Return 12 hexadecimal digits that change with every source file and, through this file, with every flag."""
    total = hashlib.sha256()
    for path in (Path(__file__), *_PTX.parent.glob(_PTX.name), *sorted(SOURCES.rglob("*.[ch]"))):
        total.update(f"{path.name}\n".encode() + path.read_bytes())
    return total.hexdigest()[:12]


def file_name(variant: Variant) -> str:
    """Return the name of the library of a variant, compiled from the current sources."""
    return f"kernels-{variant.name}-{digest()}.so"


def card_library_name() -> str:
    """Return the name of the library that drives a GPU, compiled from the current sources."""
    return f"gpu-{digest()}.so"


def ptx_name() -> str:
    """Return the name of the PTX of a GPU's kernels, compiled from the current sources."""
    return f"gpu-{digest()}.ptx"


def compiler(target: str) -> list[str]:
    """Return the beginning of a command that compiles C for a target of zig."""
    return [sys.executable, "-m", "ziglang", "cc", "-target", target, *FLAGS]


def compiler_environment(spare: Path) -> dict[str, str]:
    """Return the compiler's environment; it keeps parts of libc in the user's cache, or else in a spare folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "ppo_repro" / "zig"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError:
        cache = spare
    return {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache), **os.environ}


def compile_variants(where: Platform, folder: Path, *more_flags: str) -> list[Path]:
    """Compile the libraries of a platform's variants into a folder, in parallel. Raises RuntimeError if one fails.

    A library replaces an older one of the same name atomically, because a process may have the older one loaded.
    """
    with tempfile.TemporaryDirectory(dir=folder) as new:
        environment, running = compiler_environment(Path(new) / "zig"), []
        for variant in where.variants:
            out = Path(new) / file_name(variant)
            command = [*compiler(where.target), *LIBRARY_FLAGS, *variant.flags, *more_flags, "all.c", "-o", str(out)]
            process = subprocess.Popen(command, cwd=SOURCES, env=environment, stderr=subprocess.PIPE)
            running.append((process, out))
        said = [process.communicate()[1].decode(errors="replace") for process, _ in running]
        for (process, out), errors in zip(running, said, strict=True):
            if process.returncode != 0:
                raise RuntimeError(f"{out.name} was not compiled:\n{errors}")
        return [out.replace(folder / out.name) for _, out in running]


def compile_card(where: Platform, folder: Path) -> list[Path]:
    """Compile the library and the PTX for an NVIDIA GPU into a folder; on macOS do nothing.

    Raises RuntimeError if it fails.
    """
    if "linux" not in where.target or not _PTX.exists():
        return []
    with tempfile.TemporaryDirectory(dir=folder) as new:
        environment = compiler_environment(Path(new) / "zig")
        library, ptx = Path(new) / card_library_name(), Path(new) / ptx_name()
        command = [*compiler(where.target), *LIBRARY_FLAGS, "gpu/host.c", "-ldl", "-o", str(library)]
        done = subprocess.run(command, cwd=SOURCES, env=environment, capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{library.name} was not compiled:\n{done.stderr.decode(errors='replace')}")
        runpy.run_path(str(_PTX))["compile_ptx"](SOURCES / "gpu" / "kernels.c", ptx, environment)
        return [path.replace(folder / path.name) for path in (library, ptx)]


def compile_in_place(where: Platform) -> None:
    """Put the libraries beside their sources, where an editable install loads them, and remove old libraries."""
    built = [*compile_variants(where, SOURCES), *compile_card(where, SOURCES)]
    for path in (*SOURCES.glob("kernels-*.so"), *SOURCES.glob("gpu-*")):
        if path not in built:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    here = this_platform()
    if here is not None:
        compile_in_place(here)
