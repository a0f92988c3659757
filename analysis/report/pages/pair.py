"""The page of two runs side by side: where they differ, their numbers, curves and last responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.compare.bitwise import first_difference
from analysis.report.drawing.figure import Section, Verdict
from analysis.report.drawing.markup import element, number, share
from analysis.report.drawing.page import folded_table, folded_text, page, summary_html
from analysis.report.pages.grid import flat
from analysis.report.pages.several import OneRun, curve_sections, read_run
from analysis.report.reading.facts import ControlFacts, agreement_of, run_facts, state_verdict
from analysis.report.reading.numbers import CONTROL, CONTROL_STEPS, LANGUAGE, LANGUAGE_STEPS, first_and_last_numbers
from analysis.report.tokens.samples import card, evaluations
from analysis.words import terms
from ppo_repro.errors import UserError

NAMES = ("A", "B")
PROMPTS = 12


def pair_page(a: Path, b: Path) -> str:
    """Two runs of one kind as HTML; the same records give the same bytes. UserError where the kinds differ."""
    runs = [read_run(run_dir) for run_dir in (a, b)]
    kinds = [run.facts.manifest.kind for run in runs]
    if kinds[0] != kinds[1]:
        raise UserError(f"{a} is a {kinds[0]} run, {b} a {kinds[1]} run; put runs of one kind side by side")
    configs = [run.facts.config.model_dump(mode="json") for run in runs]
    facts = [(name, run.facts.name) for name, run in zip(NAMES, runs, strict=True)]
    tables = (
        ("Configuration, where it differs", _different(configs)),
        ("Last complete iteration", _last_numbers(runs)),
        ("The runs", _about(runs)),
    )
    folded = [folded_text(f"Configuration of {n}", r.facts.config_text) for n, r in zip(NAMES, runs, strict=True)]
    folded.append(folded_table("Terms in words", terms()))
    lines = [(name, run.curves) for name, run in zip(NAMES, runs, strict=True)]
    sections = (*curve_sections(runs[0].facts, lines), *_responses(runs))
    title = f"A: {runs[0].facts.name}, B: {runs[1].facts.name}"
    return page(title, summary_html(_verdicts(runs), facts, tables, folded), sections)


def _verdicts(runs: Sequence[OneRun]) -> list[Verdict]:
    a, b = (run.facts for run in runs)
    verdicts = [
        Verdict(verdict.kind, verdict.text.replace("The run", name).replace("RUN", f"the folder of {name}"))
        for name, run in zip(NAMES, runs, strict=True)
        for verdict in state_verdict(run.facts)
    ]
    first = None
    if a.manifest.fingerprint != b.manifest.fingerprint:
        first = first_difference(a.run_dir, b.run_dir, allow_incomplete=True)
    if a.manifest.fingerprint == b.manifest.fingerprint:
        verdicts.append(Verdict("holds", "A and B have the same fingerprint: all results have the same bits."))
    elif first is None:
        counts = " and ".join(str(len(facts.iterations)) for facts in (a, b))
        text = f"A and B are the same to the last bit in the iterations that both have ({counts} are recorded)."
        verdicts.append(Verdict("holds", text))
    else:
        text = f"A and B first differ in {first.describe()}; `ppo-repro diff A B` names the cell and both values."
        verdicts.append(Verdict("differs", text))
    unit = agreement_of(a.config).unit
    for name, run in zip(NAMES, runs, strict=True):
        if run.unequal:
            text = f"{name}: {share(run.unequal, run.tokens)} of log-probs differ between sampler and trainer."
            verdicts.append(Verdict("differs", text))
        else:
            text = f"{name}: sampler and trainer agree on every bit of {run.tokens:,} {unit}."
            verdicts.append(Verdict("holds", text))
    text = "One run each says nothing about the methods: compare several seeds (`python -m analysis.compare`)."
    return [*verdicts, Verdict("fact", text)]


def _different(configs: Sequence[dict[str, object]]) -> pd.DataFrame:
    """field, A, B: the fields in which two configurations differ."""
    a, b = (flat(config, "") for config in configs)
    rows = [
        (name, *("not there" if name not in one else str(one[name]) for one in (a, b)))
        for name in sorted({*a, *b})
        if name not in a or name not in b or a[name] != b[name]
    ]
    return pd.DataFrame(rows or [("no field", "the same", "the same")], columns=["field", *NAMES])


def _last_numbers(runs: Sequence[OneRun]) -> pd.DataFrame:
    """quantity, A, B, unit: recorded values of the last complete iteration, and the final results."""
    is_control = isinstance(runs[0].facts, ControlFacts)
    names = (CONTROL, CONTROL_STEPS) if is_control else (LANGUAGE, LANGUAGE_STEPS)
    a, b = (first_and_last_numbers(run.iterations, run.steps, *names) for run in runs)
    table = pd.DataFrame({"quantity": a["quantity"], "A": a["last"], "B": b["last"], "unit": a["unit"]})
    finals = [{n: float(v) for n, v in run.facts.manifest.final.items() if not isinstance(v, str)} for run in runs]
    evaluated = [name for name in finals[0] if name.startswith("eval_") and name in finals[1]]
    ends = [(f"{name}, after the last update", finals[0][name], finals[1][name], "") for name in evaluated]
    return pd.concat([pd.DataFrame(ends, columns=table.columns), table], ignore_index=True) if ends else table


def _about(runs: Sequence[OneRun]) -> pd.DataFrame:
    a, b = (dict(run_facts(run.facts)) for run in runs)
    rows = [(name, a[name], b[name]) for name in a if name != "run again"]
    return pd.DataFrame(rows, columns=["fact", *NAMES])


def _responses(runs: Sequence[OneRun]) -> tuple[Section, ...]:
    """The last recorded responses of both to the same held-out prompts; none where a run recorded none."""
    recorded = [evaluations(run.facts.run_dir, run.facts.manifest) for run in runs]
    found = [rows for rows in recorded if rows is not None]
    if len(found) < len(runs):
        return ()
    last = [rows[rows["iteration"] == rows["iteration"].max()].set_index("prompt_key") for rows in found]
    common = [key for key in last[0].index if key in last[1].index]
    if not common:
        return ()
    pairs = [(last[0].loc[key], last[1].loc[key]) for key in common]
    pairs.sort(key=lambda pair: str(pair[0]["response"]) == str(pair[1]["response"]))  # different ones first
    different = sum(str(x["response"]) != str(y["response"]) for x, y in pairs)
    cards = [
        card(
            str(x["prompt"]),
            str(x["answer"]),
            ("run", "response", "score"),
            [(name, str(row["response"]), float(row["scores"])) for name, row in zip(NAMES, (x, y), strict=True)],
        )
        for x, y in pairs[:PROMPTS]
    ]
    moments = " and ".join(
        f"{name} before iteration {int(rows['iteration'].max())}" for name, rows in zip(NAMES, found, strict=True)
    )
    note = (
        f"Greedy responses of the last evaluation ({moments}): {number(different)} of {number(len(common))} held-out "
        f"prompts have different ones. {min(PROMPTS, len(pairs))} are shown, different ones first."
    )
    return (Section("samples", "Last responses", (note,), (), (element("div", "".join(cards), class_="cards"),)),)
