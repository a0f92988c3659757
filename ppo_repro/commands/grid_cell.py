"""One cell in a process of its own: `python -m ppo_repro.commands.grid_cell FOLDER KIND`.

It ends with the process that started it, however that one ends: its stdin is a pipe to that process, which nobody
writes to and which the kernel closes. What is committed by then stays; the rest is done at the next call.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock this thread would hold when the interpreter ends
    os._exit(1)  # at once, as a kill would: records are whole or absent at every instant


def main(folder: Path, kind: str) -> None:
    """Run or resume the cell in `folder` through the command line, with its errors and exit codes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from ppo_repro.commands import cli
    from ppo_repro.config.kinds import LANGUAGE
    from ppo_repro.grids.cell import run_of

    run_dir = run_of(folder)
    if run_dir is None:  # `run` itself clears what a process left that was killed before it had a manifest
        name = "run" if kind == LANGUAGE else kind  # the command of control runs has the name of the kind
        command = [name, str(folder / "config.yaml"), "--out", str(folder)]
    else:
        command = ["resume", str(run_dir)]
    sys.argv = ["ppo-repro", *command, "--json"]
    cli.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
