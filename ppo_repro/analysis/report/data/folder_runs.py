"""Read the runs of a grid, or of any folder, by setting, with the results that compare the settings.

A setting is the configuration and inputs of a run without its seed. In a grid it is a combination of the axes' labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.report.data.metrics import Metric, PageContent
from ppo_repro.analysis.report.data.run_curves import OneRun, read_run
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, folders_with
from ppo_repro.config.run import RunConfig
from ppo_repro.records import manifest, reader
from ppo_repro.records.changes import setup_of
from ppo_repro.records.grid import CELLS, GRID, axes_of, read_grid_table
from ppo_repro.records.label import read_label
from ppo_repro.records.settings import Setting, settings_of


@dataclass(frozen=True)
class FolderRuns:
    """Complete runs of one kind in a folder.

    `states` has the state of every run of the folder. `copies` pairs each run that is left out with the run that has
    the same fingerprint. `finals` has one row per run: point (the short name of its setting), seed and `results`. The
    first result compares the settings.
    """

    folder: Path
    states: Mapping[Path, str]
    copies: Sequence[tuple[Path, Path]]
    settings: Mapping[Setting, Sequence[OneRun]]
    results: Sequence[Metric]
    finals: pd.DataFrame

    @property
    def is_grid(self) -> bool:
        """Return whether the folder is a grid, which has a question."""
        return (self.folder / GRID).exists()

    @property
    def listed(self) -> list[OneRun]:
        """Return the runs in the order of `finals`."""
        return [run for group in self.settings.values() for run in group]

    @property
    def seeds(self) -> list[int]:
        """Return the number of runs of each setting."""
        return [len(group) for group in self.settings.values()]

    def values_of(self, setting: Setting, result: Metric) -> pd.Series:
        """Return a result of each run of a setting."""
        return self.finals.loc[self.finals["point"] == setting.short, result.key]

    @property
    def content(self) -> PageContent:
        """Return what the pages of these runs show."""
        return self.listed[0].facts.content


def read_folder(folder: Path) -> FolderRuns:
    """Read the complete runs of a folder. Raises UserError if there is none, or the runs are of several kinds."""
    states = {run_dir: manifest.load(run_dir).status for run_dir in _runs_below(folder)}
    complete = [run_dir for run_dir, state in states.items() if state == "complete"]
    if not complete:
        raise UserError(f"{folder}: none of its {len(states)} runs is complete; finish them first")
    kinds = {manifest.load_head(run_dir).kind for run_dir in complete}
    if len(kinds) > 1:
        raise UserError(f"{folder}: has {' and '.join(sorted(kinds))} runs; give a folder with runs of one kind")
    unique, copies = (complete, []) if (folder / GRID).exists() else _without_copies(complete)
    settings = _settings(folder, [read_run(run_dir) for run_dir in unique])
    results = _results([run for group in settings.values() for run in group])
    return FolderRuns(folder, states, copies, settings, list(results), _finals(settings, results))


def _runs_below(folder: Path) -> list[Path]:
    """Return the runs below a folder, sorted. Raises UserError if there is none."""
    runs = sorted(path for path in folders_with(folder, MANIFEST) if (path / "records").is_dir())
    if not runs:
        raise UserError(f"{folder}: has no run; give the folder of a run, or one with runs in it")
    return runs


def _without_copies(complete: Sequence[Path]) -> tuple[list[Path], list[tuple[Path, Path]]]:
    """Return one run per fingerprint, and each other run paired with the returned run of the same fingerprint."""
    first: dict[str, Path] = {}
    copies = []
    for run_dir in sorted(complete, key=lambda path: (len(path.parts), path)):  # the run, not its copy further down
        unique = first.setdefault(manifest.load_head(run_dir).fingerprint, run_dir)
        if unique != run_dir:
            copies.append((run_dir, unique))
    return list(first.values()), copies


def _settings(folder: Path, runs: Sequence[OneRun]) -> dict[Setting, list[OneRun]]:
    """Return the runs of each setting, named by `_renamed` unless two settings then have one name."""
    settings: dict[Setting, list[OneRun]] = {}
    for setting, run in _by_axes(folder, runs) or _by_differences(runs):
        settings.setdefault(setting, []).append(run)
    renamed = {_renamed(setting, group): group for setting, group in settings.items()}
    return renamed if len({setting.short for setting in renamed}) == len(settings) else settings


def _by_axes(folder: Path, runs: Sequence[OneRun]) -> list[tuple[Setting, OneRun]]:
    """Return each run with its labels of the grid's axes as setting, in the grid's order; [] if a run has no labels."""
    labels, paths = _labels(folder), [str(run.facts.run_dir.relative_to(folder)) for run in runs]
    if not all(path in labels for path in paths):
        return []
    order = {label: k for k, label in enumerate(labels.values())}
    pairs = sorted(zip(paths, runs, strict=True), key=lambda pair: order[labels[pair[0]]])
    return [(Setting(labels[path], ""), run) for path, run in pairs]


def _by_differences(runs: Sequence[OneRun]) -> list[tuple[Setting, OneRun]]:
    """Return each run with its values of the fields in which the setups of the runs differ."""
    settings = settings_of([setup_of(run.facts.run_dir, run.facts.manifest) for run in runs])
    return list(zip(settings, runs, strict=True))


def _labels(folder: Path) -> dict[str, str]:
    """Return the labels of a grid's axes for each of its runs, by the path in the folder; {} if it has no axes."""
    if not (folder / CELLS).exists():
        return {}
    cells = read_grid_table(folder / CELLS)
    axes = axes_of(cells)
    rows = cells.to_dict("records") if axes else []
    return {str(row["run_dir"]): ", ".join(str(row[axis]) for axis in axes) for row in rows}


