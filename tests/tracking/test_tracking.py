"""Recorded runs and grids in a real MLflow store on SQLite, and in TensorBoard's event files."""

from __future__ import annotations

import json
import shutil
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ppo_repro.records import manifest, reader
from ppo_repro.records.notes import read_accuracy, read_times
from ppo_repro.records.writer import RunWriter
from tests.grids.small_grids import written_grid
from tests.support.cli import Cli, one_line
from tests.support.synthetic_run import cut_back

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with all of MLflow's tables, which take seconds to make."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow_client(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)  # artifacts go beside the database
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def mlflow_client(store: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        return MlflowClient(store)


def runs_of(client: Any, experiment: str) -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


@slow
def test_a_copy_has_what_the_run_recorded(deterministic_run: Path, store: str, cli: Cli) -> None:
    said = cli.done("track", deterministic_run, "--uri", store)
    client, recorded = mlflow_client(store), manifest.load(deterministic_run)
    (found,) = runs_of(client, "small")
    run_id = found.info.run_id
    assert run_id in said
    assert found.info.status == "FINISHED"
    assert found.info.run_name == deterministic_run.name
    assert found.data.tags["fingerprint"] == recorded.fingerprint
    assert found.data.params["ppo.objective.clip_range"] == "0.2"
    iterations, steps = reader.read_iterations(deterministic_run), reader.read_steps(deterministic_run)
    history = client.get_metric_history(run_id, "iteration/reward_mean")
    assert [m.value for m in history] == iterations["reward_mean"].tolist()
    assert [m.timestamp for m in history] == [round(moment * 1000) for moment in iterations["ended_at"]]
    history = client.get_metric_history(run_id, "step/grad_norm")
    assert [(m.step, m.value) for m in history] == list(enumerate(steps["grad_norm"].tolist()))
    evaluated = client.get_metric_history(run_id, "iteration/eval_accuracy")
    assert [m.step for m in evaluated] == [0, 2, 3], "a value that was not measured is not logged"
    assert evaluated[-1].value == recorded.final["eval_accuracy"] == found.data.metrics["final/eval_accuracy"]
    measured, spent = read_accuracy(deterministic_run, recorded), read_times(deterministic_run, recorded)
    assert measured is not None
    assert found.data.metrics["accuracy/ratio"] == measured.ratio
    assert spent is not None
    assert {n: v for n, v in found.data.metrics.items() if n.startswith("seconds/")} == {
        f"seconds/{phase}": value for phase, value in spent.seconds.items()
    }
    names = {a.path for a in client.list_artifacts(run_id)}
    notes = {"environment.json", "accuracy.json", "times.json"}
    assert names == {"manifest.json", "iterations.jsonl", "config.yaml", "report.html"} | notes
    started = json.loads((deterministic_run / "environment.json").read_text())["started"]
    moment = datetime.fromisoformat(started).timestamp()
    assert found.info.start_time == round(moment * 1000)
    assert found.info.end_time == round((moment + sum(spent.seconds.values())) * 1000)
    assert "0 of" in found.data.tags["mlflow.note.content"]
    told = cli.json("track", deterministic_run, "--uri", store)["mlflow"]
    (again,) = runs_of(client, "small")
    assert told["run_id"] == again.info.run_id != run_id, "a second copy takes the place of the first"
    assert (again.data.metrics, again.data.params) == (found.data.metrics, found.data.params)


def test_a_copy_in_mlflow_has_every_note(deterministic_run: Path, store: str, tmp_path: Path, cli: Cli) -> None:
    run_dir = Path(shutil.copytree(deterministic_run, tmp_path / "run"))
    cut_back(run_dir, 2, "interrupted")
    RunWriter(run_dir).note("card.json", {"name": "H200", "capability": "9.0", "driver": "580", "cross_checked": 7})
    cli.done("track", run_dir, "--uri", store)
    client = mlflow_client(store)
    (copy,) = runs_of(client, "small")
    assert "card.json" in {artifact.path for artifact in client.list_artifacts(copy.info.run_id)}


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("http://host:5000/", "http://host:5000/#/experiments/3/runs/ab?workflowType=machine_learning"),
        ("https://me:secret@host/mlflow", "https://***@host/mlflow/#/experiments/3/runs/ab?"),
        ("sqlite:////x y/m.db", "mlflow ui --backend-store-uri 'sqlite:////x y/m.db'"),
        ("postgresql://me:secret@h/x", "mlflow ui --backend-store-uri 'postgresql://***@h/x'"),
        ("databricks", "run ab of experiment 3"),
    ],
)
def test_where_the_copy_is_tells_no_password(uri: str, said: str) -> None:
    from ppo_repro.tracking.mlflow_copy import Place  # MLflow takes seconds of every process that collects this file

    place = Place("3", "ab")
    lines = "\n".join(place.lines(uri))
    assert said in lines
    assert "secret" not in lines
    assert "secret" not in json.dumps(place.fields(uri))


