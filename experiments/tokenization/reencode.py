"""First ratios when text is encoded again before training: `python -m experiments.tokenization.reencode FOLDER...`.

FOLDER is a run or a grid of runs. Each response of a run's first iteration is decoded, its text is encoded again, and
the run's initial policy scores the new ids (`first_ratios`). Exit code 1 if ids that did not change have other
log-probs than were sampled, which deterministic numerics rule out. `--control` takes native runs, which must fail
this test.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.grids.outcomes import complete_cells
from analysis.grids.table import markdown
from experiments.tokenization.first_ratios import DRIFTS, checked_config, response_table
from ppo_repro.errors import UserError
from ppo_repro.records.config_file import load_recorded_config


def bits(table: pd.DataFrame) -> dict[str, int]:
    """Counts of a `response_table`: responses by kind, and tokens that should be unchanged, and how many are not."""
    other = table["drift"] != "none"
    scored = table["scored"].to_numpy(bool)
    same, drifted = table[~other & scored], table[other & scored]
    return {
        "responses": len(table),
        **{name: int((table["drift"] == name).sum()) for name in DRIFTS},
        "drifted at the limit": int((other & (table["finish_reason"] == "length")).sum()),
        "not scored": int((~scored).sum()),
        "tokens without drift": int(same["same_tokens"].sum()),
        "unequal": int(same["unequal"].sum()),
        "tokens before drift": int(drifted["same_tokens"].sum()),
        "unequal before": int(drifted["unequal"].sum()),
    }


def _share(count: float, whole: float) -> float:
    return count / whole if whole else math.nan


def ratios(table: pd.DataFrame) -> dict[str, float]:
    """First ratios of the scored responses with drift in a `response_table`, in nats; NaN without any."""
    drifted = table[(table["drift"] != "none") & table["scored"]]
    logs = drifted["log_ratio"].to_numpy(np.float64)
    first = drifted["first_outside"].dropna()
    return {
        "drifted": len(drifted),
        "exactly 1": int((logs == 0).sum()),
        "above 1": int((logs > 0).sum()),
        "median": float(np.median(logs)) if len(logs) else math.nan,
        "min": float(logs.min()) if len(logs) else math.nan,
        "max": float(logs.max()) if len(logs) else math.nan,
        "length factor": _share(float(drifted["tokens_again"].sum()), float(drifted["tokens"].sum())),
        "responses outside": _share(float(drifted["response_outside"].sum()), len(drifted)),
        "first token outside": _share(float(first.sum()), len(first)),
        "aligned tokens": int(drifted["aligned"].sum()),
        "outside": _share(float(drifted["outside"].sum()), float(drifted["aligned"].sum())),
    }


def of_run(run_dir: Path, clip_range: float = 0.2, control: bool = False) -> dict[str, float]:
    """`bits` and `ratios` of a run; UserError as `response_table`."""
    table = response_table(run_dir, clip_range, control)
    return {**bits(table), **ratios(table)}


def runs_of(folder: Path) -> pd.DataFrame:
    """point, seed, run_dir of a grid's complete cells, or of a single run; UserError where it is neither."""
    if (folder / "cells.parquet").is_file():
        cells = complete_cells(folder)
        run_dirs = [folder / str(run_dir) for run_dir in cells["run_dir"]]
        cells = cells.assign(point=f"{folder.resolve().name}: " + cells["point"], run_dir=run_dirs)
        return cells[["point", "seed", "run_dir"]]
    config = load_recorded_config(folder)
    return pd.DataFrame({"point": [str(folder)], "seed": [config.seed], "run_dir": [folder]})


def _shown(rows: Sequence[dict[str, object]]) -> str:
    table = pd.DataFrame(list(rows))
    for name in table.columns:
        if table[name].dtype == np.float64:
            table[name] = [f"{value:.3f}" for value in table[name]]
    return markdown(table)


def report(responses: pd.DataFrame) -> Iterator[str]:
    """The tables of concatenated `response_table`s with point and seed: each run, and the runs of a point together."""
    by_run = list(responses.groupby(["point", "seed"], sort=False))
    by_point = list(responses.groupby("point", sort=False))
    yield "Bits, by run\n\n" + _shown([{"point": p, "seed": s, **bits(rows)} for (p, s), rows in by_run])
    yield "Bits, all seeds\n\n" + _shown([{"point": p, **bits(rows)} for p, rows in by_point])
    yield "First ratios, by run\n\n" + _shown([{"point": p, "seed": s, **ratios(rows)} for (p, s), rows in by_run])
    kinds = [
        {"point": point, "drift": name, **ratios(rows if name == "all" else rows[rows["drift"] == name])}
        for point, rows in by_point
        for name in ("all", *(kind for kind in DRIFTS if kind in set(rows["drift"]) - {"none"}))
    ]
    yield "First ratios, all seeds\n\n" + _shown(kinds)


def verdict(responses: pd.DataFrame, control: bool) -> tuple[str, bool]:
    """One line about the bits, and whether they are as expected: none unequal, or in a control some."""
    counts = bits(responses)
    compared_tokens = counts["tokens without drift"] + counts["tokens before drift"]
    unequal = counts["unequal"] + counts["unequal before"]
    line = f"{unequal} of {compared_tokens} tokens before any different id have another log-prob than was sampled"
    if not compared_tokens:
        return f"{line}: nothing was compared", False
    if control:
        return f"{line}; a control must have some", unequal > 0
    return f"{line}; in deterministic numerics there must be none", unequal == 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="first ratios when the text is encoded again before training")
    parser.add_argument("folders", metavar="FOLDER", type=Path, nargs="+", help="a recorded run, or a grid of them")
    parser.add_argument("--control", action="store_true", help="native runs, where some bits must differ")
    parser.add_argument("--clip-range", type=float, default=0.2, help="a ratio is outside beyond 1 ± this")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit code 1 where bits are not as expected, 2 and one line on a user error."""
    arguments = _arguments(argv)
    clip_range, control = arguments.clip_range, arguments.control
    try:
        if not 0 < clip_range < 1:
            raise UserError(f"--clip-range {clip_range}: must be above 0 and below 1")
        runs = pd.concat([runs_of(folder) for folder in arguments.folders], ignore_index=True)
        for run_dir in runs["run_dir"]:
            checked_config(run_dir, control)  # before the minutes that warm starts take
        tables = []
        for number, run in enumerate(runs.itertuples(), 1):
            print(f"{number}/{len(runs)} {run.point}, seed {run.seed}", file=sys.stderr, flush=True)
            tables.append(response_table(run.run_dir, clip_range, control).assign(point=run.point, seed=run.seed))
        responses = pd.concat(tables, ignore_index=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n\n".join(report(responses)), end="\n\n")
    line, held = verdict(responses, control)
    print(line)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
