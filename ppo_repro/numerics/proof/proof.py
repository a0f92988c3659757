"""Which backends give the bits of the specification on this machine, measured once for each state of the sources."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppo_repro.errors import UserError, is_out_of_memory
from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels.core import entries
from ppo_repro.numerics.kernels.core.cache import NUMERICS, cache_folder
from ppo_repro.numerics.proof import ahead
from ppo_repro.output import say

if TYPE_CHECKING:
    from ppo_repro.numerics.proof.cases import Case

PASSED = ""
# what makes torch, MKL, NumPy, OpenBLAS and the C library use less than the processor has; Numba's is in the folder
CAPS = (
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES",
    "OPENBLAS_CORETYPE",
    "GLIBC_TUNABLES",
)


def use(name: str, threads: int, device: str = "cpu") -> str:
    """`backend.use` of a backend that gives the bits of the eager code on a device of this machine; returns its name.

    `auto` takes the fastest that does, and says on stderr which does not. UserError where the named one does not.
    """
    candidates = _fastest_first(device) if name == "auto" else [backend.choose(name)]
    for candidate in candidates:
        failed = PASSED if candidate == "eager" else failure(candidate)
        if failed == PASSED:
            return backend.use(candidate, threads)
        if name != "auto":
            others = "auto, float64 or eager" if device == "cpu" else "auto or eager"
            raise UserError(
                f"layout.backend = {name}: its {failed} differ from the specification on this machine; take another "
                f"({others})"
            )
        say(f"numerics: {failed} of backend {candidate} differ from the specification on this machine; not used")
    raise AssertionError("eager is the specification")


def _fastest_first(device: str) -> list[str]:
    if device != "cpu":
        if backend.has_triton_installed():
            return [backend.TRITON, "eager"]
        say("numerics: Triton is not installed, so the eager code computes; pip install 'ppo_repro[gpu]'")
        return ["eager"]
    return [name for name in reversed(backend.BACKENDS) if name != "amx" or backend.has_amx()]


def failure(name: str) -> str:
    """The first case in which a backend differs from the eager code on this machine, or PASSED.

    It is computed once and kept with the compiled kernels, until they or the specification change.
    """
    folder, key = cache_folder(), hashlib.sha256(f"{name} {machine()} {_card(name)}".encode()).hexdigest()
    entry = f"proof.{name}.{key[:32]}"
    kept = entries.read(folder, entry)
    if kept is not None:
        return kept.decode()
    first_use = not folder.exists()
    with ahead.beside(name, first_use and name != backend.TRITON):  # Triton compiles by itself
        found = first_difference(name, first_use)
    entries.write(folder, entry, found.encode())
    return found


def _card(name: str) -> str:
    """What a proof of kernels for cards also depends on."""
    if name != backend.TRITON or not torch.cuda.is_available():
        return ""
    return f"{torch.cuda.get_device_name()} CUDA {torch.version.cuda} Triton {metadata.version('triton')}"


@cache
def machine() -> str:
    """What a proof depends on beside kernels and processor: torch, and the sources of the specification."""
    digest = hashlib.sha256()
    for source in sorted(NUMERICS.rglob("*.py")):
        digest.update(f"{source.relative_to(NUMERICS).as_posix()} {source.stat().st_size}\n".encode())
        digest.update(source.read_bytes())
    capped = " ".join(f"{name}={os.environ.get(name, '')}" for name in CAPS)
    return f"torch {torch.__version__} {capped} {digest.hexdigest()[:16]}"


def first_difference(name: str, first_use: bool = False) -> str:
    """Compute all cases eagerly and by the backend; the name of the first that differs in a bit, or PASSED.

    At the first use kernels are compiled, which takes so long that stderr says how far it is.
    """
    from ppo_repro.numerics.proof.cases import CASES, CPU
    from ppo_repro.numerics.proof.largest import compile_largest

    before, threads = backend.active(), torch.get_num_threads()
    try:
        for index, (case, compute) in enumerate(CASES.items()):
            if first_use:
                say(f"numerics: first use here, compiling kernels of {name}: {case} ({index + 1} of {len(CASES)})")
                if case == ahead.CASE and name != backend.TRITON:
                    compile_largest(name, last_first=True)  # what the other process has not come to
            backend.use("eager", 1)
            expected = _bytes(compute(CPU))
            for count in (1, 2):
                backend.use(name, count)
                if not _equals(compute, backend.device_of_kernels(), expected):
                    return case
    finally:
        backend.use(before, 1)
        torch.set_num_threads(threads)
    return PASSED


def _equals(compute: Case, device: torch.device, expected: list[bytes]) -> bool:
    try:
        return _bytes(compute(device)) == expected
    except Exception as error:  # whatever is wrong with a backend, it has not proved itself
        if is_out_of_memory(error):
            raise  # says nothing about the backend, and the result would be kept
        return False


def _bytes(results: list[Tensor]) -> list[bytes]:
    return [x.detach().cpu().contiguous().numpy().tobytes() for x in results]
