"""Pages about several runs: two side by side, and the runs of a grid or of any folder.

A setting is a configuration without its seed, in a grid one combination of the axes' labels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.grids.table import SPREAD, comparisons, interval
from analysis.report import curves, verdicts
from analysis.report.facts import Facts, read_facts, repeating
from analysis.report.markup import Html, differences, element, escape, number, share, table
from analysis.report.page import Card, Section, Verdict, folded_table, folded_text, page, scrolled
from analysis.report.run_page import CONTROL_MAIN, MAIN, first_and_last
from analysis.report.samples import card, evaluations, shortened
from analysis.report.scan import run_curves, summary_tables
from analysis.words import terms
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import folders_with
from ppo_repro.config.files import DPO, read_tree
from ppo_repro.records import manifest
from ppo_repro.records.diff import RUN, first_difference, setup_changes
from ppo_repro.records.inputs import flat, shown

NAMES = ("A", "B")
PROMPTS = 12
MAX_LINES = 8
KEYS = ("sequence", "position", "epoch", "minibatch")
# what settings are compared by: title, name of the final result
MEASURES = {
    "language": {"held-out accuracy": "eval_accuracy", "held-out score": "eval_score"},
    "control": {"return, likeliest actions": "eval_return", "return, last 100 episodes": "last_100_return"},
    "dpo": {"held-out accuracy": "eval_accuracy"},
}
# where a run has none of these: title, column of the last iteration
LAST = {
    "language": ("last score", "score_mean"),
    "control": ("last return", "episode_return_mean"),
    "dpo": ("held-out pairs in order", "eval_pair_accuracy"),
}
# what the chart shows: metric, unit; the first that was recorded
CHARTS = {
    "language": (*((key, "score, held out" if key == "eval_score" else "score") for key in MAIN.values()),),
    "control": (*((key, "return") for key in CONTROL_MAIN.values()),),
    "dpo": (("eval_pair_accuracy", "pairs in order"),),
}


@dataclass(frozen=True)
class OneRun:
    """One of several runs: its facts, the tables `iterations` and `steps`, and its curves."""

    facts: Facts
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
    """A run of any kind; UserError if it is damaged or has no complete iteration."""
    facts = read_facts(run_dir)
    iterations, steps = summary_tables(facts)
    return OneRun(facts, iterations, steps, run_curves(facts, iterations, steps))


def _main_chart(facts: Facts, lines: Sequence[tuple[str, pd.DataFrame]]) -> str:
    """The evaluated curve of every line, or the sampled one if nothing was evaluated."""
    for key, unit in CHARTS[facts.manifest.kind]:
        found = [(name, rows) for name, frame in lines if len(rows := frame[frame["metric"] == key])]
        if found:
            return curves.curve_chart(unit.capitalize(), unit, found)
    return ""


def _curve_sections(
    facts: Facts, lines: Sequence[tuple[str, pd.DataFrame]], notes: Sequence[str], band: str
) -> list[Section]:
    learning, optimisation = curves.BY_KIND[facts.manifest.kind]
    return [
        Section("learning", "Learning", notes, curves.metric_figures(learning, lines, band)),
        Section("optimisation", "Optimisation", notes, curves.metric_figures(optimisation, lines, band)),
    ]


def pair_page(a: Path, b: Path) -> str:
    """Two runs of one kind as HTML; the same records give the same bytes. UserError if the kinds differ."""
    runs = [read_run(run_dir) for run_dir in (a, b)]
    kinds = [run.facts.manifest.kind for run in runs]
    if kinds[0] != kinds[1]:
        raise UserError(f"{a} is a {kinds[0]} run, {b} a {kinds[1]} run; put runs of one kind side by side")
    facts = [run.facts for run in runs]
    lines = [(name, run.curves) for name, run in zip(NAMES, runs, strict=True)]
    alone = "One run each says nothing about the methods: compare several seeds by python -m analysis.compare."
    again = (repeating(one.run_dir, one.manifest, one.environment, one.config) for one in facts)
    rows = [(name, x, y) for (name, x), (_, y) in zip(*again, strict=True) if name != "run again"]
    about = pd.DataFrame(rows, columns=["fact", *NAMES])
    changed = scrolled(table(_different(facts), "Configuration and inputs, where they differ"))
    cards = (
        Card("Where do they first differ?", [_first(facts)], [changed]),
        Card("Which learned more?", [Verdict("fact", alone)], [_main_chart(facts[0], lines)]),
        Card("Are they on-policy?", [v for name, run in zip(NAMES, runs, strict=True) for v in _agreement(name, run)]),
        Card("How to repeat them", (), [scrolled(table(about, "The runs"), "words")]),
    )
    last = [first_and_last(run.facts, run.curves).set_index(["quantity", "unit"])["last"] for run in runs]
    numbers = pd.DataFrame(dict(zip(NAMES, last, strict=True))).reset_index()[["quantity", *NAMES, "unit"]]
    folded = [folded_text(f"Configuration of {name}", f.config_text) for name, f in zip(NAMES, facts, strict=True)]
    blocks = [scrolled(table(numbers, "Last complete iteration")), *folded, folded_table("Terms in words", terms())]
    sections = [
        *_curve_sections(facts[0], lines, (), ""),
        *_responses(facts),
        Section("numbers", "Numbers and configuration", (), (), blocks),
    ]
    return page(f"A: {facts[0].name}, B: {facts[1].name}", cards, sections)


def _first(facts: Sequence[Facts]) -> Verdict:
    """The first difference of two runs, with both values."""
    a, b = facts
    if a.manifest.fingerprint == b.manifest.fingerprint:
        return Verdict("holds", "A and B have the same fingerprint: all results have the same bits.")
    first = first_difference(a.run_dir, b.run_dir)
    if first is None or first.table == RUN:
        counts = " and ".join(str(len(one.iterations)) for one in facts)
        text = f"A and B are the same to the last bit in the iterations that both have ({counts} are recorded)."
        return Verdict("holds", text)
    return Verdict("differs", f"A (left) and B (right) first differ: {first.describe()}.")


def _agreement(name: str, run: OneRun) -> list[Verdict]:
    found = [Verdict(v.kind, v.text.replace("The run", name)) for v in verdicts.state(run.facts)]
    if run.unequal:
        text = f"{name}: {share(run.unequal, run.tokens)} of log-probs differ between sampler and trainer."
        return [*found, Verdict("differs", text)]
    text = f"{name}: sampler and trainer agree on every bit of {run.tokens:,} {run.facts.unit}."
    return [*found, Verdict("holds", text)]


def _different(facts: Sequence[Facts]) -> pd.DataFrame:
    """field, A, B: the fields, inputs by their SHA-256, and origins of forks in which two runs differ."""
    changed = setup_changes(facts[0].run_dir, facts[1].run_dir)
    rows = [(name, *map(shown, values)) for name, values in sorted(changed.items())]
    return pd.DataFrame(rows or [("no field", "the same", "the same")], columns=["field", *NAMES])


def _responses(facts: Sequence[Facts]) -> list[Section]:
    """The last recorded responses of both to the same held-out prompts; none if none recorded."""
    found = [rows for one in facts if (rows := evaluations(one.run_dir, one.manifest)) is not None]
    if len(found) < len(facts):
        return []
    a, b = (rows[rows["iteration"] == rows["iteration"].max()].set_index("prompt_key") for rows in found)
    pairs = [(a.loc[key], b.loc[key]) for key in a.index if key in b.index]
    if not pairs:
        return []
    pairs.sort(key=lambda pair: pair[0]["response"] == pair[1]["response"])  # different ones first
    different = sum(x["response"] != y["response"] for x, y in pairs)
    cards = []
    for x, y in pairs[:PROMPTS]:
        parts = differences(*(shortened(str(row["response"])) for row in (x, y)))
        both: dict[str, Any] = {"run": NAMES, "response": [_side(parts, "-", "del"), _side(parts, "+", "ins")]}
        both["score"] = [float(row["scores"]) for row in (x, y)]
        cards.append(card(str(x["prompt"]), str(x["answer"]), pd.DataFrame(both, dtype=object)))
    moments = " and ".join(f"{n} before iteration {r['iteration'].max()}" for n, r in zip(NAMES, found, strict=True))
    note = (
        f"Greedy responses of the last evaluation ({moments}): {number(different)} of {number(len(pairs))} held-out "
        f"prompts have different ones. {len(cards)} are shown, different ones first."
    )
    return [Section("samples", "Last responses", (note,), (), (element("div", "".join(cards), class_="cards"),))]


def _side(parts: Sequence[tuple[str, str]], kind: str, tag: str) -> Html:
    """One of two texts as HTML; what the other one does not have is in an element `tag`."""
    return Html(
        "".join(element(tag if found == kind else "span", escape(t)) for found, t in parts if found in ("=", kind))
    )


def runs_below(folder: Path) -> list[Path]:
    """The runs below a folder, sorted; raises UserError if there is none."""
    runs = sorted(path for path in folders_with(folder, manifest.FILE_NAME) if (path / "records").is_dir())
    if not runs:
        raise UserError(f"{folder}: has no run; give the folder of a run, or one with runs in it")
    return runs


def grid_page(folder: Path, linked_from: Path | None) -> str:
    """The page about the complete runs of a folder, which names the others; UserError if none is complete.

    Runs are links if the page lies in `linked_from`.
    """
    states = {run_dir: manifest.load(run_dir).status for run_dir in runs_below(folder)}
    complete = [run_dir for run_dir, state in states.items() if state == "complete"]
    if not complete:
        raise UserError(f"{folder}: none of its {len(states)} runs is complete; finish them first")
    kinds = {manifest.load_head(run_dir).kind for run_dir in complete}
    if len(kinds) > 1:
        raise UserError(f"{folder}: has {' and '.join(sorted(kinds))} runs; give a folder with runs of one kind")
    runs = [read_run(run_dir) for run_dir in complete]
    settings = _settings(folder, runs)
    labels = [label for label, group in settings.items() for _ in group]
    ordered = [run for group in settings.values() for run in group]
    finals = _finals(ordered, labels)
    measures = [str(name) for name in finals.columns if name not in ("point", "seed")]
    measure = measures[0]
    answer, compared = _answer(finals, measure)
    means = finals.groupby("point", sort=False)[measure].mean().sort_values(ascending=False, kind="stable")
    drawn = [label for label in settings if label in set(means.index[:MAX_LINES])]
    lines = [(label, curves.over_seeds([run.curves for run in settings[label]])) for label in drawn]
    some = f"The {MAX_LINES} of {len(settings)} settings with the highest {measure}; the table has all."
    notes = (some,) if len(settings) > MAX_LINES else ()
    missing = [f"{run.relative_to(folder)} ({state})" for run, state in states.items() if state != "complete"]
    unfinished = f"Not complete and not in this page: {', '.join(missing)}."
    cards = [
        *_question(folder),
        Card("What is the answer?", answer, [_main_chart(runs[0].facts, lines)]),
        Card(f"{measure.capitalize()} of each setting", (), [scrolled(table(_means(finals, measures), SPREAD))]),
        *([Card("Differences, paired by seed", (), [scrolled(table(compared, "Holm over all settings"))])]
          if len(compared) else []),
        Card("Are the runs on-policy?", _verdicts(runs)),
        *([Card("Which runs are missing?", [Verdict("differs", unfinished)])] if missing else []),
    ]  # fmt: skip
    links = [_link(run.facts.run_dir, folder, linked_from) for run in ordered]
    cells = pd.DataFrame({"setting": labels, "seed": finals["seed"], "run": links}, dtype=object)
    listed = table(cells, "Each cell: a setting with a seed, one run", limit=len(cells))
    band = "mean over the seeds of a setting, band: 95 % Student interval (none for a single seed)."
    sections = [
        Section("runs", "Runs", (), (), (scrolled(listed, "words"),)),
        *_curve_sections(runs[0].facts, lines, notes, band),
        Section("terms", "Terms", (), (), (folded_table("Terms in words", terms()),)),
    ]
    return page(f"{folder.resolve().name}: {len(runs)} runs", cards, sections)


def _settings(folder: Path, runs: Sequence[OneRun]) -> dict[str, list[OneRun]]:
    """The runs of each setting: by the labels of the grid's axes, or by the fields in which configurations differ."""
    found = setting_labels([run.facts.tree for run in runs])
    if (folder / "cells.parquet").exists():
        cells = pd.read_parquet(folder / "cells.parquet")
        axes = [name for name in cells.columns if name.startswith("axis.")]
        named = {str(row["run_dir"]): ", ".join(str(row[axis]) for axis in axes) for row in cells.to_dict("records")}
        paths = [str(run.facts.run_dir.relative_to(folder)) for run in runs]
        order = {label: k for k, label in enumerate(named.values())}
        if all(path in named for path in paths) and axes:
            pairs = sorted(zip(paths, runs, strict=True), key=lambda pair: order[named[pair[0]]])
            found, runs = [named[path] for path, _ in pairs], [run for _, run in pairs]
    settings: dict[str, list[OneRun]] = {}
    for label, run in zip(found, runs, strict=True):
        settings.setdefault(label, []).append(run)
    return settings


