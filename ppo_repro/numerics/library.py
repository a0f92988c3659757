"""Load the C kernels once per process: the fastest variant that this CPU runs, after a check of a known answer.

The environment variable `PPO_REPRO_KERNELS` names another variant. Every variant gives the same bits.
"""

from __future__ import annotations

import functools
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ppo_repro.base.errors import OutOfMemory, UserError
from ppo_repro.numerics import build
from ppo_repro.numerics.build import Platform, Variant
from ppo_repro.numerics.interface import Struct, constants, ffi

CHOICE = "PPO_REPRO_KERNELS"
# The results of known_answer() in C. tests/numerics/known_answer.py computes them by the definition. If a number must
# change, results of its precision have changed, unless known_answer() itself computes something else.
KNOWN_ANSWER = 0x9D228E3BE09FEDBB
KNOWN_ANSWER_HIGH = 0x45C94D70167ADF9A
KNOWN_ANSWERS = {constants.PRECISION_HIGHEST: KNOWN_ANSWER, constants.PRECISION_HIGH: KNOWN_ANSWER_HIGH}

_DENORMAL = 71362  # the bits of 1e-40
MEND = "run `make setup` or `pip install -e .` in a checkout, or install the wheel again"


class Kernels:
    """The C functions of one library, by their names in `c/interface.h`.

    A call releases the interpreter, so other Python threads run meanwhile. A second call waits for the first, because
    there is one pool of threads and one memory. A call raises OutOfMemory if memory is full, and UserError if a GPU
    refuses an operation. The next call computes as before.
    """

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        self._failure = functions.last_failure()
        self.turn = threading.RLock()  # reentrant: a finalizer may run between the lines of a call
        # threads that compute, the caller included; only `set_threads` changes this number
        self.threads = 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._functions, name)

        def call(*arguments: Any) -> Any:
            with self.turn:
                failures = self._failure.count
                self._functions.begin_call(self.stream())
                result = function(*arguments)
                if self._failure.count != failures:
                    kind = OutOfMemory if self._failure.of_memory else UserError
                    raise kind(ffi.string(self._failure.text).decode())
                return result

        setattr(self, name, call)  # so that the next use of the name does not come here
        return call

    def stream(self) -> Struct:
        """Return the stream of the next call; NULL on a CPU, which has none."""
        return ffi.NULL


def cpu_words(key: str) -> list[str]:
    """Return the words of Linux about this CPU under a key of /proc/cpuinfo; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in lines if line.startswith(key)), [])


def choose(here: Platform | None, flags: frozenset[str], wanted: str | None) -> Variant:
    """Return the wanted variant, or the fastest variant that a CPU with these flags runs.

    Raises UserError if there are no kernels for the platform, or the CPU does not run the wanted variant.
    """
    if here is None:
        known = ", ".join(f"{system} {machine}" for system, machine in build.PLATFORMS)
        raise UserError(f"no kernels for {platform.system()} {platform.machine()}: ppo_repro runs on {known}")
    able = [variant for variant in here.variants if variant.needs <= flags]
    if not wanted:
        return able[0]
    for variant in able:
        if variant.name == wanted:
            return variant
    names = ", ".join(variant.name for variant in able)
    missing = next((sorted(variant.needs - flags) for variant in here.variants if variant.name == wanted), [])
    reason = f"this CPU lacks {', '.join(missing)}; it" if missing else "there is no such variant; this CPU"
    raise UserError(f"{CHOICE} = {wanted!r}: {reason} runs {names}")


def locate(variant: Variant, folder: Path) -> Path:
    """Return the library of a variant in a folder.

    Raises UserError if it is missing or was built from other sources.
    """
    path = folder / build.file_name(variant)
    if path.exists():
        return path
    if any(folder.glob(f"kernels-{variant.name}-*.so")):
        raise UserError(f"the kernels in {folder} were built from other sources: {MEND}")
    raise UserError(f"{path} is missing: {MEND}")


def open_library(path: Path) -> Kernels:
    """Open a library.

    Raises UserError if it does not load, or if its known answer is wrong.
    """
    try:
        library = Kernels(ffi.dlopen(str(path)))
    except OSError as error:
        raise UserError(f"the kernels do not load: {error}; {MEND}") from None
    check_denormals(library)
    for precision, right in KNOWN_ANSWERS.items():
        answer = library.known_answer(precision)
        if answer != right:
            cpu = " ".join(cpu_words("model name")) or platform.machine()
            raise UserError(
                f"{path.name} computes {answer:#x} on this CPU ({cpu}) where {right:#x} is right, so results would "
                f"differ; {CHOICE} chooses another variant"
            )
    return library


@functools.cache
def load() -> Kernels:
    """Return the library of this process. The first call loads and checks it.

    Raises UserError if there is none for this machine.
    """
    library = open_library(locate(_variant(), build.SOURCES))
    turn = library.turn

    def after_in_child() -> None:
        turn.release()
        library.forget_workers()  # threads do not survive a fork
        library.threads = 1

    # os.fork waits until no call runs: otherwise the child would inherit a lock that no thread ever releases
    os.register_at_fork(
        before=library.turn.acquire, after_in_parent=library.turn.release, after_in_child=after_in_child
    )
    return library


def set_threads(count: int) -> None:
    """Set the number of threads the kernels use, which changes no result.

    Raises UserError for more than the kernels take or the system gives. The kernels then use as many as before, or one
    if the system does not give these either.
    """
    kernels = load()
    check_denormals(kernels)  # new threads inherit the setting of this one
    if kernels.set_threads(count) != 0:
        if kernels.set_threads(kernels.threads) != 0:
            kernels.threads = 1
        raise UserError(
            f"threads = {count}: the kernels take 1 to 256 threads, and the system may start fewer; use fewer"
        )
    kernels.threads = count


def use_threads(count: int, torch_computes: bool = False) -> None:
    """Let the kernels use `count` threads in this process; torch uses one, or `count` if `torch_computes`.

    Idle threads of torch spin, which would take processors from the kernels' threads.
    """
    set_threads(count)
    torch.set_num_threads(count if torch_computes else 1)


def check_denormals(library: Kernels | None = None) -> None:
    """Raise UserError if the calling thread rounds denormal numbers to zero, which would change results."""
    if (library or load()).denormal_product() != _DENORMAL:
        raise UserError(
            "denormal numbers are flushed to zero here, by torch.set_flush_denormal or a library that was built with "
            "-ffast-math; call torch.set_flush_denormal(False) first"
        )


def in_use() -> dict[str, str]:
    """Return variant and source digest of the kernels of this process, for the manifest of a run."""
    return {"variant": _variant().name, "digest": build.digest()}


def _variant() -> Variant:
    """Return the variant that this process loads."""
    return choose(build.this_platform(), frozenset(cpu_words("flags")), os.environ.get(CHOICE))
