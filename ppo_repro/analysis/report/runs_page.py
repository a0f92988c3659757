"""Make the page of the runs of a grid, or of any folder.

A setting is the configuration and inputs of a run without its seed. In a grid it is a combination of the axes' labels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.grids.grid_outcomes import incomplete_cells
from ppo_repro.analysis.grids.grid_table import SPREAD
from ppo_repro.analysis.html.markup import Html, element, escape, share, table
from ppo_repro.analysis.html.page import Card, Section, Verdict, folded_table, page, scrolled
from ppo_repro.analysis.report import curves
from ppo_repro.analysis.report.curve_metrics import ANY, score_range
from ppo_repro.analysis.report.curves import Curve, curve_sections, main_chart
from ppo_repro.analysis.report.grid_answer import answer_cards, spread
from ppo_repro.analysis.report.run_kinds import KINDS
from ppo_repro.analysis.report.run_scan import OneRun, read_run
from ppo_repro.analysis.terms import terms
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, folders_with
from ppo_repro.config.files import DPO
from ppo_repro.config.run import RunConfig
from ppo_repro.records import manifest, reader
from ppo_repro.records.grid import CELLS, GRID, axes_of, read_grid_table
from ppo_repro.records.label import read_label
from ppo_repro.records.settings import Setting, settings_of, setup_of

MAX_LINES = 8
FORKS = "The line of a fork begins at the iteration at which it left its origin."


def runs_below(folder: Path) -> list[Path]:
    """Return the runs below a folder, sorted. Raises UserError if there is none."""
    runs = sorted(path for path in folders_with(folder, MANIFEST) if (path / "records").is_dir())
    if not runs:
        raise UserError(f"{folder}: has no run; give the folder of a run, or one with runs in it")
    return runs


def runs_page(folder: Path, linked_from: Path | None) -> str:
    """Return the page about the complete runs of a folder; for a grid, the page also answers its question.

    The page is for the folder `linked_from` and links to each run; without `linked_from`, the page only names the runs.
    Raises UserError if no run is complete, or the runs are of several kinds.
    """
    states = {run_dir: manifest.load(run_dir).status for run_dir in runs_below(folder)}
    complete = [run_dir for run_dir, state in states.items() if state == "complete"]
    if not complete:
        raise UserError(f"{folder}: none of its {len(states)} runs is complete; finish them first")
    kinds = {manifest.load_head(run_dir).kind for run_dir in complete}
    if len(kinds) > 1:
        raise UserError(f"{folder}: has {' and '.join(sorted(kinds))} runs; give a folder with runs of one kind")
    unique, copies = (complete, []) if (folder / GRID).exists() else _without_copies(complete)
    settings = _settings(folder, [read_run(run_dir) for run_dir in unique])
    ordered = [(setting, run) for setting, group in settings.items() for run in group]
    runs, labels = [run for _, run in ordered], [setting.short for setting, _ in ordered]
    finals = _finals(runs, labels)
    measure = _measures(finals)[0]
    means = finals.groupby("point", sort=False)[measure].mean().sort_values(ascending=False, kind="stable")
    lines = [_line(s, group) for s, group in settings.items() if s.short in set(means.index[:MAX_LINES])]
    some = f"The {MAX_LINES} of {len(settings)} settings with the highest {measure}; the table has all."
    has_fork = any(run.facts.forked_at is not None for run in runs)
    notes = [some] * (len(settings) > MAX_LINES) + [FORKS] * has_fork
    cards = [
        *_result_cards(folder, runs, list(settings), finals, lines),
        Card("Are the runs on-policy?", _verdicts(runs)),
        *_left_out(folder, states, copies),
    ]
    sections = [
        _list_of_runs(folder, linked_from, runs, list(settings), finals),
        *curve_sections(runs[0].facts, lines, notes, _band(finals)),
        Section("terms", "Terms", blocks=[folded_table("Terms in words", terms())]),
    ]
    return page(f"{folder.resolve().name}: {len(runs)} runs", cards, sections)


def _measures(finals: pd.DataFrame) -> list[str]:
    return [str(name) for name in finals.columns if name not in ("point", "seed")]


def _result_cards(
    folder: Path, runs: Sequence[OneRun], settings: Sequence[Setting], finals: pd.DataFrame, lines: Sequence[Curve]
) -> list[Card]:
    """Return the cards with the results of each setting: a chart, a table and, for a grid, its question and answer."""
    measures, is_grid = _measures(finals), (folder / GRID).exists()
    measure = measures[0]
    drawn = [(line, KINDS[runs[0].facts.manifest.kind].measures.get(measure, "")) for line in lines]
    chart = curves.curve_chart(measure.capitalize(), measure, drawn) or main_chart(runs[0].facts, lines)
    equal = curves.equal_curves(drawn)
    on_lines = [Verdict("fact", f"{equal[0].upper()}{equal[1:]}.")] if equal else []
    on_lines += [Verdict("fact", FORKS)] * any(run.facts.forked_at is not None for run in runs)
    means = _means(finals, measures, {setting.short: setting.whole for setting in settings})
    sizes = finals.groupby("point").size()
    spread_of_seeds = SPREAD if sizes.min() >= curves.MANY_SEEDS else "mean (smallest to largest seed)"
    results = scrolled(table(means, spread_of_seeds if sizes.max() > 1 else "one run of each setting"))
    differences = _largest_possible(runs, measure), _largest_recorded(runs, measure)
    compared = answer_cards(folder, finals, measure, chart, *differences) if is_grid else []
    if compared:  # the card that has the chart
        compared[1] = replace(compared[1], verdicts=[*compared[1].verdicts, *on_lines])
    of_settings = () if is_grid else on_lines
    named = Card(f"{measure.capitalize()} of each setting", of_settings, [results], chart="" if is_grid else chart)
    return [*compared[:2], named, *compared[2:]]


def _list_of_runs(
    folder: Path, linked_from: Path | None, runs: Sequence[OneRun], settings: Sequence[Setting], finals: pd.DataFrame
) -> Section:
    links = [_link(run.facts.run_dir, folder, linked_from) for run in runs]
    results = {name: finals[name].round(3).tolist() for name in _measures(finals)}
    names, labels = [read_label(run.facts.run_dir).name for run in runs], finals["point"].tolist()
    # a setting may have the name of its runs
    named = {"name": names} if any(name not in ("", label) for name, label in zip(names, labels, strict=True)) else {}
    cells = pd.DataFrame({"setting": labels, "seed": finals["seed"], **named, **results, "run": links}, dtype=object)
    listed = [scrolled(table(cells, "Each run: a setting with a seed", limit=len(cells)), "words")]
    if any(setting.whole for setting in settings):
        wholes = [(setting.short, setting.whole) for setting in settings]
        listed.append(folded_table("All that the settings differ in", pd.DataFrame(wholes, columns=["setting", "is"])))
    return Section("runs", "Runs", blocks=listed)


def _without_copies(complete: Sequence[Path]) -> tuple[list[Path], list[tuple[Path, Path]]]:
    """Return one run per fingerprint, and each other run paired with the returned run of the same fingerprint."""
    first: dict[str, Path] = {}
    copies = []
    for run_dir in sorted(complete, key=lambda path: (len(path.parts), path)):  # the run, not its copy further down
        unique = first.setdefault(manifest.load_head(run_dir).fingerprint, run_dir)
        if unique != run_dir:
            copies.append((run_dir, unique))
    return list(first.values()), copies


def _left_out(folder: Path, states: Mapping[Path, str], copies: Sequence[tuple[Path, Path]]) -> list[Card]:
    """Return a card about the runs that are not in the page; [] if all runs are."""
    missing = [f"{run.relative_to(folder)} ({state})" for run, state in states.items() if state != "complete"]
    if (folder / CELLS).exists() and "state" in (cells := read_grid_table(folder / CELLS)):
        missing += incomplete_cells(cells[cells["run_dir"] == ""])  # a run that failed at its start has no folder
    verdicts = [Verdict("differs", f"Not complete and not in this page: {', '.join(missing)}.")] if missing else []
    for copy, unique in copies:
        text = f"{copy.relative_to(folder)} has the fingerprint of {unique.relative_to(folder)}: they count as one run."
        verdicts.append(Verdict("fact", text))
    return [Card("Which runs are left out?", verdicts)] if verdicts else []


def _settings(folder: Path, runs: Sequence[OneRun]) -> dict[Setting, list[OneRun]]:
    """Return the runs of each setting, named by the labels of the grid's axes, or by the differences of setups."""
    setting_of_run = settings_of([setup_of(run.facts.run_dir, run.facts.manifest) for run in runs])
    if (folder / CELLS).exists():
        cells = read_grid_table(folder / CELLS)
        axes = axes_of(cells)
        named = {str(row["run_dir"]): ", ".join(str(row[axis]) for axis in axes) for row in cells.to_dict("records")}
        paths = [str(run.facts.run_dir.relative_to(folder)) for run in runs]
        order = {label: k for k, label in enumerate(named.values())}
        if all(path in named for path in paths) and axes:
            pairs = sorted(zip(paths, runs, strict=True), key=lambda pair: order[named[pair[0]]])
            setting_of_run, runs = [Setting(named[path], "") for path, _ in pairs], [run for _, run in pairs]
    settings: dict[Setting, list[OneRun]] = {}
    for setting, run in zip(setting_of_run, runs, strict=True):
        settings.setdefault(setting, []).append(run)
    named_by = {setting: _renamed(setting, group) for setting, group in settings.items()}
    if len({setting.short for setting in named_by.values()}) == len(settings):
        settings = {named_by[setting]: group for setting, group in settings.items()}
    return settings