def setting_labels(configs: Sequence[dict[str, Any]]) -> list[str]:
    """For each configuration the fields in which it differs from some other, except the seed; else `all runs`."""
    fields = [flat(config) for config in configs]
    names = sorted({name for config in fields for name in config} - {"seed"})
    differing = [name for name in names if len({json.dumps(config.get(name)) for config in fields}) > 1]
    shown = [{name: config.get(name) for name in differing} for config in fields]
    words = [[f"{n}={v if isinstance(v, str) else json.dumps(v)}" for n, v in config.items()] for config in shown]
    return [", ".join(each) or "all runs" for each in words]


def _finals(runs: Sequence[OneRun], labels: Sequence[str]) -> pd.DataFrame:
    """point, seed, and the final results that all runs have, else the mean score or return of the last iteration."""
    kind = runs[0].facts.manifest.kind
    found = {
        name: [float(run.facts.manifest.final[key]) for run in runs]
        for name, key in MEASURES[kind].items()
        if all(key in run.facts.manifest.final for run in runs)
    }
    if not found:
        name, column = LAST[kind]
        found = {name: [float(run.iterations[column].iloc[-1]) for run in runs]}
    # scores that are 1 for right answers and 0 for others are accuracies
    first = next(iter(found))
    found = {name: values for name, values in found.items() if name == first or values != found[first]}
    return pd.DataFrame({"point": labels, "seed": [run.facts.config.seed for run in runs], **found})


