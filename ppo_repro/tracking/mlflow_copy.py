"""Recorded runs and grids in MLflow: copied when they have ended, or while they run.

Everything is read from the records, so whatever MLflow missed can be copied later. A run never reads anything back from
MLflow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from ppo_repro.config.files import read_tree
from ppo_repro.config.kinds import load_config_of
from ppo_repro.records import accuracy, iteration_log, manifest, reader, times
from ppo_repro.records.config_file import ENVIRONMENT_NAME, check_config, read_note
from ppo_repro.records.manifest import Head
from ppo_repro.tracking.store import answering

METRICS_PER_CALL = 1000  # MLflow's limits for one log_batch
PARAMS_PER_CALL = 100
VALUE_CHARACTERS = 6000
KEYS = {"iteration", "epoch", "minibatch"}
FOLDER_TAG = "ppo_repro.folder"  # finds the earlier copy of a folder
NOTES = (ENVIRONMENT_NAME, accuracy.FILE_NAME, times.FILE_NAME)
ARTIFACTS = (manifest.FILE_NAME, iteration_log.FILE_NAME, "config.yaml", *NOTES, "report.html")
GRID_ARTIFACTS = ("grid.yaml", "cells.parquet", "results.parquet", "report.html")
POLL_SECONDS = 1.0
ENDED = {"complete": "FINISHED", "interrupted": "KILLED", "failed": "FAILED", "running": "KILLED"}


@dataclass(frozen=True)
class Copied:
    """What MLflow has of a run so far."""

    run_id: str
    iterations: int
    steps: int


def _leaves(prefix: str, value: object) -> list[Param]:
    if isinstance(value, dict):
        return [leaf for key, child in value.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else key, child)]
    return [Param(prefix, str(value)[:VALUE_CHARACTERS])]


def _metrics(table: pd.DataFrame, group: str, steps: Sequence[int], milliseconds: int) -> list[Metric]:
    """Every numeric column as `group/column`, without nulls."""
    metrics = []
    for column in table.columns.difference(list(KEYS)):
        if pd.api.types.is_numeric_dtype(table[column]):
            pairs = zip(table[column].tolist(), steps, strict=True)
            metrics += [Metric(f"{group}/{column}", v, milliseconds, s) for v, s in pairs if pd.notna(v)]
    return metrics


def _experiment(client: MlflowClient, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id if experiment else client.create_experiment(name))


def _begin(
    client: MlflowClient, experiment: str, folder: Path, params: Sequence[Param], tags: Mapping[str, str]
) -> str:
    """Create the MLflow run of a folder; an earlier copy is deleted."""
    quoted = str(folder.absolute()).replace("'", "\\'")
    for old in client.search_runs([experiment], f"tags.`{FOLDER_TAG}` = '{quoted}'", ViewType.ACTIVE_ONLY):
        client.delete_run(old.info.run_id)
    all_tags = {**tags, FOLDER_TAG: str(folder.absolute())}
    run_id = str(client.create_run(experiment, run_name=folder.name, tags=all_tags).info.run_id)
    for start in range(0, len(params), PARAMS_PER_CALL):
        client.log_batch(run_id, params=params[start : start + PARAMS_PER_CALL])
    return run_id


def _begin_run(client: MlflowClient, run_dir: Path, recorded: Head, parent: str | None) -> Copied:
    check_config(run_dir, recorded)
    config = load_config_of(recorded.kind, run_dir / "config.yaml")
    environment: dict[str, Any] = read_note(run_dir, recorded, ENVIRONMENT_NAME)
    tags = {name: str(environment[name]) for name in ("code_digest", "git_commit", "git_dirty", "python", "platform")}
    tags |= {"config_digest": recorded.config_digest, "numerics": str(environment["numerics_backend"])}
    tags |= {f"package.{name}": version for name, version in environment["packages"].items()}
    if parent is None:
        experiment = _experiment(client, config.experiment)
    else:
        tags[MLFLOW_PARENT_RUN_ID] = parent
        experiment = client.get_run(parent).info.experiment_id
    params = _leaves("", config.model_dump(mode="json"))
    return Copied(_begin(client, experiment, run_dir, params, tags), 0, 0)


def _catch_up(client: MlflowClient, run_dir: Path, recorded: Head, copied: Copied) -> Copied:
    """Log the iterations recorded since the last call, metrics in batches."""
    new = range(copied.iterations, recorded.num_iterations)
    if not new:
        return copied
    iterations = reader.read_iterations(run_dir, iterations=new, allow_incomplete=True)
    steps = reader.read_steps(run_dir, iterations=new, allow_incomplete=True)
    numbers = range(copied.steps, copied.steps + len(steps))
    written = manifest.table_path(run_dir, "iterations", new[-1]).stat().st_mtime
    metrics = _metrics(iterations, "iteration", list(new), int(written * 1000))
    metrics += _metrics(steps, "step", list(numbers), int(written * 1000))
    for start in range(0, len(metrics), METRICS_PER_CALL):
        client.log_batch(copied.run_id, metrics=metrics[start : start + METRICS_PER_CALL])
    return Copied(copied.run_id, recorded.num_iterations, copied.steps + len(steps))


def _end(client: MlflowClient, folder: Path, run_id: str, names: Sequence[str], status: str) -> None:
    for name in names:
        if (folder / name).exists():
            client.log_artifact(run_id, str(folder / name))
    client.set_terminated(run_id, status)


def _end_run(client: MlflowClient, run_dir: Path, recorded: Head, run_id: str) -> None:
    final = [Metric(f"final/{k}", v, 0, 0) for k, v in recorded.final.items() if not isinstance(v, str)]
    # the evaluation after the last iteration ends the curve of those before
    curve = ("eval_accuracy", "eval_score")
    ended = [(name, value) for name, value in recorded.final.items() if name in curve and not isinstance(value, str)]
    written = int((run_dir / manifest.FILE_NAME).stat().st_mtime * 1000)
    final += [Metric(f"iteration/{name}", value, written, recorded.num_iterations) for name, value in ended]
    measured = accuracy.read(run_dir, recorded)
    if measured is not None:
        final += [Metric(f"accuracy/{k}", v, 0, 0) for k, v in measured.numbers().items()]
    spent = times.read(run_dir, recorded)
    final += [] if spent is None else [Metric(f"seconds/{phase}", v, 0, 0) for phase, v in spent.seconds.items()]
    client.log_batch(run_id, metrics=final, tags=[RunTag("fingerprint", recorded.fingerprint)])
    _end(client, run_dir, run_id, ARTIFACTS, ENDED[recorded.status])


def track(run_dir: Path, uri: str, parent: str | None = None) -> str:
    """Copy a recorded run, complete or not: parameters, metrics, tags, artifacts; returns MLflow's run id.

    An earlier copy is replaced. UserError if the records are damaged or the tracking store does not answer.
    """
    recorded = reader.open_manifest(run_dir, allow_incomplete=True)
    with answering(uri) as client:
        copied = _catch_up(client, run_dir, recorded, _begin_run(client, run_dir, recorded, parent))
        _end_run(client, run_dir, recorded, copied.run_id)
    return copied.run_id


def track_grid(grid_dir: Path, uri: str) -> str:
    """Copy a grid: a parent run with its question, tables and report, and a child run for each cell that began.

    Returns the parent's run id; UserError as in `track`.
    """
    tree = read_tree(grid_dir / "grid.yaml")
    fields = {name: str(tree[name]) for name in ("question", "expectation", "base", "seeds", "read_with")}
    params = [*_leaves("", fields), *_leaves("axes", {axis: str(values) for axis, values in tree["axes"].items()})]
    cells = pd.read_parquet(grid_dir / "cells.parquet")
    with answering(uri) as client:
        parent = _begin(client, _experiment(client, grid_dir.name), grid_dir, params, {})
        for row in cells.to_dict("records"):
            if row["run_dir"]:
                child = track(grid_dir / str(row["run_dir"]), uri, parent)
                labels = {str(k): str(v) for k, v in row.items() if str(k).startswith("axis.")}
                client.log_batch(child, tags=[RunTag(k, v) for k, v in {"cell": str(row["cell"]), **labels}.items()])
                client.update_run(child, name=str(row["cell"]))
        complete = bool((cells["state"] == "complete").all())
        client.log_batch(parent, metrics=[Metric("cells", len(cells), 0, 0)])
        _end(client, grid_dir, parent, GRID_ARTIFACTS, "FINISHED" if complete else "FAILED")
    return parent


def follow(run_dir: Path, uri: str, is_over: Callable[[float], bool]) -> str:
    """Log a run while it works; returns MLflow's run id, empty if the run recorded nothing.

    `is_over(seconds)` waits at most that long and returns whether the run's process has ended. UserError where the
    store does not answer; `track` can copy the run later.
    """
    over = False
    while not (run_dir / manifest.FILE_NAME).exists():
        if over:
            return ""
        over = is_over(POLL_SECONDS)
    with answering(uri) as client:
        recorded = manifest.load_head(run_dir)
        copied = _begin_run(client, run_dir, recorded, None)
        while not over:
            over = is_over(POLL_SECONDS)  # asked before reading, so that the last iterations are read too
            recorded = manifest.load_head(run_dir)
            copied = _catch_up(client, run_dir, recorded, copied)
        _end_run(client, run_dir, recorded, copied.run_id)
    return copied.run_id
