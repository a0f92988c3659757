"""Several runs on one page: cells are configurations that differ in more than the seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.report.drawing.figure import Section
from analysis.report.drawing.markup import share
from analysis.report.facts import RunFacts, Verdict, read_facts
from analysis.report.figures import curves
from analysis.report.load import iterations_of
from analysis.report.page import page, summary_html
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader

MAX_LINES = 8
# GRID/cells/<cell>/<experiment>/<run>, RUNS/<experiment>/<run>, or the runs themselves
DEPTHS = ("*", "*/*", "*/*/*", "*/*/*/*")


@dataclass(frozen=True)
class GridRun:
    """One run of a grid: the numbers for the summary, and its learning curves."""

    cell: str
    seed: int
    name: str
    iterations: pd.DataFrame
    curves: pd.DataFrame
    eval_accuracy: float


def runs_below(folder: Path) -> list[Path]:
    """The runs in a folder, up to four levels down, sorted; raises UserError where there is none."""
    folders = {path.parent for depth in DEPTHS for path in folder.glob(f"{depth}/{manifest.FILE_NAME}")}
    runs = sorted(path for path in folders if (path / "records").is_dir())
    if not runs:
        raise UserError(f"{folder}: has no run; give the folder of a run, or one with runs in it")
    return runs


def grid_page(folder: Path, run_dirs: Sequence[Path]) -> str:
    """The page about the complete runs of a folder, which names the others; UserError if none is complete."""
    states = {run_dir: manifest.load(run_dir).status for run_dir in run_dirs}
    facts = [read_facts(run_dir) for run_dir, state in states.items() if state == "complete"]
    if not facts:
        raise UserError(f"{folder}: none of its {len(states)} runs is complete; finish them first")
    missing = [f"{run_dir.relative_to(folder)} ({state})" for run_dir, state in states.items() if state != "complete"]
    labels = cell_labels([run_facts.config.model_dump(mode="json") for run_facts in facts])
    runs = [_read_run(run_facts, label) for run_facts, label in zip(facts, labels, strict=True)]
    cells = list(dict.fromkeys(labels))
    numbers = _table(runs, cells)
    drawn_cells = numbers.sort_values("last score", ascending=False, kind="stable")["cell"].head(MAX_LINES).tolist()
    lines = [
        (cell, curves.over_seeds([run.curves for run in runs if run.cell == cell]))
        for cell in cells
        if cell in drawn_cells
    ]
    notes: tuple[str, ...] = ()
    if len(cells) > MAX_LINES:
        notes = (f"The {MAX_LINES} of {len(cells)} cells with the highest last score; the table has all.",)
    band = "mean over the seeds of a cell, band: ± one standard error over them (none for a single seed)."
    sections = (Section("learning", "Learning", notes, curves.learning_figures(lines, band)),)
    about = [("folder", folder.resolve().name), ("runs", str(len(runs))), ("cells", str(len(cells)))]
    title = f"{folder.resolve().name}: {len(runs)} runs"
    summary = summary_html(_verdicts(runs, missing), about, (("Cells", numbers),), "")
    return page(title, summary, sections, None, "")


def cell_labels(configs: Sequence[dict[str, Any]]) -> list[str]:
    """For each configuration the fields in which it differs from some other, except the seed; else `all runs`."""
    flat = [_flat(config, "") for config in configs]
    names = sorted({name for config in flat for name in config} - {"seed"})
    differing = [name for name in names if len({json.dumps(config.get(name)) for config in flat}) > 1]
    return [", ".join(f"{name}={_word(config.get(name))}" for name in differing) or "all runs" for config in flat]


def _flat(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    fields: dict[str, Any] = {}
    for name, child in value.items():
        fields |= _flat(child, f"{path}.{name}" if path else name)
    return fields


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read_run(facts: RunFacts, cell: str) -> GridRun:
    run_dir = facts.run_dir
    iterations, steps = reader.read_iterations(run_dir), reader.read_steps(run_dir)
    rows = [
        row
        for records in iterations_of(run_dir, len(iterations))
        for row in curves.sampled_rows(records.iteration, records.sequences, records.tokens)
    ]
    accuracy = float(facts.manifest.final["eval_accuracy"])
    joined = pd.concat([pd.DataFrame(rows), curves.recorded_rows(iterations, steps, accuracy)], ignore_index=True)
    return GridRun(cell, facts.config.seed, facts.name, iterations, joined, accuracy)


def _verdicts(runs: Sequence[GridRun], missing: Sequence[str]) -> list[Verdict]:
    counts = [[int(run.iterations[n].sum()) for n in ("unequal_old_rollout_logprobs", "tokens")] for run in runs]
    equal = [tokens for unequal, tokens in counts if not unequal]
    unequal, tokens = (sum(pair[k] for pair in counts if pair[0]) for k in (0, 1))
    verdicts = []
    if equal:
        text = f"Sampler and trainer agree on every bit in {len(equal)} of {len(runs)} runs ({sum(equal):,} tokens)."
        verdicts.append(Verdict("holds", text))
    if tokens:
        where = f"in the other {len(runs) - len(equal)}" if equal else f"in all {len(runs)} runs"
        text = f"{share(unequal, tokens)} of log-probs differ {where} ({unequal:,} of {tokens:,} tokens)."
        verdicts.append(Verdict("differs", text))
    if missing:
        verdicts.append(Verdict("differs", f"Not complete and not in this page: {', '.join(missing)}."))
    return verdicts


def _table(runs: Sequence[GridRun], cells: Sequence[str]) -> pd.DataFrame:
    rows = []
    for cell in cells:
        runs_of_cell = [run for run in runs if run.cell == cell]
        row: dict[str, object] = {"cell": cell, "seeds": ", ".join(str(run.seed) for run in runs_of_cell)}
        row["unequal log-probs"] = sum(
            int(run.iterations["unequal_old_rollout_logprobs"].sum()) for run in runs_of_cell
        )
        for name, values in (
            ("final held-out accuracy", [run.eval_accuracy for run in runs_of_cell]),
            ("last score", [float(run.iterations["score_mean"].iloc[-1]) for run in runs_of_cell]),
            (
                "last KL (nats per response)",
                [float(run.iterations["ref_kl_per_sequence"].iloc[-1]) for run in runs_of_cell],
            ),
        ):
            row[name], row[f"± error of {name.partition(' (')[0]}"] = curves.mean_and_error(np.array(values))
        rows.append(row)
    return pd.DataFrame(rows)
