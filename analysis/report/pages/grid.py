"""Several runs on one page: cells are configurations that differ in more than the seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.report.drawing.figure import Verdict
from analysis.report.drawing.markup import share
from analysis.report.drawing.page import folded_table, page, summary_html
from analysis.report.figures import curves
from analysis.report.pages.several import OneRun, curve_sections, read_run
from analysis.words import terms
from ppo_repro.errors import UserError
from ppo_repro.records import manifest

# name, column, whether it is a final result or of the last iteration; cells are ranked by the second
LANGUAGE = (
    ("final held-out accuracy", "eval_accuracy", True),
    ("last score", "score_mean", False),
    ("last KL (nats per response)", "ref_kl_per_sequence", False),
)
CONTROL = (
    ("final return, likeliest actions", "eval_return", True),
    ("return of the last 100 training episodes", "last_100_return", True),
    ("last entropy (nats per step)", "entropy", False),
)
MAX_LINES = 8
# GRID/cells/<cell>/<experiment>/<run>, RUNS/<experiment>/<run>, or the runs themselves
DEPTHS = ("*", "*/*", "*/*/*", "*/*/*/*")


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
    complete = [run_dir for run_dir, state in states.items() if state == "complete"]
    if not complete:
        raise UserError(f"{folder}: none of its {len(states)} runs is complete; finish them first")
    kinds = {manifest.load_head(run_dir).kind for run_dir in complete}
    if len(kinds) > 1:
        raise UserError(f"{folder}: has {' and '.join(sorted(kinds))} runs; give a folder with runs of one kind")
    missing = [f"{run_dir.relative_to(folder)} ({state})" for run_dir, state in states.items() if state != "complete"]
    runs = [read_run(run_dir) for run_dir in complete]
    labels = cell_labels([run.facts.config.model_dump(mode="json") for run in runs])
    cells: dict[str, list[OneRun]] = {}
    for label, run in zip(labels, runs, strict=True):
        cells.setdefault(label, []).append(run)
    measures = CONTROL if kinds == {"control"} else LANGUAGE
    numbers = _table(cells, measures)
    ranked = numbers.sort_values(measures[1][0], ascending=False, kind="stable")["cell"].head(MAX_LINES).tolist()
    lines = [(cell, curves.over_seeds([run.curves for run in cells[cell]])) for cell in cells if cell in ranked]
    notes: tuple[str, ...] = ()
    if len(cells) > MAX_LINES:
        notes = (f"The {MAX_LINES} of {len(cells)} cells with the highest {measures[1][0]}; the table has all.",)
    band = "mean over the seeds of a cell, band: ± one standard error over them (none for a single seed)."
    sections = curve_sections(runs[0].facts, lines, notes, band)
    about = [("folder", folder.resolve().name), ("runs", str(len(runs))), ("cells", str(len(cells)))]
    title = f"{folder.resolve().name}: {len(runs)} runs"
    folded = (folded_table("Terms in words", terms()),)
    return page(title, summary_html(_verdicts(runs, missing), about, (("Cells", numbers),), folded), sections)


def cell_labels(configs: Sequence[dict[str, Any]]) -> list[str]:
    """For each configuration the fields in which it differs from some other, except the seed; else `all runs`."""
    fields = [flat(config, "") for config in configs]
    names = sorted({name for config in fields for name in config} - {"seed"})
    differing = [name for name in names if len({json.dumps(config.get(name)) for config in fields}) > 1]
    return [", ".join(f"{name}={_word(config.get(name))}" for name in differing) or "all runs" for config in fields]


def flat(value: Any, path: str) -> dict[str, Any]:
    """The values of a nested configuration by dotted path."""
    if not isinstance(value, dict):
        return {path: value}
    fields: dict[str, Any] = {}
    for name, child in value.items():
        fields |= flat(child, f"{path}.{name}" if path else name)
    return fields


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _verdicts(runs: Sequence[OneRun], missing: Sequence[str]) -> list[Verdict]:
    counts = [(run.unequal, run.tokens) for run in runs]
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


def _table(cells: Mapping[str, Sequence[OneRun]], measures: Sequence[tuple[str, str, bool]]) -> pd.DataFrame:
    """cell, seeds, unequal log-probs, then for each measure its mean over the seeds and the standard error."""
    rows = []
    for cell, runs in cells.items():
        row: dict[str, object] = {"cell": cell, "seeds": ", ".join(str(run.facts.config.seed) for run in runs)}
        row["unequal log-probs"] = sum(run.unequal for run in runs)
        for name, column, is_final in measures:
            values = [
                float(run.facts.manifest.final[column] if is_final else run.iterations[column].iloc[-1]) for run in runs
            ]
            row[name], row[f"± error of {name.partition(' (')[0]}"] = curves.mean_and_error(np.array(values))
        rows.append(row)
    return pd.DataFrame(rows)