def _question(folder: Path) -> list[Card]:
    """The question of a grid and what was expected; none for a folder that is no grid."""
    path = folder / "grid.yaml"
    if not path.exists():
        return []
    tree = read_tree(path)
    said = [str(tree["question"]), f"Expected: {tree['expectation']}"]
    if tree.get("axes"):
        said.append(f"Settings are named by {', '.join(tree['axes'])}.")
    return [Card("What was the question?", [Verdict("fact", text) for text in said])]


def _answer(finals: pd.DataFrame, measure: str) -> tuple[list[Verdict], pd.DataFrame]:
    """Sentences about the differences from the first setting, and the table of all differences."""
    points = [str(point) for point in finals["point"].unique()]
    seeds = finals.groupby("point")["seed"].apply(frozenset)
    if len(points) < 2:
        text = f"There is one setting: {measure} {interval(finals[measure])}, {SPREAD}."
        return [Verdict("fact", text)], pd.DataFrame()
    if seeds.nunique() > 1 or len(seeds.iloc[0]) < 2:
        text = "No differences with intervals: they need the same seeds, at least two, in every setting."
        return [Verdict("fact", text)], pd.DataFrame()
    compared = comparisons(finals, measure, points[0])
    clear = compared[compared["Holm"] < 0.05]
    said = [
        Verdict("differs", f"{row.point}: {row.difference:+.3f} [{row.low:+.3f}, {row.high:+.3f}] (p {row.Holm:.2g})")
        for row in clear.itertuples()
    ]
    count = f"{len(clear)} of {len(compared)} settings differ from `{points[0]}` in {measure}"
    test = "95 % intervals and paired t-tests over seeds, Holm's correction, p below 0.05"
    shown = pd.DataFrame(
        {
            "setting": compared["point"],
            f"minus {points[0]}": [f"{row.difference:+.3f}" for row in compared.itertuples()],
            # NaN where all seeds have the same difference
            "95 % interval": [f"{number(row.low, 3)} to {number(row.high, 3)}" for row in compared.itertuples()],
            "p": [number(p, 3) for p in compared["p"]],
            "p, Holm": [number(p, 3) for p in compared["Holm"]],
        }
    )
    return [Verdict("fact", f"{count} ({test})."), *said], shown


