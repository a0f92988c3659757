"""Copy runs and grids to MLflow, during the run or later.

The copies are made from the records: a copy that failed can be made later. Nothing is read back from MLflow.
"""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from mlflow.entities import LifecycleStage, Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE
from sqlalchemy.exc import SQLAlchemyError

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST
from ppo_repro.base.output import masked
from ppo_repro.config.files import read_tree
from ppo_repro.records import manifest
from ppo_repro.records.folder import CONFIG_NAME, ENVIRONMENT_NAME, REPORT_NAME, load_any_recorded_config
from ppo_repro.records.grid import CELLS, GRID, RESULTS
from ppo_repro.records.label import read_label
from ppo_repro.records.manifest import Head
from ppo_repro.records.notes import end_time, read_note, start_time
from ppo_repro.tracking.following import ENVIRONMENT_FIELDS, IsOver, begun, follow, labels_of, write_page
from ppo_repro.tracking.scalars import Scalar, sentences

# MLflow's defaults retry for minutes; the user's environment wins
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
METRICS_PER_CALL, PARAMS_PER_CALL, VALUE_CHARACTERS = 1000, 100, 6000  # MLflow's limits
FOLDER_TAG = "ppo_repro.folder"  # finds the earlier copy of a folder
ENDED = {"complete": "FINISHED", "interrupted": "KILLED", "failed": "FAILED", "running": "KILLED"}


@dataclass(frozen=True)
class Place:
    """Address of a run in an MLflow store."""

    experiment_id: str
    run_id: str

    def lines(self, uri: str) -> list[str]:
        """Return the printed lines: the address of the copy, or its id and the command that serves its pages."""
        if uri.startswith(("http://", "https://")):
            # without the second parameter MLflow 3 takes runs for evaluations of prompts
            pages = f"{masked(uri).rstrip('/')}/#/experiments/{self.experiment_id}"
            return [f"MLflow      {pages}/runs/{self.run_id}?workflowType=machine_learning"]
        lines = [f"MLflow      run {self.run_id} of experiment {self.experiment_id}"]
        if uri.startswith("databricks"):
            return lines
        return [*lines, f"served by   mlflow ui --backend-store-uri {shlex.quote(masked(uri))}"]

    def fields(self, uri: str) -> dict[str, str]:
        """Return the fields for JSON."""
        return {"uri": masked(uri), "experiment_id": self.experiment_id, "run_id": self.run_id}


@contextmanager
def answering(uri: str) -> Iterator[MlflowClient]:
    """Yield a client of the store. Raises UserError, without a password, if the store does not answer."""
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        client = MlflowClient(uri)
        client.search_experiments(max_results=1)
    except Exception as error:  # of MLflow, SQLAlchemy, requests or a missing driver: no first contact
        raise _unwritable(uri, error) from error
    try:
        yield client
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise _unwritable(uri, error) from error


def _unwritable(uri: str, error: Exception) -> UserError:
    reason = masked(" ".join(str(error).split()))[:200]
    text = f"MLflow at {masked(uri)}: cannot be written ({reason}); the records are not affected"
    if uri.startswith("sqlite:"):
        text += "; a database that is damaged, or of another kind, has to be moved away first"
    return UserError(text)


def copy(folder: Path, uri: str, is_over: IsOver) -> tuple[list[str], dict[str, str]] | None:
    """Copy a run or a grid with its HTML page until it is over; None if nothing was recorded.

    An earlier copy is replaced. Returns the printed lines of the address, and its fields. Raises UserError if the
    records are damaged or the store does not answer.
    """
    still = begun(folder, is_over)
    if still is None:
        return None
    with answering(uri) as client:
        if (folder / CELLS).exists():
            place = _copy_grid(client, folder, still)
        else:
            copies = follow(folder, still, lambda run_dir, row: _RunCopy(client, run_dir))
            if not copies:
                return None
            place = copies[0].place
        with tempfile.TemporaryDirectory() as temporary:
            page = Path(temporary) / REPORT_NAME
            if write_page(folder, page):
                client.log_artifact(place.run_id, str(page))
    return place.lines(uri), place.fields(uri)


