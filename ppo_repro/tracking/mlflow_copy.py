"""Recorded runs and grids in MLflow: copied when they have ended, or while they run.

Everything is read from the records, so whatever MLflow missed can be copied later. A run never reads anything back from
MLflow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.entities import DatasetInput, Metric, Param, RunTag, ViewType
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE

from ppo_repro.config.files import read_tree
from ppo_repro.records import accuracy, iteration_log, manifest, reader, times
from ppo_repro.records.config_file import CONFIG_NAME, ENVIRONMENT_NAME, load_config_of, read_note
from ppo_repro.records.contents import REPORT_NAME
from ppo_repro.records.manifest import Head
from ppo_repro.tracking import datasets, findings, scalars
from ppo_repro.tracking.analysis_home import report_writer
from ppo_repro.tracking.links import Place
from ppo_repro.tracking.scalars import Scalar, Seen
from ppo_repro.tracking.store import answering

METRICS_PER_CALL = 1000  # MLflow's limits for one log_batch
PARAMS_PER_CALL = 100
VALUE_CHARACTERS = 6000
FOLDER_TAG = "ppo_repro.folder"  # finds the earlier copy of a folder
NOTES = (ENVIRONMENT_NAME, accuracy.FILE_NAME, times.FILE_NAME)
ARTIFACTS = (manifest.FILE_NAME, iteration_log.FILE_NAME, CONFIG_NAME, *NOTES)
GRID_ARTIFACTS = ("grid.yaml", "cells.parquet", "results.parquet")
POLL_SECONDS = 1.0
ENDED = {"complete": "FINISHED", "interrupted": "KILLED", "failed": "FAILED", "running": "KILLED"}


@dataclass(frozen=True)
class Copied:
    """What MLflow has of a run so far."""

    place: Place
    seen: Seen


def _leaves(prefix: str, value: object) -> list[Param]:
    if isinstance(value, dict):
        return [leaf for key, child in value.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else key, child)]
    return [Param(prefix, str(value)[:VALUE_CHARACTERS])]


def _milliseconds(moment: float) -> int:
    return round(moment * 1000)


def _experiment(client: MlflowClient, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    # otherwise MLflow's pages take the runs for evaluations of prompts, with other tables
    kind = {"mlflow.experimentKind": "custom_model_development"}
    return str(experiment.experiment_id if experiment else client.create_experiment(name, tags=kind))


def _begin(
    client: MlflowClient,
    experiment: str,
    folder: Path,
    params: Sequence[Param],
    tags: Mapping[str, str],
    started: float,
) -> Place:
    """Create the MLflow run of a folder; an earlier copy is deleted."""
    quoted = str(folder.absolute()).replace("'", "\\'")
    for old in client.search_runs([experiment], f"tags.`{FOLDER_TAG}` = '{quoted}'", ViewType.ACTIVE_ONLY):
        client.delete_run(old.info.run_id)
    all_tags = {**tags, FOLDER_TAG: str(folder.absolute())}
    created = client.create_run(experiment, _milliseconds(started), all_tags, folder.name)
    place = Place(experiment, str(created.info.run_id))
    for start in range(0, len(params), PARAMS_PER_CALL):
        client.log_batch(place.run_id, params=params[start : start + PARAMS_PER_CALL])
    return place


def _environment_tags(environment: Mapping[str, Any], config_digest: str) -> dict[str, str]:
    tags = {name: str(environment[name]) for name in ("code_digest", "git_commit", "git_dirty", "python", "platform")}
    tags |= {"config_digest": config_digest, "numerics": str(environment["numerics_mode"])}
    return tags | {f"package.{name}": version for name, version in environment["packages"].items()}


def _begin_run(client: MlflowClient, run_dir: Path, recorded: Head, parent: str | None) -> Copied:
    config = load_config_of(run_dir, recorded)
    tags = _environment_tags(read_note(run_dir, recorded, ENVIRONMENT_NAME), recorded.config_digest)
    tags["kind"] = recorded.kind
    if parent is None:
        experiment = _experiment(client, config.experiment)
    else:
        tags[MLFLOW_PARENT_RUN_ID] = parent
        experiment = client.get_run(parent).info.experiment_id
    params, started = _leaves("", config.model_dump(mode="json")), times.started(run_dir, recorded)
    return Copied(_begin(client, experiment, run_dir, params, tags, started), Seen())


def _log(client: MlflowClient, run_id: str, found: Sequence[Scalar]) -> None:
    metrics = [Metric(s.name, s.value, _milliseconds(s.moment), s.step) for s in found]
    for start in range(0, len(metrics), METRICS_PER_CALL):
        client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_CALL])


def _catch_up(client: MlflowClient, run_dir: Path, recorded: Head, copied: Copied) -> Copied:
    """Log the iterations recorded since the last call."""
    found, seen = scalars.new_scalars(run_dir, recorded, copied.seen)
    _log(client, copied.place.run_id, found)
    return Copied(copied.place, seen)


def _end(
    client: MlflowClient,
    run_id: str,
    tags: Mapping[str, str],
    tables: Sequence[DatasetInput],
    files: Sequence[Path],
) -> None:
    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
    if tables:
        client.log_inputs(run_id, tables)
    for path in files:
        if path.exists():
            client.log_artifact(run_id, str(path))


def _end_run(client: MlflowClient, run_dir: Path, recorded: Head, run_id: str) -> None:
    ended = times.ended(run_dir, recorded)
    _log(client, run_id, scalars.ending_scalars(run_dir, recorded, ended))
    tags = {"fingerprint": recorded.fingerprint, MLFLOW_RUN_NOTE: _note(findings.sentences(run_dir, recorded))}
    tags |= {f"verdict.{name}": found for name, found in findings.promises(run_dir, recorded).items()}
    tables = datasets.tables_of(run_dir, manifest.load(run_dir))
    _end(client, run_id, tags, tables, [run_dir / name for name in ARTIFACTS])
    client.set_terminated(run_id, ENDED[recorded.status], _milliseconds(ended))


def _note(sentences: Sequence[str]) -> str:
    """The description of a run on its page, in Markdown."""
    return "\n".join(f"* {sentence}" for sentence in sentences)


def track(run_dir: Path, uri: str, parent: str | None = None) -> Place:
    """Copy a recorded run, complete or not: parameters, metrics, tags, data sets, artifacts.

    An earlier copy is replaced. UserError if the records are damaged or the tracking store does not answer.
    """
    recorded = reader.open_manifest(run_dir, allow_incomplete=True)
    with answering(uri) as client:
        copied = _catch_up(client, run_dir, recorded, _begin_run(client, run_dir, recorded, parent))
        _end_run(client, run_dir, recorded, copied.place.run_id)
    return copied.place


def track_grid(grid_dir: Path, uri: str) -> Place:
    """Copy a grid: a parent run with its question and tables, and a child run for each cell that began.

    It lasts from the start of its first cell to the end of its last one. UserError as in `track`.
    """
    tree = read_tree(grid_dir / "grid.yaml")
    fields = {name: str(tree[name]) for name in ("question", "expectation", "base", "seeds", "read_with")}
    params = [*_leaves("", fields), *_leaves("axes", {axis: str(values) for axis, values in tree["axes"].items()})]
    cells = pd.read_parquet(grid_dir / "cells.parquet")
    began = [grid_dir / str(folder) for folder in cells["run_dir"] if folder]
    spans = [_span(run_dir) for run_dir in began] or [((grid_dir / "grid.yaml").stat().st_mtime,) * 2]
    with answering(uri) as client:
        experiment = _experiment(client, grid_dir.name)
        place = _begin(client, experiment, grid_dir, params, {"kind": "grid"}, min(first for first, _ in spans))
        for row in cells.to_dict("records"):
            if row["run_dir"]:
                child = track(grid_dir / str(row["run_dir"]), uri, place.run_id).run_id
                labels = {str(k): str(v) for k, v in row.items() if str(k).startswith("axis.")}
                client.log_batch(child, tags=[RunTag(k, v) for k, v in {"cell": str(row["cell"]), **labels}.items()])
                client.update_run(child, name=str(row["cell"]))
        complete, last = bool((cells["state"] == "complete").all()), max(end for _, end in spans)
        client.log_batch(place.run_id, metrics=[Metric("cells", len(cells), _milliseconds(last), 0)])
        note = {MLFLOW_RUN_NOTE: _note([fields["question"], f"expected: {fields['expectation']}"])}
        _end(client, place.run_id, note, (), [grid_dir / name for name in GRID_ARTIFACTS])
        client.set_terminated(place.run_id, "FINISHED" if complete else "FAILED", _milliseconds(last))
    return place


def _span(run_dir: Path) -> tuple[float, float]:
    recorded = reader.open_manifest(run_dir, allow_incomplete=True)
    return times.started(run_dir, recorded), times.ended(run_dir, recorded)


def add_report(folder: Path, uri: str, place: Place) -> None:
    """Write the page about a run or a grid and add it to the copy. UserError where there is nothing to report yet."""
    with tempfile.TemporaryDirectory() as temporary, answering(uri) as client:
        page, _ = report_writer()([folder], Path(temporary) / REPORT_NAME, None)
        client.log_artifact(place.run_id, str(page))


def follow(run_dir: Path, uri: str, is_over: Callable[[float], bool]) -> Place | None:
    """Log a run while it works; None if it recorded nothing.

    `is_over(seconds)` waits at most that long and returns whether the run's process has ended. UserError where the
    store does not answer; `track` can copy the run later.
    """
    over = False
    while not (run_dir / manifest.FILE_NAME).exists():
        if over:
            return None
        over = is_over(POLL_SECONDS)
    with answering(uri) as client:
        recorded = manifest.load_head(run_dir)
        copied = _begin_run(client, run_dir, recorded, None)
        while not over:
            over = is_over(POLL_SECONDS)  # asked before reading, so that the last iterations are read too
            recorded = manifest.load_head(run_dir)
            copied = _catch_up(client, run_dir, recorded, copied)
        _end_run(client, run_dir, recorded, copied.place.run_id)
    return copied.place
