"""How the sequences and the parameters of a run are divided among its processes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ppo_repro.errors import UserError


def check_shares(shares: Sequence[int], size: int) -> None:
    """Raise UserError unless `layout.rank_shares` is empty or has one entry per rank."""
    if shares and len(shares) != size:
        raise UserError(
            f"layout.rank_shares = {list(shares)}: must have one entry for each of the {size} processes, "
            "or be [] for equal shares"
        )


def check_mesh(data: int, size: int) -> None:
    """Raise UserError unless `layout.mesh.data` is 0 or the number of processes."""
    if data not in (0, size):
        started = f"{size} processes were started" if size > 1 else "this is one process"
        raise UserError(
            f"layout.mesh.data = {data}: {started}; start {data} with `torchrun --nproc-per-node {data}`, "
            f"or take {size}, or 0 for all there are"
        )


def pieces(count: int, size: int) -> list[range]:
    """Cut the numbers 0..count-1 of a tensor, laid out flat, into one piece per rank; none is longer by more than 1."""
    return share_ranges(count, [1] * size)


def share_ranges(count: int, shares: Sequence[int]) -> list[range]:
    """Cut 0..count-1 into one range per rank: rank r gets the fraction shares[r] / sum(shares).

    Edges are rounded down to integers. All `shares` are >= 0, at least one is > 0.
    """
    total = sum(shares)
    edges = [0, *(count * end // total for end in accumulate(shares))]
    return [range(start, end) for start, end in pairwise(edges)]
