"""Make the page of two runs side by side, which the page calls A and B."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.html.markup import table
from ppo_repro.analysis.html.page import Card, Statement, folded_text, page, scrolled
from ppo_repro.analysis.report.data.run_curves import OneRun, first_and_last, read_run
from ppo_repro.analysis.report.data.run_facts import repeating
from ppo_repro.analysis.report.sections import verdicts
from ppo_repro.analysis.report.sections.curve_figures import PageLine, curve_sections, informative, main_chart
from ppo_repro.analysis.report.sections.numbers_and_configuration import numbers_section
from ppo_repro.analysis.report.sections.responses import last_responses_section
from ppo_repro.base.errors import UserError
from ppo_repro.config.kinds import DPO
from ppo_repro.records import manifest
from ppo_repro.records.changes import setup_changes, setup_of, value_text
from ppo_repro.records.diff import RUN, first_difference
from ppo_repro.records.label import read_label
from ppo_repro.records.settings import settings_of
from ppo_repro.runs.summary import logprobs_line


def two_runs_page(a: Path, b: Path) -> str:
    """Return the page of two runs of one kind; equal records give equal bytes.

    Raises UserError if the kinds differ, or for a DPO run.
    """
    kind_a, kind_b = (manifest.load_head(run_dir).kind for run_dir in (a, b))
    for run_dir, kind in ((a, kind_a), (b, kind_b)):
        if kind == DPO:
            raise UserError(f"{run_dir}: is a DPO run; a page about two runs compares language or control runs")
    if kind_a != kind_b:
        raise UserError(f"{a} is a {kind_a} run, {b} a {kind_b} run; put runs of one kind side by side")
    runs = {"A": read_run(a), "B": read_run(b)}
    facts = {name: run.facts for name, run in runs.items()}
    lines = _lines(runs)
    cards = [
        Card("Which learned more?", _learning(runs), chart=main_chart(facts["A"], lines)),
        Card("What differs?", blocks=[scrolled(table(_changed_fields(a, b), "Configuration and inputs"))]),
        Card("Where do they first differ?", [_first_difference(runs["A"], runs["B"])]),
        Card("Are they on-policy?", [line for name, run in runs.items() for line in _agreement(name, run)]),
        Card("How to repeat them", blocks=[scrolled(table(_about(runs), "The runs"), "words")]),
    ]
    sections = [
        *curve_sections(facts["A"], lines, (), ""),
        *last_responses_section(facts),
        numbers_section(
            {"Last complete iteration": _last_values(runs, lines)},
            [folded_text(f"Configuration of {name}", run.config_text) for name, run in facts.items()],
        ),
    ]
    return page(f"A: {facts['A'].name}, B: {facts['B'].name}", cards, sections)


def _lines(runs: Mapping[str, OneRun]) -> list[PageLine]:
    """Return the curves of A and B; a line's name has the label of its run, or what the run differs in."""
    settings = settings_of([setup_of(run.facts.run_dir, run.facts.manifest) for run in runs.values()])
    lines = []
    for (name, run), setting in zip(runs.items(), settings, strict=True):
        label = read_label(run.facts.run_dir).name or setting.short
        lines.append(PageLine(f"{name}: {label}" if label else name, run.curves))
    return lines


def _learning(runs: Mapping[str, OneRun]) -> list[Statement]:
    """Return a sentence about the first and last score or return of each run, and a warning about its weight."""
    sentences = []
    for name, run in runs.items():
        metric = next((metric for metric in run.facts.content.first_chart if metric.key in run.curves), None)
        if metric is not None:
            sentences.append(Statement("fact", f"{name} {run.curves[metric.key].ends} ({metric.title})."))
    alone = "One run each says nothing about the methods: compare seeds by `ppo-repro analyse table`."
    return [*sentences, Statement("fact", alone)]


def _changed_fields(a: Path, b: Path) -> pd.DataFrame:
    """Return the columns field, A, B of all fields, inputs (by SHA-256) and origins of forks that differ."""
    rows = [(name, *map(value_text, values)) for name, values in sorted(setup_changes(a, b).items())]
    return pd.DataFrame(rows or [("no field", "the same", "the same")], columns=["field", "A", "B"])


def _first_difference(a: OneRun, b: OneRun) -> Statement:
    """Return a sentence about the first difference of two runs, with both values."""
    if a.facts.manifest.fingerprint == b.facts.manifest.fingerprint:
        return Statement("holds", "A and B have the same fingerprint: all results have the same bits.")
    first = first_difference(a.facts.run_dir, b.facts.run_dir)
    if first is None or first.table == RUN:
        counts = " and ".join(str(len(run.facts.iterations)) for run in (a, b))
        text = f"A and B are the same to the last bit in the iterations that both have ({counts} are recorded)."
        return Statement("holds", text)
    return Statement("differs", f"A and B first differ: {first.describe('in A', 'in B')}.")


def _agreement(name: str, run: OneRun) -> list[Statement]:
    differ = logprobs_line(run.agreement)
    return [*verdicts.state(run.facts, name), Statement(differ.kind, f"{name}: {differ.text}.")]


def _about(runs: Mapping[str, OneRun]) -> pd.DataFrame:
    """Return the columns fact, A, B; a fact of one run alone, such as the origin of a fork, is blank in the other."""
    a, b = (repeating(run.facts) for run in runs.values())
    rows = [(name, a.get(name, ""), "the same" if a.get(name) == b.get(name) else b.get(name, "")) for name in a | b]
    return pd.DataFrame(rows, columns=["fact", "A", "B"])


def _last_values(runs: Mapping[str, OneRun], lines: list[PageLine]) -> pd.DataFrame:
    """Return the columns quantity, A, B, unit: the last value of each metric."""
    metrics = informative(runs["A"].facts.content.metrics, lines)
    last = {
        name: first_and_last(metrics, run.curves).set_index(["quantity", "unit"])["last"] for name, run in runs.items()
    }
    return pd.DataFrame(last).reset_index()[["quantity", *runs, "unit"]]
