"""Make the page of two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ppo_repro.analysis.html.markup import Html, differences, element, escape, number, share, table
from ppo_repro.analysis.html.page import Card, Section, Statement, folded_table, folded_text, page, scrolled
from ppo_repro.analysis.report.data.run_curves import OneRun, first_and_last, read_run
from ppo_repro.analysis.report.data.run_facts import Facts, repeating
from ppo_repro.analysis.report.sections import verdicts
from ppo_repro.analysis.report.sections.curves import Curves, curve_sections, informative, main_chart
from ppo_repro.analysis.report.sections.held_out import evaluations, is_at_the_end, prompt_table, shortened
from ppo_repro.analysis.report.sections.terms import terms
from ppo_repro.base.errors import UserError
from ppo_repro.records.changes import setup_changes, setup_of, value_text
from ppo_repro.records.diff import RUN, first_difference
from ppo_repro.records.label import read_label
from ppo_repro.records.settings import settings_of
from ppo_repro.runs.summary import change

NAMES = ("A", "B")
PROMPTS = 12


def pair_page(a: Path, b: Path) -> str:
    """Return the page of two runs of one kind; equal records give equal bytes.

    Raises UserError if the kinds differ.
    """
    runs = [read_run(run_dir) for run_dir in (a, b)]
    kinds = [run.facts.manifest.kind for run in runs]
    if kinds[0] != kinds[1]:
        raise UserError(f"{a} is a {kinds[0]} run, {b} a {kinds[1]} run; put runs of one kind side by side")
    facts = [run.facts for run in runs]
    lines = [Curves(name, run.curves) for name, run in zip(_line_names(facts), runs, strict=True)]
    changed = scrolled(table(_different(facts), "Configuration and inputs"))
    cards = (
        Card("Which learned more?", _learning(runs), chart=main_chart(facts[0], lines)),
        Card("What differs?", blocks=[changed]),
        Card("Where do they first differ?", [_first(facts)]),
        Card("Are they on-policy?", [v for name, run in zip(NAMES, runs, strict=True) for v in _agreement(name, run)]),
        Card("How to repeat them", blocks=[scrolled(table(_about(facts), "The runs"), "words")]),
    )
    metrics = informative(facts[0].content.metrics, lines)
    last = [first_and_last(metrics, run.curves).set_index(["quantity", "unit"])["last"] for run in runs]
    numbers = pd.DataFrame(dict(zip(NAMES, last, strict=True))).reset_index()[["quantity", *NAMES, "unit"]]
    folded = [folded_text(f"Configuration of {name}", f.config_text) for name, f in zip(NAMES, facts, strict=True)]
    blocks = [scrolled(table(numbers, "Last complete iteration")), *folded, folded_table("Terms in words", terms())]
    sections = [
        *curve_sections(facts[0], lines, (), ""),
        *_responses(facts),
        Section("numbers", "Numbers and configuration", blocks=blocks),
    ]
    return page(f"A: {facts[0].name}, B: {facts[1].name}", cards, sections)


def _line_names(facts: Sequence[Facts]) -> list[str]:
    """Return A and B, each with the label of its run or with what it differs in."""
    settings = settings_of([setup_of(one.run_dir, one.manifest) for one in facts])
    labels = [read_label(one.run_dir).name or setting.short for one, setting in zip(facts, settings, strict=True)]
    return [f"{name}: {text}" if text else name for name, text in zip(NAMES, labels, strict=True)]


def _learning(runs: Sequence[OneRun]) -> list[Statement]:
    """Return a sentence about the first and last score or return of each run, and a warning about its weight."""
    sentences = []
    for name, run in zip(NAMES, runs, strict=True):
        for line in run.facts.content.first_chart:
            values = run.curves[run.curves["metric"] == line.key].sort_values("iteration")["value"].tolist()
            if values:
                sentences.append(Statement("fact", f"{name} {change(values[0], values[-1])} ({line.title})."))
                break
    alone = "One run each says nothing about the methods: compare seeds by `ppo-repro analyse table`."
    return [*sentences, Statement("fact", alone)]


def _first(facts: Sequence[Facts]) -> Statement:
    """Return a sentence about the first difference of two runs, with both values."""
    a, b = facts
    if a.manifest.fingerprint == b.manifest.fingerprint:
        return Statement("holds", "A and B have the same fingerprint: all results have the same bits.")
    first = first_difference(a.run_dir, b.run_dir)
    if first is None or first.table == RUN:
        counts = " and ".join(str(len(one.iterations)) for one in facts)
        text = f"A and B are the same to the last bit in the iterations that both have ({counts} are recorded)."
        return Statement("holds", text)
    return Statement("differs", f"A and B first differ: {first.describe('in A', 'in B')}.")


def _agreement(name: str, run: OneRun) -> list[Statement]:
    sentences = [Statement(v.kind, v.text.replace("The run", name)) for v in verdicts.state(run.facts)]
    if run.unequal:
        text = f"{name}: {share(run.unequal, run.tokens)} of log-probs differ between sampler and trainer."
        return [*sentences, Statement("differs", text)]
    text = f"{name}: sampler and trainer agree on every bit of {run.tokens:,} {run.facts.content.token_unit}."
    return [*sentences, Statement("holds", text)]


def _different(facts: Sequence[Facts]) -> pd.DataFrame:
    """Return the columns field, A, B of all fields, inputs (by SHA-256) and origins of forks that differ."""
    changed = setup_changes(facts[0].run_dir, facts[1].run_dir)
    rows = [(name, *map(value_text, values)) for name, values in sorted(changed.items())]
    return pd.DataFrame(rows or [("no field", "the same", "the same")], columns=["field", *NAMES])


def _about(facts: Sequence[Facts]) -> pd.DataFrame:
    """Return the columns fact, A, B; a fact of one run alone, such as the origin of a fork, is blank in the other."""
    a, b = (dict(repeating(one)) for one in facts)
    rows = [(name, a.get(name, ""), "the same" if a.get(name) == b.get(name) else b.get(name, "")) for name in a | b]
    return pd.DataFrame(rows[1:], columns=["fact", *NAMES])  # without the fact how to run one run again


def _responses(facts: Sequence[Facts]) -> list[Section]:
    """Return the section of both runs' last responses to the same held-out prompts; [] if a run recorded none."""
    evaluated = [rows for one in facts if (rows := evaluations(one.run_dir, one.manifest)) is not None]
    if len(evaluated) < len(facts):
        return []
    a, b = (rows[rows["iteration"] == rows["iteration"].max()].set_index("prompt_key") for rows in evaluated)
    pairs = [(a.loc[key], b.loc[key]) for key in a.index if key in b.index]
    if not pairs:
        return []
    pairs.sort(key=lambda pair: pair[0]["response"] == pair[1]["response"])  # different ones first
    different = sum(x["response"] != y["response"] for x, y in pairs)
    cards = []
    for x, y in pairs[:PROMPTS]:
        parts = differences(*(shortened(str(row["response"])) for row in (x, y)))
        both: dict[str, Any] = {"run": NAMES, "response": [_side(parts, "-", "only-a"), _side(parts, "+", "only-b")]}
        both["score"] = [float(row["scores"]) for row in (x, y)]
        cards.append(prompt_table(str(x["prompt"]), str(x["answer"]), pd.DataFrame(both, dtype=object)))
    last = [int(rows["iteration"].max()) for rows in evaluated]
    moments = " and ".join(
        f"{name} at the end" if is_at_the_end(one, iteration) else f"{name} before iteration {iteration}"
        for name, one, iteration in zip(NAMES, facts, last, strict=True)
    )
    note = (
        f"Greedy responses of the last evaluation ({moments}): {number(different)} of {number(len(pairs))} held-out "
        f"prompts have different ones. {len(cards)} are shown, different ones first."
    )
    return [Section("samples", "Last responses", (note,), blocks=[element("div", "".join(cards), class_="cards")])]


def _side(parts: Sequence[tuple[str, str]], kind: str, class_: str) -> Html:
    """Return one of two texts as HTML; `mark` with `class_` has the parts that the other text does not have."""
    return Html(
        "".join(
            element("mark", escape(t), class_=class_) if part == kind else escape(t)
            for part, t in parts
            if part in ("=", kind)
        )
    )
