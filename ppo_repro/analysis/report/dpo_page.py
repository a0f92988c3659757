"""Make the page of one DPO run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ppo_repro.analysis.html.markup import sentence, table
from ppo_repro.analysis.html.page import (
    Card,
    Figure,
    Section,
    Statement,
    facts_html,
    folded_table,
    folded_text,
    page,
    scrolled,
)
from ppo_repro.analysis.report.data.run_curves import run_curves, summary_tables
from ppo_repro.analysis.report.data.run_facts import Facts, repeating
from ppo_repro.analysis.report.sections.curves import Curves, metric_by_step, metric_figures, run_chart
from ppo_repro.analysis.report.sections.histograms import distribution_figure
from ppo_repro.analysis.report.sections.terms import terms
from ppo_repro.records import reader
from ppo_repro.runs.summary import summarise
from ppo_repro.statistics.clusters import Floats


def dpo_page(facts: Facts) -> str:
    """Return the page of one DPO run; equal records give equal bytes.

    Raises UserError if the run is not complete.
    """
    folder, recorded, content = facts.run_dir, facts.manifest, facts.content
    iterations, steps = summary_tables(facts)
    curves, last = run_curves(facts, iterations, steps), [recorded.num_iterations - 1]
    pairs = reader.read_table("margins", folder, iterations=last, columns=["held_out", "margins"])
    learning = [Statement("fact", sentence(line)) for line in summarise(folder).sentences]
    cards = (
        Card("Did it learn?", learning, chart=run_chart(facts, curves)),
        Card("How to repeat it", blocks=[facts_html(repeating(facts))]),
    )
    both = {"training pairs": pairs[~pairs["held_out"]], "held-out pairs": pairs[pairs["held_out"]]}
    margins = {group: rows["margins"].to_numpy(np.float64) for group, rows in both.items() if len(rows)}
    rows = [
        *((name, len(rows)) for name, rows in both.items()),
        ("optimizer steps", len(steps)),
        *((key, value) for key, value in recorded.final.items() if not isinstance(value, str)),
    ]
    blocks = (
        scrolled(table(pd.DataFrame(rows, columns=["quantity", "value"]), "Whole run")),
        folded_text("Configuration", facts.config_text),
        folded_table("Terms in words", terms()),
    )
    learned = metric_figures(content.learning, [Curves("this run", curves)])
    sections = (
        _learning(learned, margins, content.samples),
        Section("steps", "Steps", figures=[metric_by_step(metric, steps) for metric in content.figures_by_step]),
        Section("numbers", "Numbers and configuration", blocks=blocks),
    )
    return page(facts.name, cards, sections)


def _learning(learned: Sequence[Figure], margins: Mapping[str, Floats], of: str) -> Section:
    """Return the section Learning; if no margin is finite, a sentence replaces the figure of margins after training."""
    if not any(np.isfinite(values).any() for values in margins.values()):
        note = "No margin after training is finite, so there is no figure of them."
        return Section("learning", "Learning", (note,), learned)
    caption = "Difference of the implicit rewards after training; above 0 the preferred response is the likelier one."
    after = distribution_figure("Margins after training", margins, "margin", of, caption)
    return Section("learning", "Learning", figures=[*learned, after])
