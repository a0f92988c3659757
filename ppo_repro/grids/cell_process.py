"""Main program of one cell: `python -m ppo_repro.grids.cell_process ARGUMENTS` runs `ppo-repro ARGUMENTS`.

The stdin of this process is a pipe to its parent; the process ends when the parent ends.
"""

from __future__ import annotations

import os
import runpy
import select
import sys
import threading


def _end_with_parent() -> None:
    """End this process when its parent ends, because the system then closes the other end of the pipe."""
    closing = select.poll()
    closing.register(0, 0)
    closing.poll()
    os._exit(1)  # as a kill would: records are whole or absent at every instant


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv[0] = "ppo-repro"
    runpy.run_module("ppo_repro", run_name="__main__")
