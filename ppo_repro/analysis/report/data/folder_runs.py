"""Read the runs of a grid, or of any folder, by setting, with the results that compare the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from ppo_repro.analysis.report.data.metrics import Metric, PageContent
from ppo_repro.analysis.report.data.run_curves import OneRun, read_run
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, folders_with
from ppo_repro.records import manifest
from ppo_repro.records.changes import setup_of
from ppo_repro.records.grid import CELLS, GRID, axes_of, read_grid_table
from ppo_repro.records.label import read_label
from ppo_repro.records.manifest import Status
from ppo_repro.records.settings import Setting, settings_of


class Final(NamedTuple):
    """A result of one run."""

    point: str  # short name of the run's setting
    seed: int
    value: float


@dataclass(frozen=True)
class FolderRuns:
    """Complete runs of one kind in a folder.

    `incomplete` runs of the folder and `copies` are left out; a copy is beside the run that has the same fingerprint.
    The first result compares the settings.
    """

    folder: Path
    incomplete: Mapping[Path, Status]
    copies: Mapping[Path, Path]
    settings: Mapping[Setting, Sequence[OneRun]]
    results: Sequence[Metric]

    @property
    def is_grid(self) -> bool:
        """Return whether the folder is a grid, which has a question."""
        return (self.folder / GRID).exists()

    @property
    def listed(self) -> list[OneRun]:
        """Return the runs in the order of their settings."""
        return [run for group in self.settings.values() for run in group]

    @property
    def seeds(self) -> list[int]:
        """Return the number of runs of each setting."""
        return [len(group) for group in self.settings.values()]

    def finals(self, result: Metric) -> list[Final]:
        """Return a result of each run, in the order of `listed`."""
        return [
            Final(setting.short, run.facts.config.seed, value)
            for setting, group in self.settings.items()
            for run, value in zip(group, self.values_of(setting, result), strict=True)
        ]

    def values_of(self, setting: Setting, result: Metric) -> list[float]:
        """Return a result of each run of a setting."""
        if result == self.content.last_value:
            return [float(run.facts.own_iterations[result.key].iloc[-1]) for run in self.settings[setting]]
        return [float(run.facts.manifest.final[result.key]) for run in self.settings[setting]]

    @property
    def content(self) -> PageContent:
        """Return what the pages of these runs show."""
        return self.listed[0].facts.content


def read_folder(folder: Path) -> FolderRuns:
    """Read the complete runs of a folder. Raises UserError if there is none, or the runs are of several kinds."""
    heads = {run_dir: manifest.load(run_dir) for run_dir in _runs_below(folder)}
    incomplete = {run_dir: head.status for run_dir, head in heads.items() if head.status != "complete"}
    complete = [run_dir for run_dir in heads if run_dir not in incomplete]
    if not complete:
        raise UserError(f"{folder}: none of its {len(heads)} runs is complete; finish them first")
    kinds = {heads[run_dir].kind for run_dir in complete}
    if len(kinds) > 1:
        raise UserError(f"{folder}: has {' and '.join(sorted(kinds))} runs; give a folder with runs of one kind")
    copies: dict[Path, Path] = {}
    if not (folder / GRID).exists():
        complete.sort(key=lambda path: (len(path.parts), path))  # a run is before its copy further down
        copies = _copies({run_dir: heads[run_dir].fingerprint for run_dir in complete})
    settings = _settings(folder, [read_run(run_dir) for run_dir in complete if run_dir not in copies])
    facts = [run.facts for group in settings.values() for run in group]
    is_judged = all(run_facts.is_judged for run_facts in facts)
    results = shared_results(facts[0].content, [run_facts.manifest.final for run_facts in facts], is_judged)
    return FolderRuns(folder, incomplete, copies, settings, results)


def _runs_below(folder: Path) -> list[Path]:
    """Return the runs below a folder, sorted. Raises UserError if there is none."""
    runs = sorted(path for path in folders_with(folder, MANIFEST) if (path / "records").is_dir())
    if not runs:
        raise UserError(f"{folder}: has no run; give the folder of a run, or one with runs in it")
    return runs


def _copies(fingerprints: Mapping[Path, str]) -> dict[Path, Path]:
    """Return the runs that have the fingerprint of an earlier run, each with that run."""
    first: dict[str, Path] = {}
    earliest = {run_dir: first.setdefault(fingerprint, run_dir) for run_dir, fingerprint in fingerprints.items()}
    return {run_dir: earlier for run_dir, earlier in earliest.items() if earlier != run_dir}


def _settings(folder: Path, runs: Sequence[OneRun]) -> dict[Setting, list[OneRun]]:
    """Return the runs of each setting.

    A setting's text is its labels of the grid's axes or, if a run has no labels, its values of the fields in which the
    setups of the runs differ, without the seed.
    """
    settings: dict[Setting, list[OneRun]] = {}
    for setting, run in _by_axes(folder, runs) or _by_differences(runs):
        settings.setdefault(setting, []).append(run)
    labels = [[read_label(run.facts.run_dir).name for run in group] for group in settings.values()]
    experiments = [group[0].facts.config.experiment for group in settings.values()]
    names = setting_names([setting.short for setting in settings], labels, experiments)
    return {Setting(name, setting.whole): group for name, (setting, group) in zip(names, settings.items(), strict=True)}


def _by_differences(runs: Sequence[OneRun]) -> list[tuple[Setting, OneRun]]:
    """Return each run with its values of the fields in which the setups of the runs differ as setting."""
    settings = settings_of([setup_of(run.facts.run_dir, run.facts.manifest) for run in runs])
    return list(zip(settings, runs, strict=True))


def setting_names(texts: Sequence[str], labels: Sequence[Sequence[str]], experiments: Sequence[str]) -> list[str]:
    """Name each setting by the label that all its runs have, or else by its text, or else by its experiment.

    If two settings would have one name, the texts are the names. A run without a label has the label "".
    """
    shared = [group[0] if len(set(group)) == 1 else "" for group in labels]
    names = [label or text or experiment for label, text, experiment in zip(shared, texts, experiments, strict=True)]
    return names if len(set(names)) == len(names) else list(texts)


def _by_axes(folder: Path, runs: Sequence[OneRun]) -> list[tuple[Setting, OneRun]]:
    """Return each run with its labels of the grid's axes as setting, in the grid's order; [] if a run has no labels."""
    cells = read_grid_table(folder / CELLS) if (folder / CELLS).exists() else pd.DataFrame()
    axes, paths = axes_of(cells), [str(run.facts.run_dir.relative_to(folder)) for run in runs]
    rows = cells.to_dict("records") if axes else []
    labels = {str(row["run_dir"]): ", ".join(str(row[axis]) for axis in axes) for row in rows}
    if not all(path in labels for path in paths):
        return []
    order = {label: k for k, label in enumerate(labels.values())}
    pairs = sorted(zip(paths, runs, strict=True), key=lambda pair: order[labels[pair[0]]])
    return [(Setting(labels[path], ""), run) for path, run in pairs]


def shared_results(
    content: PageContent, finals: Sequence[Mapping[str, float | int | str]], is_judged: bool
) -> list[Metric]:
    """Choose the results that compare runs: final results that all runs have, or else the last mean score or return.

    An accuracy needs `is_judged`. A result that equals the first one in every run is left out.
    """
    shared = {
        result: [float(final[result.key]) for final in finals]
        for result in content.results
        if all(result.key in final for final in finals) and (is_judged or not result.accuracy_of)
    }
    first = next(iter(shared), content.last_value)
    # scores that are 1 for right answers and 0 for others are accuracies
    return [first, *(result for result, values in shared.items() if result != first and values != shared[first])]
