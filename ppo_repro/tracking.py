"""Copy a recorded run into MLflow. Nothing here is ever read back; the records stay the truth.

The only importer of mlflow.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pandas as pd
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ppo_repro.config_yaml import load_config
from ppo_repro.control.config import load_control_config
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader

METRICS_PER_CALL = 1000  # MLflow's own limit of one log_batch
KEYS = {"iteration", "epoch", "minibatch"}


def _leaves(prefix: str, value: object) -> list[Param]:
    if isinstance(value, dict):
        return [leaf for key, child in value.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else key, child)]
    return [Param(prefix, str(value))]


def _metrics(table: pd.DataFrame, group: str, steps: pd.Series, milliseconds: int) -> list[Metric]:
    """Every numeric column as `group/column`; a null is left out."""
    found = []
    for column in table.columns.difference(list(KEYS)):
        if pd.api.types.is_numeric_dtype(table[column]):
            pairs = zip(table[column].tolist(), steps.tolist(), strict=True)
            found += [Metric(f"{group}/{column}", v, milliseconds, s) for v, s in pairs if pd.notna(v)]
    return found


def track(run_dir: Path, tracking_uri: str) -> str:
    """Log parameters, per-iteration and per-step metrics and the manifest of a recorded run; returns the run id.

    UserError if the run is incomplete or the tracking store does not answer.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    recorded = reader.open_manifest(run_dir)
    load = load_control_config if recorded.kind == "control" else load_config
    config = load(run_dir / "config.yaml")
    iterations, steps = reader.read_iterations(run_dir), reader.read_steps(run_dir)
    created = int((run_dir / manifest.FILE_NAME).stat().st_mtime * 1000)
    metrics = _metrics(iterations, "iteration", iterations["iteration"], created)
    metrics += _metrics(steps, "step", pd.Series(range(len(steps))), created)
    environment = json.loads((run_dir / "environment.json").read_text())
    tags = [
        RunTag("fingerprint", recorded.fingerprint),
        RunTag("config_digest", recorded.config_digest),
        RunTag("git_commit", environment["git_commit"]),
        RunTag("run_dir", str(run_dir)),
    ]
    try:
        client = MlflowClient(tracking_uri)
        found = client.get_experiment_by_name(config.experiment)
        experiment = found.experiment_id if found else client.create_experiment(config.experiment)
        run_id = str(client.create_run(experiment, run_name=run_dir.name).info.run_id)
        client.log_batch(run_id, params=_leaves("", config.model_dump(mode="json")), tags=tags)
        for start in range(0, len(metrics), METRICS_PER_CALL):
            client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_CALL])
        for name in (manifest.FILE_NAME, "config.yaml", "environment.json"):
            client.log_artifact(run_id, str(run_dir / name))
        client.set_terminated(run_id)
    except (MlflowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--uri {tracking_uri}: cannot be written ({reason}); the records are unharmed") from error
    return run_id
