"""How the sequences and the parameters of a run are divided among its processes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ppo_repro.errors import UserError


def check_shares(shares: Sequence[int], size: int, group: int = 1) -> None:
    """Raise UserError unless `layout.rank_shares` is empty or has one entry for each group of `group` processes."""
    if shares and len(shares) * group != size:
        who = f"{size} processes" if group == 1 else f"{size // group} groups of {group} processes"
        raise UserError(
            f"layout.rank_shares = {list(shares)}: must have one entry for each of the {who}, or be [] for equal shares"
        )


def check_mesh(data: int, size: int, tensor: int = 1, pipeline: int = 1) -> None:
    """Raise UserError unless `data` groups of `tensor` or `pipeline` processes, or any number for 0, are `size`."""
    started, group = f"{size} processes were started" if size > 1 else "this is one process", tensor * pipeline
    if size % group:
        needed, field = group * max(1, data), "tensor" if tensor > 1 else "pipeline"
        raise UserError(
            f"layout.mesh.{field} = {group}: {started}, not groups of {group}; start {needed} with "
            f"`torchrun --nproc-per-node {needed}`, or take 1"
        )
    if data not in (0, size // group):
        raise UserError(
            f"layout.mesh.data = {data}: {started}; start {data * group} with `torchrun --nproc-per-node "
            f"{data * group}`, or take {size // group}, or 0 for all there are"
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
