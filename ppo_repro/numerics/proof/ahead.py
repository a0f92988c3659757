"""A second process that compiles some kernels at the first use, while this one compiles the others.

Numba compiles under a lock, so threads cannot share this work. What the second process compiles it keeps with the
other kernels, where this one finds it; if it cannot, this one compiles everything. It begins with the largest kernels,
which need no model: importing transformers takes longer than compiling most of them. Before CASE, which needs them all,
this one compiles those that are left, the last first.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CASE = "training"  # the last of the cases


@contextmanager
def beside(name: str, first_use: bool) -> Iterator[None]:
    """At the first use, and where there are two cores, compile kernels of a backend beside what is done.

    Processes of a run with several have their cores already.
    """
    if not first_use:
        yield
        return
    with _without_collections():
        if os.environ.get("WORLD_SIZE", "1") != "1" or len(os.sched_getaffinity(0)) < 2:
            yield
            return
        process = _start(name)
        try:
            yield
        finally:
            if process is not None:
                process.terminate()  # everything it was wanted for is done
                process.wait()


def _start(name: str) -> subprocess.Popen[bytes] | None:
    """The second process; None where there can be none, as where a program embeds Python."""
    quiet = subprocess.DEVNULL
    arguments = [sys.executable, "-m", "ppo_repro.numerics.proof.ahead", name]
    try:
        return subprocess.Popen(arguments, stdin=quiet, stdout=quiet, stderr=quiet)
    except (OSError, TypeError):  # TypeError where `sys.executable` is None
        return None


@contextmanager
def _without_collections() -> Iterator[None]:
    """Compiling makes many objects that stay: looking for garbage among them took a seventh of its time.

    Nor are they looked through later: when the process ends that alone would take two seconds.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def main(name: str) -> None:
    """Compile the largest kernels of a backend, then what else CASE needs on AMX."""
    from ppo_repro.numerics.proof.largest import compile_largest

    with _without_collections():
        compile_largest(name)
        if name == "float64":
            return  # the largest are more than half of the work
        from ppo_repro.numerics import backend
        from ppo_repro.numerics.proof.cases import CASES, CPU

        backend.use(name, 1)
        CASES[CASE](CPU)


if __name__ == "__main__":
    main(sys.argv[1])
