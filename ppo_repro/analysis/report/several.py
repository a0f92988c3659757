"""Read several runs and draw their curves, for the pages about several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.report import curves
from ppo_repro.analysis.report.charts import legend
from ppo_repro.analysis.report.curves import Curve
from ppo_repro.analysis.report.facts import Facts, read_facts
from ppo_repro.analysis.report.kinds import KINDS
from ppo_repro.analysis.report.page import Section
from ppo_repro.analysis.report.scan import run_curves, summary_tables


@dataclass(frozen=True)
class OneRun:
    """One run of a page about several: its facts, the table `iterations`, and its curves."""

    facts: Facts
    iterations: pd.DataFrame
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
    return OneRun(facts, iterations, run_curves(facts, iterations, steps))


def main_chart(facts: Facts, lines: Sequence[Curve]) -> str:
    """Return a chart with the evaluated curve of each run, or with the sampled curve if nothing was evaluated."""
    for main in KINDS[facts.manifest.kind].main:
        if any((line.frame["metric"] == main.metric).any() for line in lines):
            return curves.curve_chart(main.unit.capitalize(), main.unit, [(line, main.metric) for line in lines])
    return ""


def curve_sections(facts: Facts, lines: Sequence[Curve], notes: Sequence[str], band: str) -> list[Section]:
    """Return the sections Learning and Optimisation: figures of `lines` below `notes`; `band` explains the bands."""
    kind, names = KINDS[facts.manifest.kind], legend([line.name for line in lines])
    return [
        Section("learning", "Learning", notes, curves.metric_figures(kind.learning, lines, band), (), names),
        Section(
            "optimisation", "Optimisation", notes, curves.metric_figures(kind.optimisation, lines, band), (), names
        ),
    ]