class _Copy:
    """New run in the store, which replaces an earlier copy of the folder."""

    def __init__(
        self,
        client: MlflowClient,
        experiment: str,
        folder: Path,
        name: str,
        params: dict[str, Any],
        tags: dict[str, str],
        started: float,
    ) -> None:
        existing = client.get_experiment_by_name(experiment)
        if existing is not None and existing.lifecycle_stage == LifecycleStage.DELETED:
            raise UserError(
                f"{experiment}: this experiment was deleted in MLflow; restore it with `mlflow experiments restore "
                f"--experiment-id {existing.experiment_id}`, for which MLFLOW_TRACKING_URI names the store, or remove "
                "it for good with `mlflow gc`"
            )
        # otherwise MLflow's pages take the runs for evaluations of prompts, with other tables
        kind = {"mlflow.experimentKind": "custom_model_development"}
        number = str(existing.experiment_id if existing else client.create_experiment(experiment, tags=kind))
        quoted = str(folder.absolute()).replace("'", "\\'")
        for old in client.search_runs([number], f"tags.`{FOLDER_TAG}` = '{quoted}'", ViewType.ACTIVE_ONLY):
            client.delete_run(old.info.run_id)
        tags = {**tags, FOLDER_TAG: str(folder.absolute())}
        self._client = client
        self.place = Place(number, str(client.create_run(number, _milliseconds(started), tags, name).info.run_id))
        leaves = _leaves("", params)
        for start in range(0, len(leaves), PARAMS_PER_CALL):
            client.log_batch(self.place.run_id, params=leaves[start : start + PARAMS_PER_CALL])

    def log(self, scalars: Sequence[Scalar]) -> None:
        metrics = [Metric(s.name, s.value, _milliseconds(s.moment), s.step) for s in scalars]
        for start in range(0, len(metrics), METRICS_PER_CALL):
            self._client.log_batch(self.place.run_id, metrics=metrics[start : start + METRICS_PER_CALL])

    def give_up(self) -> None:
        self._client.set_terminated(self.place.run_id, "FAILED")

    def close(self, tags: Mapping[str, str], files: Sequence[Path], status: str, moment: float) -> None:
        self._client.log_batch(self.place.run_id, tags=[RunTag(name, value) for name, value in tags.items()])
        for path in files:
            if path.exists():
                self._client.log_artifact(self.place.run_id, str(path))
        self._client.set_terminated(self.place.run_id, status, _milliseconds(moment))


class _RunCopy(_Copy):
    """Copy of one run in MLflow. A cell of a grid has another `experiment` and `name`."""

    def __init__(
        self,
        client: MlflowClient,
        run_dir: Path,
        experiment: str = "",
        name: str = "",
        tags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        recorded = manifest.load_head(run_dir)
        config = load_any_recorded_config(run_dir, recorded)
        environment = read_note(run_dir, recorded, ENVIRONMENT_NAME)
        about = {name: str(environment[name]) for name in ENVIRONMENT_FIELDS} | {"kind": recorded.kind}
        about |= {f"package.{name}": str(version) for name, version in environment["packages"].items()}
        params, started = config.model_dump(mode="json"), start_time(run_dir, recorded)
        name = read_label(run_dir).name or name or run_dir.name
        self.run_dir = run_dir
        super().__init__(client, experiment or config.experiment, run_dir, name, params, {**tags, **about}, started)

    def end(self, head: Head, last: Sequence[Scalar]) -> None:
        self.log(last)
        tags = {"fingerprint": head.fingerprint, "config_digest": head.config_digest}
        tags[MLFLOW_RUN_NOTE] = sentences(self.run_dir, head)
        files = [self.run_dir / name for name in (MANIFEST, manifest.LOG_NAME, CONFIG_NAME, *head.notes)]
        self.close(tags, files, ENDED[head.status], end_time(self.run_dir, head))


def _copy_grid(client: MlflowClient, grid_dir: Path, is_over: IsOver) -> Place:
    """Copy a grid as a parent run with the question and a child run per cell; return the parent's address."""
    tree = read_tree(grid_dir / GRID)
    params = {name: tree[name] for name in ("question", "expectation", "base", "seeds", "read_with", "axes")}
    started = (grid_dir / GRID).stat().st_mtime
    parent = _Copy(client, grid_dir.name, grid_dir, grid_dir.name, params, {"kind": "grid"}, started)

    def begin(run_dir: Path, row: dict[str, Any]) -> _RunCopy:
        tags = {**labels_of(row), "cell": str(row["cell"]), MLFLOW_PARENT_RUN_ID: parent.place.run_id}
        return _RunCopy(client, run_dir, grid_dir.name, str(row["cell"]), tags)

    copies, cells = follow(grid_dir, is_over, begin), pd.read_parquet(grid_dir / CELLS)
    ends = [end_time(copy.run_dir, manifest.load_head(copy.run_dir)) for copy in copies]
    status = "FINISHED" if (cells["state"] == "complete").all() else "FAILED"
    files = [grid_dir / name for name in (GRID, CELLS, RESULTS)]
    tags = {MLFLOW_RUN_NOTE: f"**{tree['question']}**\n\nExpected: {tree['expectation']}"}
    parent.close(tags, files, status, max(ends, default=started))
    return parent.place


def _leaves(prefix: str, value: object) -> list[Param]:
    if isinstance(value, dict):
        return [leaf for key, child in value.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else key, child)]
    return [Param(prefix, str(value)[:VALUE_CHARACTERS])]


def _milliseconds(moment: float) -> int:
    return round(moment * 1000)
