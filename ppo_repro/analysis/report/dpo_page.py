"""Make the page of one DPO run."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ppo_repro.analysis.html.markup import sentence
from ppo_repro.analysis.html.page import Card, Section, Statement, facts_html, folded_text, page
from ppo_repro.analysis.report.data.metrics import DPO_STEPS
from ppo_repro.analysis.report.data.run_curves import Curves, run_curves, summary_tables
from ppo_repro.analysis.report.data.run_facts import Facts, repeating
from ppo_repro.analysis.report.sections.curve_figures import PageLine, metric_by_step, metric_figures, run_chart
from ppo_repro.analysis.report.sections.histograms import distribution_figure
from ppo_repro.analysis.report.sections.numbers_and_configuration import numbers_section
from ppo_repro.records import reader
from ppo_repro.runs.summary import summarise


def dpo_page(facts: Facts) -> str:
    """Return the page of one DPO run; equal records give equal bytes.

    Raises UserError if the run is not complete.
    """
    iterations, steps = summary_tables(facts)
    curves = run_curves(facts, iterations, steps)
    last = [facts.manifest.num_iterations - 1]
    rows = reader.read_table("margins", facts.run_dir, iterations=last, columns=["held_out", "margins"])
    pairs = {"training pairs": rows[~rows["held_out"]], "held-out pairs": rows[rows["held_out"]]}
    cards = [
        Card(
            "Did it learn?",
            [Statement("fact", sentence(line)) for line in summarise(facts.run_dir).sentences],
            chart=run_chart(facts, curves),
        ),
        Card("How to repeat it", blocks=[facts_html(repeating(facts))]),
    ]
    sections = [
        _learning(facts, curves, pairs),
        Section("steps", "Steps", figures=[metric_by_step(metric, steps) for metric in DPO_STEPS]),
        numbers_section(
            {"Whole run": _whole_run(facts, steps, pairs)}, [folded_text("Configuration", facts.config_text)]
        ),
    ]
    return page(facts.name, cards, sections)


def _learning(facts: Facts, curves: Curves, pairs: dict[str, pd.DataFrame]) -> Section:
    """Return the section Learning; if no margin is finite, a sentence replaces the figure of margins after training."""
    figures = metric_figures(facts.content.learning, [PageLine("this run", curves)])
    margins = {group: rows["margins"].to_numpy(np.float64) for group, rows in pairs.items() if len(rows)}
    if not any(np.isfinite(values).any() for values in margins.values()):
        note = "No margin after training is finite, so there is no figure of them."
        return Section("learning", "Learning", (note,), figures)
    caption = "Difference of the implicit rewards after training; above 0 the preferred response is the likelier one."
    after = distribution_figure("Margins after training", margins, "margin", facts.content.samples, caption)
    return Section("learning", "Learning", figures=[*figures, after])


def _whole_run(facts: Facts, steps: pd.DataFrame, pairs: dict[str, pd.DataFrame]) -> pd.DataFrame:
    rows = [
        *((group, len(rows)) for group, rows in pairs.items()),
        ("optimizer steps", len(steps)),
        *((key, value) for key, value in facts.manifest.final.items() if not isinstance(value, str)),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value"])
