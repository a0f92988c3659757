"""What pages about several runs need of each: its tables and its curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.report.drawing.figure import Section
from analysis.report.figures import curves, metrics
from analysis.report.pages.control import control_curves, returns_of
from analysis.report.reading.facts import ControlFacts, Facts, RunFacts, read_facts
from analysis.report.reading.load import iterations_of, summary_tables


@dataclass(frozen=True)
class OneRun:
    """One of several runs: its facts, the tables `iterations` and `steps`, and its curves."""

    facts: RunFacts | ControlFacts
    iterations: pd.DataFrame
    steps: pd.DataFrame
    curves: pd.DataFrame

    @property
    def unequal(self) -> int:
        """Log-probs that differ between sampler and trainer, over all iterations."""
        return int(self.iterations["unequal_old_rollout_logprobs"].sum())

    @property
    def tokens(self) -> int:
        """Tokens, or environment steps."""
        return int(self.iterations["tokens"].sum())


def read_run(run_dir: Path) -> OneRun:
    """A run of any kind; UserError where it is damaged or has no complete iteration."""
    facts = read_facts(run_dir)
    iterations, steps = summary_tables(run_dir, facts.iterations)
    if isinstance(facts, ControlFacts):
        return OneRun(facts, iterations, steps, control_curves(facts, iterations, steps, returns_of(facts)))
    rows = [
        row
        for records in iterations_of(run_dir, facts.iterations)
        for row in curves.sampled_rows(records.iteration, records.sequences, records.tokens)
    ]
    recorded = curves.recorded_rows(iterations, steps, facts.manifest.final)
    return OneRun(facts, iterations, steps, pd.concat([pd.DataFrame(rows), recorded], ignore_index=True))


def curve_sections(
    facts: Facts, lines: Sequence[tuple[str, pd.DataFrame]], notes: tuple[str, ...] = (), band: str = ""
) -> tuple[Section, Section]:
    """Learning and optimisation, one line for each named curve; `facts` of any of the runs, which are of one kind."""
    is_control = isinstance(facts, ControlFacts)
    learning = metrics.CONTROL_LEARNING if is_control else metrics.LEARNING
    optimisation = metrics.CONTROL_OPTIMISATION if is_control else metrics.OPTIMISATION
    return (
        Section("learning", "Learning", notes, curves.metric_figures(learning, lines, band)),
        Section("optimisation", "Optimisation", notes, curves.metric_figures(optimisation, lines, band)),
    )