def _renamed(setting: Setting, group: Sequence[OneRun]) -> Setting:
    """Rename a setting after the label that all its runs have, or after the experiment if nothing differs."""
    names = {read_label(run.facts.run_dir).name for run in group}
    name = names.pop() if len(names) == 1 else ""
    return Setting(name or setting.short or group[0].facts.config.experiment, setting.whole)


def _results(runs: Sequence[OneRun]) -> dict[Metric, list[float]]:
    """Return the values of the final results that all runs have, or else of the last mean score or return."""
    content, judged = runs[0].facts.content, all(run.facts.is_judged for run in runs)
    shared = [
        result
        for result in content.results
        if all(result.key in run.facts.manifest.final for run in runs) and (judged or not result.accuracy_of)
    ]
    if not shared:
        return {content.last_value: [float(run.iterations[content.last_value.key].iloc[-1]) for run in runs]}
    values = {result: [float(run.facts.manifest.final[result.key]) for run in runs] for result in shared}
    # scores that are 1 for right answers and 0 for others are accuracies
    return {result: of for result, of in values.items() if result == shared[0] or of != values[shared[0]]}


def _finals(settings: Mapping[Setting, Sequence[OneRun]], results: Mapping[Metric, Sequence[float]]) -> pd.DataFrame:
    """Return the frame `finals` of FolderRuns."""
    runs = [(setting.short, run.facts.config.seed) for setting, group in settings.items() for run in group]
    named = {result.key: values for result, values in results.items()}
    return pd.DataFrame(runs, columns=["point", "seed"]).assign(**named)


def largest_possible(runs: FolderRuns, result: Metric) -> float:
    """Return the largest difference of a result that two runs can have; infinite without a limit."""
    if result.possible is not None:
        low, high = result.possible
        return high - low
    ends = [run.facts.config.reward.score_range for run in runs.listed if isinstance(run.facts.config, RunConfig)]
    return max(high for _, high in ends) - min(low for low, _ in ends)


def largest_recorded(runs: FolderRuns, result: Metric) -> float:
    """Return the largest difference of two scores of sampled responses; infinite for a result that is no score."""
    if result.possible is not None:
        return math.inf
    scores = [
        reader.read_sequences(run.facts.run_dir, iterations=run.facts.manifest.own_iterations, columns=["scores"])
        for run in runs.listed
    ]
    every = pd.concat(scores)["scores"]
    return float(every.max() - every.min())
