"""One cell in a process of its own: `python -m ppo_repro.commands.grid_cell ARGUMENTS`, which are those of `ppo-repro`.

It ends with the process that started it, however that one ends: its stdin is a pipe to that process, which the kernel
closes. What is committed by then stays; the rest is done at the next call.
"""

from __future__ import annotations

import os
import select
import threading


def end_with_parent() -> None:
    """End this process when the other end of its stdin closes, from now on."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    pipe = select.poll()
    pipe.register(0, 0)  # its end alone; what is written there, another process reads
    pipe.poll()
    os._exit(1)  # at once, as a kill would: records are whole or absent at every instant


if __name__ == "__main__":
    end_with_parent()
    from ppo_repro.commands import cli

    cli.main()
