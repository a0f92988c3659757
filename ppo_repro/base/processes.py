"""How many processes a run can have, and which of them this process is. Imports are few, so that --help is quick."""

from __future__ import annotations

import os

from ppo_repro.base.errors import UserError

SLOTS = 8  # of a minibatch, as in rule 2 of the numerics; each process adds up the gradients of SLOTS / processes
SIZES = tuple(size for size in range(1, SLOTS + 1) if SLOTS % size == 0)  # allowed numbers of processes


def processes() -> tuple[int, int]:
    """Return rank and number of processes as torchrun sets them, 0 and 1 without torchrun.

    Raises UserError for a number that is not in SIZES.
    """
    texts = [os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))]
    if not all(text.isdecimal() for text in texts):
        raise UserError(f"RANK, WORLD_SIZE = {', '.join(texts)}: must be counts, as torchrun sets them")
    rank, size = map(int, texts)
    if size <= 1:
        return 0, 1
    if size not in SIZES:
        raise UserError(f"torchrun --nproc-per-node: {size} processes were started; a run takes 1, 2, 4 or 8")
    if rank >= size:
        raise UserError(f"RANK, WORLD_SIZE = {rank}, {size}: the first must be smaller, as torchrun sets them")
    return rank, size
