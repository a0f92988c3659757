"""The program, which also counts the bytes that its machine sends from its first optimizer step to its last one.

The count is in the file that COUNT_FILE names: steps, and bytes on the device of GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ppo_repro.commands import cli
from ppo_repro.numerics.optimizer import Optimizer


def sent() -> int:
    lines = (line.split() for line in Path("/proc/net/dev").read_text().splitlines())
    (found,) = (int(line[9]) for line in lines if line[0] == f"{os.environ['GLOO_SOCKET_IFNAME']}:")
    return found


def main() -> None:
    file, steps, before, real = Path(os.environ["COUNT_FILE"]), 0, 0, Optimizer.step

    def step(optimizer: Optimizer, backward: Callable[[], None]) -> float:
        nonlocal steps, before
        before = before or sent()
        norm = real(optimizer, backward)
        steps += 1
        if os.environ["RANK"] == "0":  # the other machine has no such folder
            file.write_text(f"{steps} {sent() - before}")
        return norm

    Optimizer.step = step  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
