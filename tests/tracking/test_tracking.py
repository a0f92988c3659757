"""A recorded run in a real MLflow store on SQLite."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ppo_repro.commands.cli import _run
from ppo_repro.records import accuracy, manifest, reader, times
from tests.support import synthetic_run
from tests.support.cli import one_line
from tests.support.paths import TINY
from tests.support.ranks import free_port


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_track_copies_parameters_metrics_tags_and_artifacts(
    exact_run: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["track", str(exact_run), "--uri", store]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(store)
        experiment = client.get_experiment_by_name("small")
        (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id in capsys.readouterr().out and found.info.status == "FINISHED"
    assert found.data.tags["fingerprint"] == manifest.load(exact_run).fingerprint
    assert found.data.params["ppo.objective.clip_range"] == "0.2"
    iterations, steps = reader.read_iterations(exact_run), reader.read_steps(exact_run)
    history = client.get_metric_history(found.info.run_id, "iteration/reward_mean")
    assert [m.value for m in history] == iterations["reward_mean"].tolist()
    history = client.get_metric_history(found.info.run_id, "step/grad_norm")
    assert [(m.step, m.value) for m in history] == list(enumerate(steps["grad_norm"].tolist()))
    evaluated = client.get_metric_history(found.info.run_id, "iteration/eval_accuracy")
    assert [m.step for m in evaluated] == [0, 2, 3], "a value that was not measured is not logged"
    assert evaluated[-1].value == manifest.load(exact_run).final["eval_accuracy"]
    measured = accuracy.read(exact_run, manifest.load(exact_run))
    assert measured is not None and found.data.metrics["accuracy/ratio"] == measured.ratio
    assert {n for n in found.data.metrics if n.startswith("accuracy/")} == {f"accuracy/{n}" for n in measured.numbers()}
    names = {a.path for a in client.list_artifacts(found.info.run_id)}
    notes = {"environment.json", "accuracy.json", "times.json"}
    assert names == {"manifest.json", "iterations.jsonl", "config.yaml"} | notes
    spent = times.read(exact_run, manifest.load(exact_run))
    assert spent is not None and {"preparation", "other"} <= set(spent.seconds)
    assert all(found.data.metrics[f"seconds/{phase}"] == value for phase, value in spent.seconds.items())
    assert _run(["track", str(exact_run), "--uri", store]) == 0
    (again,) = client.search_runs([experiment.experiment_id])
    assert again.info.run_id != found.info.run_id, "a second copy takes the place of the first"
    assert again.data.metrics == found.data.metrics and again.data.params == found.data.params


def test_an_unreachable_store_is_one_line(exact_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code = _run(["track", str(exact_run), "--uri", f"sqlite:///{tmp_path}/file/mlflow.db"])
    err = capsys.readouterr().err
    assert code == 2
    assert err.splitlines()[-1].startswith("error: --uri") and "the records are not affected" in err


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_track_copies_a_control_run_too(store: str, tmp_path: Path) -> None:
    from ppo_repro.watcher import Silent
    from tests.support.control import run, small_control

    run_dir = run(small_control("ppo.iterations=2"), tmp_path, Silent())[0]
    assert _run(["track", str(run_dir), "--uri", store]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(store)
        (found,) = client.search_runs([client.get_experiment_by_name("small_control").experiment_id])
        history = client.get_metric_history(found.info.run_id, "iteration/episode_return_mean")
    assert found.data.params["environment.id"] == "CartPole-v1"
    assert [m.value for m in history] == reader.read_iterations(run_dir)["episode_return_mean"].tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_run_is_followed_while_it_works(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["run", str(TINY), "--out", str(tmp_path), "--track", store, "--json"]) == 0
    captured = capsys.readouterr()
    assert "tracking" not in captured.err
    run_dir = Path(json.loads(captured.out)["run_dir"])
    client = mlflow_client(store)
    (found,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.tags["fingerprint"] == manifest.load(run_dir).fingerprint
    history = client.get_metric_history(found.info.run_id, "step/policy_loss")
    assert [m.value for m in history] == reader.read_steps(run_dir)["policy_loss"].tolist()
    # what came piece by piece is what is copied in one go
    assert _run(["track", str(run_dir), "--uri", store]) == 0
    (again,) = client.search_runs([found.info.experiment_id])
    assert again.data.metrics == found.data.metrics and again.info.run_id != found.info.run_id


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_is_followed_is_logged_as_it_comes(exact_run: Path, store: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "growing"
    shutil.copytree(exact_run, run_dir)
    whole = manifest.load(run_dir)
    states = [0, 0, 1, 1, 3]  # iterations committed at each look

    def is_over(seconds: float) -> bool:
        seen.append(sum(len(client.get_metric_history(r, "iteration/tokens")) for r in runs()))
        then: tuple[int, manifest.Status] = (states.pop(0), "running") if states else (3, "interrupted")
        manifest.save(synthetic_run.head_at(whole, *then), run_dir)
        return not states

    def runs() -> list[str]:
        found = client.get_experiment_by_name("small")
        return [] if found is None else [r.info.run_id for r in client.search_runs([found.experiment_id])]

    client, seen = mlflow_client(store), list[int]()
    manifest.save(synthetic_run.head_at(whole, 0, "running"), run_dir)
    from ppo_repro.tracking.mlflow_copy import follow

    run_id = follow(run_dir, store, is_over)
    assert seen == [0, 0, 0, 1, 1], "nothing twice, nothing late"
    history = client.get_metric_history(run_id, "iteration/tokens")
    assert [(m.step, m.value) for m in history] == list(enumerate(reader.read_iterations(exact_run)["tokens"].tolist()))
    steps = client.get_metric_history(run_id, "step/policy_loss")
    assert [m.step for m in steps] == list(range(len(reader.read_steps(exact_run))))
    assert client.get_run(run_id).info.status == "KILLED", "it is over, and not complete"


@pytest.mark.slow
def test_a_server_that_is_down_costs_a_run_nothing(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert _run(["run", str(TINY), "--out", str(tmp_path), "--track", f"http://127.0.0.1:{free_port()}", "--json"]) == 0
    captured = capsys.readouterr()
    run_dir = Path(json.loads(captured.out)["run_dir"])
    (said,) = [line for line in captured.err.splitlines() if line.startswith("tracking failed")]
    assert f"ppo-repro track {run_dir} --uri http" in said
    assert manifest.load(run_dir).status == "complete" and len(reader.read_tokens(run_dir))
    assert _run(["track", str(run_dir), "--uri", store]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_grid_is_a_parent_with_its_cells(store: str, tmp_path: Path) -> None:
    tree = {"question": "q?", "expectation": "e.", "base": str(TINY), "axes": {"ppo.epochs": [1, 2]}, "seeds": [1]}
    (tmp_path / "g.yaml").write_text(json.dumps(tree))
    assert _run(["grid", str(tmp_path / "g.yaml"), "--out", str(tmp_path), "--workers", "2", "--track", store]) == 0
    client = mlflow_client(store)
    runs = client.search_runs([client.get_experiment_by_name("g").experiment_id])
    by_name = {run.info.run_name: run for run in runs}
    assert set(by_name) == {"g", "epochs=1,seed=1", "epochs=2,seed=1"}
    parent = by_name.pop("g")
    assert parent.data.params["question"] == "q?"
    names = {a.path for a in client.list_artifacts(parent.info.run_id)}
    assert names == {"grid.yaml", "cells.parquet", "results.parquet"}
    cells = pd.read_parquet(tmp_path / "g" / "cells.parquet").set_index("cell")["fingerprint"]
    for name, run in by_name.items():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id and run.info.status == "FINISHED"
        assert run.data.tags["fingerprint"] == cells[name] and run.data.tags["axis.ppo.epochs"] in "12"
    assert _run(["track", str(tmp_path / "g"), "--uri", store]) == 0
    assert len(client.search_runs([parent.info.experiment_id])) == 3, "copied again, nothing is there twice"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("", "must begin with one of http"),
        ("nonsense words", "must begin with one of http"),
        ("foo://user:secret@bar", "--uri 'foo://***@bar': must begin with one of http"),
        ("sqlite://", "keeps nothing; name a file"),
        ("http://[::1", "cannot be written (Invalid IPv6 URL)"),
        (
            "postgresql://user:secret@127.0.0.1/x",
            "--uri postgresql://***@127.0.0.1/x: cannot be written (No module named",
        ),
    ],
)
def test_a_uri_that_is_none_is_one_line(exact_run: Path, uri: str, said: str, capsys: Any) -> None:
    assert _run(["track", str(exact_run), "--uri", uri]) == 2
    err = capsys.readouterr().err
    assert said in one_line(err) and "secret" not in err


def test_a_file_that_is_no_database_is_one_line_and_left_alone(exact_run: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x.db").write_text("words\n" * 1000)
    assert _run(["track", str(exact_run), "--uri", f"sqlite:///{tmp_path}/x.db"]) == 2
    assert "moved away first" in capsys.readouterr().err and (tmp_path / "x.db").read_text() == "words\n" * 1000


@pytest.mark.slow
def test_a_database_appears_with_all_of_its_tables_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppo_repro.tracking import store

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "missing" / "x.db"
    with monkeypatch.context() as patched:
        patched.setattr(store.os, "link", killed)  # the last instant before it appears
        with pytest.raises(KeyboardInterrupt), store.answering(f"sqlite:///{path}"):
            pass
    assert not path.exists()
    with store.answering(f"sqlite:///{path}") as client:
        client.create_experiment("x")
    assert [entry.name for entry in path.parent.iterdir()] == ["x.db"]
