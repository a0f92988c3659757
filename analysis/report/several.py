"""Read several runs and draw their curves, for the pages about several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.report import curves
from ppo_repro.analysis.report.curves import Curve
from ppo_repro.analysis.report.facts import Facts, read_facts
from ppo_repro.analysis.report.page import Section
from ppo_repro.analysis.report.run_page import CONTROL_MAIN, MAIN
from ppo_repro.analysis.report.scan import run_curves, summary_tables

# metric and unit of the first chart; the first metric that was recorded
CHARTS = {
    "language": (*((key, "score, held out" if key == "eval_score" else "score") for key in MAIN.values()),),
    "control": (*((key, "return") for key in CONTROL_MAIN.values()),),
    "dpo": (("eval_pair_accuracy", "pairs in order"),),
}


@dataclass(frozen=True)
class OneRun:
    """One run of a page about several: its facts, the tables `iterations` and `steps`, and its curves."""

    facts: Facts
    iterations: pd.DataFrame
    steps: pd.DataFrame
    curves: pd.DataFrame

    @property
    def unequal(self) -> int:
        """Return the number of log-probs that differ between sampler and trainer."""
        return int(self.iterations["unequal_old_rollout_logprobs"].sum())

    @property
    def tokens(self) -> int:
        """Return the number of response tokens, or of environment steps."""
        return int(self.iterations["tokens"].sum())


def read_run(run_dir: Path) -> OneRun:
    """Read a run of any kind. Raises UserError if it is damaged or has no complete iteration."""
    facts = read_facts(run_dir)
    iterations, steps = summary_tables(facts)
    return OneRun(facts, iterations, steps, run_curves(facts, iterations, steps))


def main_chart(facts: Facts, lines: Sequence[Curve]) -> str:
    """Return a chart with the evaluated curve of each run, or with the sampled curve if nothing was evaluated."""
    for key, unit in CHARTS[facts.manifest.kind]:
        if any((line.frame["metric"] == key).any() for line in lines):
            return curves.curve_chart(unit.capitalize(), unit, [(line, key) for line in lines])
    return ""


def curve_sections(facts: Facts, lines: Sequence[Curve], notes: Sequence[str], band: str) -> list[Section]:
    """Return the sections Learning and Optimisation: figures of `lines` below `notes`; `band` explains the bands."""
    learning, optimisation = curves.BY_KIND[facts.manifest.kind]
    return [
        Section("learning", "Learning", notes, curves.metric_figures(learning, lines, band)),
        Section("optimisation", "Optimisation", notes, curves.metric_figures(optimisation, lines, band)),
    ]