def _renamed(setting: Setting, group: Sequence[OneRun]) -> Setting:
    """Rename a setting after the label that all its runs have, or after the experiment if nothing differs."""
    names = {read_label(run.facts.run_dir).name for run in group}
    name = names.pop() if len(names) == 1 else ""
    return Setting(name or setting.short or group[0].facts.config.experiment, setting.whole)


def _line(setting: Setting, group: Sequence[OneRun]) -> Curve:
    config, kind = group[0].facts.config, KINDS[group[0].facts.manifest.kind]
    score = score_range(config) if isinstance(config, RunConfig) else ANY
    runs = tuple(_own_curves(run) for run in group)
    seeds = runs if 1 < len(runs) < curves.MANY_SEEDS else ()
    return Curve(setting.short, curves.over_seeds(runs, kind.metrics, score), seeds, setting.whole)


def _own_curves(run: OneRun) -> pd.DataFrame:
    """Return the curves of a run; a fork's begin where it left its origin, whose setting it had before."""
    forked = run.facts.forked_at
    return run.curves if forked is None else run.curves[run.curves["iteration"] >= forked]


def _band(finals: pd.DataFrame) -> str:
    """Say what lines and bands of the charts are."""
    sizes = finals.groupby("point").size()
    if sizes.max() == 1:
        return "one run of each setting"
    thin, band = "thin lines: each seed", "band: 95 % Student interval"
    few, many = bool((sizes < curves.MANY_SEEDS).any()), bool((sizes >= curves.MANY_SEEDS).any())
    return f"mean over the seeds of a setting; {', '.join([thin] * few + [band] * many)}"


