"""Main program of a cell's processes: `python -m ppo_repro.grids.cell_process ARGUMENTS` runs `ppo-repro ARGUMENTS`.

The stdin is a pipe to the process that runs the grid; this process ends when that process ends.
"""

from __future__ import annotations

import os
import runpy
import select
import sys
import threading


def _end_with_grid() -> None:
    """End this process when the process that runs the grid ends: the system then closes the other end of the pipe."""
    closing = select.poll()
    closing.register(0, 0)
    closing.poll()
    os._exit(1)  # as a kill would: records are whole or absent at every instant


if __name__ == "__main__":
    threading.Thread(target=_end_with_grid, daemon=True).start()
    sys.argv[0] = "ppo-repro"
    runpy.run_module("ppo_repro", run_name="__main__")