def _means(finals: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """setting, seeds, and mean and interval of each measure."""
    rows = [
        {"setting": point, "seeds": len(group), **{name: interval(group[name]) for name in measures}}
        for point, group in finals.groupby("point", sort=False)
    ]
    return pd.DataFrame(rows)


def _link(run_dir: Path, folder: Path, linked_from: Path | None) -> Html:
    """The run's page, or its folder if it has no page; a path if the page about the grid lies elsewhere."""
    name = escape(run_dir.relative_to(folder))
    if linked_from is None:
        return Html(element("code", name))
    target = run_dir / "report.html" if (run_dir / "report.html").exists() else run_dir
    return Html(element("a", name, href=Path(os.path.relpath(target, linked_from)).as_posix()))


def _verdicts(runs: Sequence[OneRun]) -> list[Verdict]:
    if runs[0].facts.manifest.kind == DPO:
        return [Verdict("fact", "DPO trains on pairs that are given; nothing is sampled.")]
    equal = [run for run in runs if not run.unequal]
    found = []
    if equal:
        tokens = sum(run.tokens for run in equal)
        text = f"Sampler and trainer agree on every bit in {len(equal)} of {len(runs)} runs ({tokens:,} tokens)."
        found.append(Verdict("holds", text))
    if len(equal) < len(runs):
        unequal, tokens = (sum(n) for n in zip(*((r.unequal, r.tokens) for r in runs if r.unequal), strict=True))
        where = f"in the other {len(runs) - len(equal)}" if equal else f"in all {len(runs)} runs"
        text = f"{share(unequal, tokens)} of log-probs differ {where} ({unequal:,} of {tokens:,} tokens)."
        found.append(Verdict("differs", text))
    return found
