"""Make the page of the runs of a grid, or of any folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.grid_outcomes import incomplete_cells
from ppo_repro.analysis.html.markup import Html, element, escape, percentage, sentence, table
from ppo_repro.analysis.html.page import Card, Section, Statement, folded_table, page, scrolled
from ppo_repro.analysis.mean_text import HALF_WIDTH
from ppo_repro.analysis.report.data import grid_differences
from ppo_repro.analysis.report.data.folder_runs import FolderRuns, read_folder
from ppo_repro.analysis.report.data.metrics import ANY
from ppo_repro.analysis.report.data.run_curves import MANY_SEEDS, Curves, OneRun, over_seeds
from ppo_repro.analysis.report.sections import curve_figures, grid_answer
from ppo_repro.analysis.report.sections.curve_figures import PageLine, curve_sections, main_chart
from ppo_repro.analysis.report.sections.numbers_and_configuration import folded_terms
from ppo_repro.config.kinds import DPO
from ppo_repro.config.run import RunConfig
from ppo_repro.records.grid import CELLS, read_grid_table
from ppo_repro.records.label import read_label
from ppo_repro.records.settings import Setting

MAX_LINES = 8
ONE_RUN_EACH = "one run of each setting"
FORKS = "The line of a fork begins at the iteration at which it left its origin."


def runs_page(folder: Path, linked_from: Path | None) -> str:
    """Return the page about the complete runs of a folder; for a grid, the page also answers its question.

    The page is for the folder `linked_from` and links to each run; without `linked_from`, the page only names the runs.
    Raises UserError if no run is complete, or the runs are of several kinds.
    """
    runs = read_folder(folder)
    lines = _lines(runs)
    forks = [FORKS] if any(run.facts.forked_at is not None for run in runs.listed) else []
    cards = [
        *_result_cards(runs, lines, forks),
        Card("Are the runs on-policy?", _verdicts(runs.listed)),
        *_left_out(runs),
    ]
    sections = [
        _list_of_runs(runs, linked_from),
        *curve_sections(runs.listed[0].facts, lines, [*_fewer(runs), *forks], _band(runs.seeds)),
        Section("terms", "Terms", blocks=[folded_terms()]),
    ]
    return page(f"{folder.resolve().name}: {len(runs.listed)} runs", cards, sections)


def _result_cards(runs: FolderRuns, lines: Sequence[PageLine], forks: Sequence[str]) -> list[Card]:
    """Return the cards with the results of each setting: a chart, a table and, for a grid, its question and answer."""
    result = runs.results[0]
    title = result.title.capitalize()
    drawn = curve_figures.lines_of(lines, result.key) if result in runs.content.results else []
    chart = curve_figures.curve_chart(title, result.title, drawn) or main_chart(runs.listed[0].facts, lines)
    hidden = curve_figures.equal_lines(drawn)
    about_chart = [Statement("fact", text) for text in (*([sentence(hidden)] if hidden else []), *forks)]
    results = scrolled(table(_means(runs), _spread_in_words(runs.seeds)))
    if not runs.is_grid:
        return [Card(f"{title} of each setting", about_chart, [results], chart)]
    finals = runs.finals(result)
    differences = grid_differences.setting_differences(finals, grid_differences.limits_of(runs, result))
    effects = grid_differences.axis_effects(runs.folder, finals) if differences else []
    answer = grid_answer.answer_statements(finals, differences, result.title)
    return [
        grid_answer.question_card(runs.folder),
        Card("What is the answer?", [*answer, *about_chart], chart=chart),
        Card(f"{title} of each setting", blocks=[results]),
        *([grid_answer.differences_card(differences)] if differences else []),
        *([grid_answer.effects_card(effects, result.title)] if effects else []),
    ]


def _list_of_runs(runs: FolderRuns, linked_from: Path | None) -> Section:
    """Return the section with a table of all runs, and of all that their settings differ in."""
    links = [_link(run.facts.run_dir, runs.folder, linked_from) for run in runs.listed]
    finals = {result.title: runs.finals(result) for result in runs.results}
    results = {title: np.round([final.value for final in rows], 3).tolist() for title, rows in finals.items()}
    names = [read_label(run.facts.run_dir).name for run in runs.listed]
    labels = [setting.short for setting, group in runs.settings.items() for _ in group]
    # a setting may have the name of its runs
    named = {"name": names} if any(name not in ("", label) for name, label in zip(names, labels, strict=True)) else {}
    seeds = [run.facts.config.seed for run in runs.listed]
    cells = pd.DataFrame({"setting": labels, "seed": seeds, **named, **results, "run": links}, dtype=object)
    listed = [scrolled(table(cells, "Each run: a setting with a seed", limit=len(cells)), "words")]
    if any(setting.whole for setting in runs.settings):
        wholes = [(setting.short, setting.whole) for setting in runs.settings]
        listed.append(folded_table("All that the settings differ in", pd.DataFrame(wholes, columns=["setting", "is"])))
    return Section("runs", "Runs", blocks=listed)


def _left_out(runs: FolderRuns) -> list[Card]:
    """Return a card about the runs that are not in the page; [] if all runs are."""
    folder = runs.folder
    missing = [f"{run.relative_to(folder)} ({state})" for run, state in runs.incomplete.items()]
    if (folder / CELLS).exists() and "state" in (cells := read_grid_table(folder / CELLS)):
        missing += incomplete_cells(cells[cells["run_dir"] == ""])  # a run that failed at its start has no folder
    verdicts = [Statement("differs", f"Not complete and not in this page: {', '.join(missing)}.")] if missing else []
    for copy, unique in runs.copies.items():
        text = f"{copy.relative_to(folder)} has the fingerprint of {unique.relative_to(folder)}: they count as one run."
        verdicts.append(Statement("fact", text))
    return [Card("Which runs are left out?", verdicts)] if verdicts else []


def _lines(runs: FolderRuns) -> list[PageLine]:
    """Return the lines of the MAX_LINES settings with the highest mean of the first result."""
    # a setting with a lost result has no mean, and is after those with one
    means = pd.Series([np.mean(runs.values_of(setting, runs.results[0])) for setting in runs.settings])
    highest = set(means.sort_values(ascending=False, kind="stable").index[:MAX_LINES])
    return [_line(setting, group) for k, (setting, group) in enumerate(runs.settings.items()) if k in highest]


def _fewer(runs: FolderRuns) -> list[str]:
    """Return a sentence about the settings without a line; [] if each setting has one."""
    count, title = len(runs.settings), runs.results[0].title
    if count <= MAX_LINES:
        return []
    return [f"The {MAX_LINES} of {count} settings with the highest {title}; the table has all."]


def _line(setting: Setting, group: Sequence[OneRun]) -> PageLine:
    config, content = group[0].facts.config, group[0].facts.content
    score = config.reward.score_range if isinstance(config, RunConfig) else ANY
    runs = tuple(_curves_after_fork(run) for run in group)
    seeds = runs if 1 < len(runs) < MANY_SEEDS else ()
    return PageLine(setting.short, over_seeds(runs, content.metrics, score), seeds, setting.whole)


def _curves_after_fork(run: OneRun) -> Curves:
    """Return a run's curves; a fork's curves begin where it left its origin, whose setting it had before."""
    begin = run.facts.forked_at or 0
    return {metric: after for metric, curve in run.curves.items() if len((after := curve.since(begin)).iteration)}


def _band(seeds: Sequence[int]) -> str:
    """Say what lines and bands of the charts are, from the number of seeds of each setting."""
    if max(seeds) == 1:
        return ONE_RUN_EACH
    thin = ["thin lines: each seed"] if min(seeds) < MANY_SEEDS else []
    band = ["band: 95 % Student interval"] if max(seeds) >= MANY_SEEDS else []
    return f"mean over the seeds of a setting; {', '.join([*thin, *band])}"


def _spread_in_words(seeds: Sequence[int]) -> str:
    """Say what stands beside the means of `_means`, from the number of seeds of each setting."""
    if max(seeds) == 1:
        return ONE_RUN_EACH
    return HALF_WIDTH if min(seeds) >= MANY_SEEDS else "mean (smallest to largest seed)"


def _means(runs: FolderRuns) -> pd.DataFrame:
    """Return one row per setting: setting, seeds if a setting has several, mean and spread of each result."""
    rows = [
        {
            "setting": Html(element("span", escape(setting.short), title=setting.whole or False)),
            **({"seeds": len(group)} if max(runs.seeds) > 1 else {}),
            **{result.title: grid_answer.spread(runs.values_of(setting, result)) for result in runs.results},
        }
        for setting, group in runs.settings.items()
    ]
    return pd.DataFrame(rows, dtype=object)


def _link(run_dir: Path, folder: Path, linked_from: Path | None) -> Html:
    """Return a link to the run's page, or else to its folder; without `linked_from`, return only the path."""
    name = escape(run_dir.relative_to(folder))
    if linked_from is None:
        return Html(element("code", name))
    target = run_dir / "report.html" if (run_dir / "report.html").exists() else run_dir
    return Html(element("a", name, href=Path(os.path.relpath(target, linked_from)).as_posix()))


def _verdicts(runs: Sequence[OneRun]) -> list[Statement]:
    if runs[0].facts.manifest.kind == DPO:
        return [Statement("fact", "DPO trains on pairs that are given; nothing is sampled.")]
    agreements = [run.agreement for run in runs]
    equal = [counts.tokens for counts in agreements if not counts.unequal_old_rollout_logprobs]
    different = [counts for counts in agreements if counts.unequal_old_rollout_logprobs]
    verdicts = []
    if equal:
        text = f"Sampler and trainer agree on every bit in {len(equal)} of {len(runs)} runs ({sum(equal):,} tokens)."
        verdicts.append(Statement("holds", text))
    if different:
        unequal = sum(counts.unequal_old_rollout_logprobs for counts in different)
        tokens = sum(counts.tokens for counts in different)
        where = f"in the other {len(different)}" if equal else f"in all {len(runs)} runs"
        text = f"{percentage(unequal, tokens)} of log-probs differ {where} ({unequal:,} of {tokens:,} tokens)."
        verdicts.append(Statement("differs", text))
    return verdicts