def records_of(path: Path) -> list[Any]:
    """The events of a TensorBoard file: length, checksum, bytes, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    content, found, at = path.read_bytes(), [], 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 8], "little")
        found.append(Event.FromString(content[at + 12 : at + 12 + size]))
        at += 16 + size
    return found


def test_event_files_have_what_was_recorded(deterministic_run: Path, tmp_path: Path, cli: Cli) -> None:
    said = cli.done("track", deterministic_run, "--tensorboard", tmp_path / "tb")
    assert f"tensorboard --logdir {tmp_path}/tb" in said
    assert "pip install tensorboard" in said
    cli.done("track", deterministic_run, "--tensorboard", tmp_path / "tb", "--json")  # takes the place of the first
    assert not (Path.cwd() / "mlflow.db").exists(), "nothing goes into MLflow unasked"
    (path,) = (tmp_path / "tb" / "small" / deterministic_run.name).iterdir()
    rows, steps = reader.read_iterations(deterministic_run), reader.read_steps(deterministic_run)
    values = [(e.step, v.tag, v.simple_value, e.wall_time) for e in records_of(path) for v in e.summary.value]
    tokens = [(step, value, at) for step, tag, value, at in values if tag == "iteration/tokens"]
    assert tokens == [(k, float(n), at) for k, (n, at) in enumerate(zip(rows["tokens"], rows["ended_at"], strict=True))]
    losses = [value for _, tag, value, _ in values if tag == "step/policy_loss"]
    assert losses == pytest.approx(steps["policy_loss"].tolist(), rel=1e-6)  # float32 in the file


@slow
def test_a_grid_is_a_parent_with_its_settings_and_its_cells(store: str, tmp_path: Path, cli: Cli) -> None:
    path = written_grid(tmp_path, axes={"ppo.epochs": [1, 2]}, seeds=[1, 2])
    to = ("--track", store, "--tensorboard", tmp_path / "tb")
    code, out, err = cli("grid", path, "--out", tmp_path, "--workers", "2", *to)
    client = mlflow_client(store)
    assert code == 0
    assert "tracking" not in err
    cells = pd.read_parquet(tmp_path / "g" / "cells.parquet").set_index("cell")
    assert {path.parent.name for path in (tmp_path / "tb" / "g").glob("*/events.*")} == set(cells.index)
    by_name = {run.info.run_name: run for run in runs_of(client, "g")}
    assert set(by_name) == {"g", *cells.index}
    parent = by_name.pop("g")
    assert parent.info.run_id in out
    assert parent.data.params["question"] == "q?"
    names = {a.path for a in client.list_artifacts(parent.info.run_id)}
    assert names == {"grid.yaml", "cells.parquet", "results.parquet", "report.html"}
    assert parent.info.end_time == max(run.info.end_time for run in by_name.values())
    for name, run in by_name.items():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.status == "FINISHED"
        assert run.data.tags["fingerprint"] == cells["fingerprint"][name]
        assert run.data.tags["axis.ppo.epochs"] == cells["axis.ppo.epochs"][name]
    cli.done("track", tmp_path / "g", "--uri", store)
    assert len(runs_of(client, "g")) == 5, "copied again, nothing is there twice"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("", "must begin with one of http"),
        ("foo://user:secret@bar", "--track 'foo://***@bar': must begin with one of http"),
        ("wnadb", "FILE.py:FUNCTION; did you mean wandb?"),
        ("sqlite://", "keeps nothing; name a file"),
        ("sqlite:///{here}/x.db/mlflow.db", "cannot be written"),
        ("sqlite:///{here}/x.db", "moved away first"),
        ("http://[::1", "cannot be written (Invalid IPv6 URL)"),
        (
            "postgresql://user:secret@127.0.0.1/x",
            "MLflow at postgresql://***@127.0.0.1/x: cannot be written (No module",
        ),
    ],
)
def test_a_uri_that_cannot_be_used_is_one_line(
    deterministic_run: Path, uri: str, said: str, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "x.db").write_text("words\n" * 1000)
    code, _, err = cli("track", deterministic_run, "--uri", uri.format(here=tmp_path))
    assert code == 2
    assert said in one_line(err)
    assert "secret" not in err
    assert (tmp_path / "x.db").read_text() == "words\n" * 1000


@slow
def test_a_deleted_experiment_is_named_with_what_to_do(deterministic_run: Path, store: str, cli: Cli) -> None:
    client = mlflow_client(store)
    number = client.create_experiment("small")
    client.delete_experiment(number)
    said = cli.refusal("track", deterministic_run, "--uri", store)
    assert "small: this experiment was deleted in MLflow" in said
    assert f"`mlflow experiments restore --experiment-id {number}`" in said
    assert "moved away" not in said
    client.restore_experiment(number)
    cli.done("track", deterministic_run, "--uri", store)


@slow
def test_the_store_of_mlflow_s_own_variable_counts(
    deterministic_run: Path, store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Cli
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.replace("mlflow.db", "other.db"))
    (tmp_path / "mlflow.db").rename(tmp_path / "other.db")
    for option in ([], ["--uri", "mlflow"]):
        cli.done("track", deterministic_run, *option)
    assert len(runs_of(mlflow_client(store.replace("mlflow.db", "other.db")), "small")) == 1
    assert not (tmp_path / "mlflow.db").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    said = cli.refusal("track", deterministic_run)
    assert "MLFLOW_TRACKING_URI './mlruns': must begin with one of http" in said
