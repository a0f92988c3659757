"""The process of one cell: `python -m ppo_repro.grids.cell_process ARGUMENTS` is `ppo-repro ARGUMENTS`.

It ends with the process that started it: its stdin is a pipe to that process, and the kernel closes the pipe.
"""

from __future__ import annotations

import os
import runpy
import select
import sys
import threading


def _end_with_parent() -> None:
    pipe = select.poll()
    pipe.register(0, 0)
    pipe.poll()
    os._exit(1)  # as a kill would: records are whole or absent at every instant


def main() -> None:
    """Run the command; end at once when stdin closes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = ["ppo-repro", *sys.argv[1:]]
    runpy.run_module("ppo_repro", run_name="__main__")


if __name__ == "__main__":
    main()