def _finals(runs: Sequence[OneRun], labels: Sequence[str]) -> pd.DataFrame:
    """Return point, seed and the final results that all runs have, or else the last mean score or return."""
    kind, judged = KINDS[runs[0].facts.manifest.kind], all(run.facts.is_judged for run in runs)
    results = {
        name: [float(run.facts.manifest.final[key]) for run in runs]
        for name, key in kind.measures.items()
        if all(key in run.facts.manifest.final for run in runs) and (judged or key not in kind.accuracies)
    }
    if not results:
        name, column = kind.last
        results = {name: [float(run.iterations[column].iloc[-1]) for run in runs]}
    # scores that are 1 for right answers and 0 for others are accuracies
    first = next(iter(results))
    results = {name: values for name, values in results.items() if name == first or values != results[first]}
    return pd.DataFrame({"point": labels, "seed": [run.facts.config.seed for run in runs], **results})


def _largest_possible(runs: Sequence[OneRun], measure: str) -> float:
    """Return the largest difference of a measure that two runs can have; infinite without a limit."""
    kind = KINDS[runs[0].facts.manifest.kind]
    key = kind.measures.get(measure) or kind.last[1]
    if "score" not in key:
        low, high = next((m.possible for m in kind.metrics if m.key == key and m.possible), ANY)
        return high - low
    ends = [score_range(run.facts.config) for run in runs if isinstance(run.facts.config, RunConfig)]
    return max(high for _, high in ends) - min(low for low, _ in ends)


