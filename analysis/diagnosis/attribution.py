"""Where two paths through a policy first differ, read from the tables that `ppo-repro bisect` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.errors import UserError
from ppo_repro.records import bisect


@dataclass(frozen=True)
class Origin:
    """The first op, in the order of execution, with equal input bits and unequal output bits."""

    layer: int  # -1 outside of decoder layers
    op: str
    frac_bitwise_equal: float
    rel_l2: float


def read_ops(folder: Path | str, mode: str) -> pd.DataFrame:
    """Table `mismatch_op` of one mode, in the order of execution; UserError where there is none."""
    return _of_mode(bisect.read_table(folder, "mismatch_op"), folder, mode).sort_values("order", ignore_index=True)


def read_ladder(folder: Path | str, mode: str) -> pd.DataFrame:
    """Table `mismatch_ladder` of one mode, the largest change first; UserError where there is none."""
    steps = _of_mode(bisect.read_table(folder, "mismatch_ladder"), folder, mode)
    return steps.sort_values(["way", "change"], ascending=[False, False], kind="stable", ignore_index=True)


def _of_mode(table: pd.DataFrame, folder: Path | str, mode: str) -> pd.DataFrame:
    rows = table[table["mode"] == mode]
    if rows.empty:
        raise UserError(f"{folder}: mode = {mode!r}: there are {', '.join(sorted(set(table['mode'])))}")
    return rows


def origin(ops: pd.DataFrame) -> Origin | None:
    """The op that starts the difference; None where every op maps equal bits to equal bits."""
    starts = ops[ops["inputs_equal"] & ~ops["outputs_equal"]]
    if starts.empty:
        return None
    first = starts.sort_values("order").iloc[0]
    return Origin(int(first["layer"]), str(first["op"]), float(first["frac_bitwise_equal"]), float(first["rel_l2"]))


def by_layer_and_op(ops: pd.DataFrame, metric: str = "rel_l2") -> pd.DataFrame:
    """A metric as a table of layers by ops, both in the order of execution; UserError where there is no such metric."""
    if metric not in ops.columns:
        raise UserError(f"metric = {metric!r}: there are {', '.join(ops.columns)}")
    wide = ops.pivot(index="layer", columns="op", values=metric)
    rows = ops["layer"].drop_duplicates()
    inside = ops[ops["layer"] >= 0]["op"].drop_duplicates()
    outside = [op for op in ops["op"].drop_duplicates() if op not in set(inside)]
    return wide.reindex(index=rows.to_numpy(), columns=[*inside, *outside])
