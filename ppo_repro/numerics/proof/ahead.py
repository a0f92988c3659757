"""A second process that compiles some kernels at the first use, while this one compiles the others.

Numba compiles under a lock, so threads cannot share this work. What the second process compiles it keeps with the
other kernels, where this one finds it; if it cannot, this one compiles everything.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CASE = "training"  # the last of the cases, and about a third of the work


@contextmanager
def beside(name: str, first_use: bool) -> Iterator[None]:
    """At the first use, and where there are two cores, compile the kernels of CASE for a backend beside what is done.

    Processes of a run with several have their cores already.
    """
    if first_use:
        gc.freeze()  # otherwise collections go through all of torch, a tenth of the time of compiling
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not (first_use and alone and len(os.sched_getaffinity(0)) > 1):
        yield
        return
    quiet = subprocess.DEVNULL
    arguments = [sys.executable, "-m", "ppo_repro.numerics.proof.ahead", name]
    with subprocess.Popen(arguments, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            yield
        finally:
            process.terminate()  # everything it was wanted for is done


def main(name: str) -> None:
    """Compile the kernels of CASE for a backend."""
    from ppo_repro.numerics import backend
    from ppo_repro.numerics.proof.cases import CASES, CPU

    gc.freeze()
    backend.use(name, 1)
    CASES[CASE](CPU)


if __name__ == "__main__":
    main(sys.argv[1])