def _largest_recorded(runs: Sequence[OneRun], measure: str) -> float:
    """Return the largest difference of two scores of sampled responses; infinite for a measure that is no score."""
    kind = KINDS[runs[0].facts.manifest.kind]
    if "score" not in (kind.measures.get(measure) or kind.last[1]):
        return math.inf
    own = ((run.facts.run_dir, run.facts.manifest.own_iterations) for run in runs)
    scores = pd.concat(reader.read_sequences(of, iterations=some, columns=["scores"])["scores"] for of, some in own)
    return float(scores.max() - scores.min())


def _means(finals: pd.DataFrame, measures: Sequence[str], wholes: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per setting: setting, seeds if a setting has several, mean and spread of each measure."""
    has_seeds = len(finals) > finals["point"].nunique()
    rows = [
        {
            "setting": Html(element("span", escape(point), title=wholes[str(point)] or False)),
            **({"seeds": len(group)} if has_seeds else {}),
            **{name: spread(group[name]) for name in measures},
        }
        for point, group in finals.groupby("point", sort=False)
    ]
    return pd.DataFrame(rows, dtype=object)


def _link(run_dir: Path, folder: Path, linked_from: Path | None) -> Html:
    """Return a link to the run's page, or else to its folder; without `linked_from`, return only the path."""
    name = escape(run_dir.relative_to(folder))
    if linked_from is None:
        return Html(element("code", name))
    target = run_dir / "report.html" if (run_dir / "report.html").exists() else run_dir
    return Html(element("a", name, href=Path(os.path.relpath(target, linked_from)).as_posix()))


def _verdicts(runs: Sequence[OneRun]) -> list[Verdict]:
    if runs[0].facts.manifest.kind == DPO:
        return [Verdict("fact", "DPO trains on pairs that are given; nothing is sampled.")]
    equal = [run for run in runs if not run.unequal]
    verdicts = []
    if equal:
        tokens = sum(run.tokens for run in equal)
        text = f"Sampler and trainer agree on every bit in {len(equal)} of {len(runs)} runs ({tokens:,} tokens)."
        verdicts.append(Verdict("holds", text))
    if len(equal) < len(runs):
        unequal, tokens = (sum(n) for n in zip(*((r.unequal, r.tokens) for r in runs if r.unequal), strict=True))
        where = f"in the other {len(runs) - len(equal)}" if equal else f"in all {len(runs)} runs"
        text = f"{share(unequal, tokens)} of log-probs differ {where} ({unequal:,} of {tokens:,} tokens)."
        verdicts.append(Verdict("differs", text))
    return verdicts
