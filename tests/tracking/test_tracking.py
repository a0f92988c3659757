"""A recorded run in a real MLflow store on SQLite."""

import json
import shutil
import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ppo_repro.commands.cli import _run
from ppo_repro.records import accuracy, manifest, reader, times
from tests.support import synthetic_run
from tests.support.cli import one_line
from tests.support.paths import TINY, TINY_GRID
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_track_copies_parameters_metrics_tags_and_artifacts(
    deterministic_run: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["track", str(deterministic_run), "--uri", store]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(store)
        experiment = client.get_experiment_by_name("small")
        (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id in capsys.readouterr().out and found.info.status == "FINISHED"
    assert found.data.tags["fingerprint"] == manifest.load(deterministic_run).fingerprint
    assert found.data.params["ppo.objective.clip_range"] == "0.2"
    iterations, steps = reader.read_iterations(deterministic_run), reader.read_steps(deterministic_run)
    history = client.get_metric_history(found.info.run_id, "iteration/reward_mean")
    assert [m.value for m in history] == iterations["reward_mean"].tolist()
    history = client.get_metric_history(found.info.run_id, "step/grad_norm")
    assert [(m.step, m.value) for m in history] == list(enumerate(steps["grad_norm"].tolist()))
    evaluated = client.get_metric_history(found.info.run_id, "iteration/eval_accuracy")
    assert [m.step for m in evaluated] == [0, 2, 3], "a value that was not measured is not logged"
    assert evaluated[-1].value == manifest.load(deterministic_run).final["eval_accuracy"]
    measured = accuracy.read(deterministic_run, manifest.load(deterministic_run))
    assert measured is not None and found.data.metrics["accuracy/ratio"] == measured.ratio
    assert {n for n in found.data.metrics if n.startswith("accuracy/")} == {f"accuracy/{n}" for n in measured.numbers()}
    names = {a.path for a in client.list_artifacts(found.info.run_id)}
    notes = {"environment.json", "accuracy.json", "times.json"}
    assert names == {"manifest.json", "iterations.jsonl", "config.yaml", "report.html"} | notes
    spent = times.read(deterministic_run, manifest.load(deterministic_run))
    assert spent is not None and {"preparation", "other"} <= set(spent.seconds)
    assert all(found.data.metrics[f"seconds/{phase}"] == value for phase, value in spent.seconds.items())
    assert _run(["track", str(deterministic_run), "--uri", store]) == 0
    (again,) = client.search_runs([experiment.experiment_id])
    assert again.info.run_id != found.info.run_id, "a second copy takes the place of the first"
    assert again.data.metrics == found.data.metrics and again.data.params == found.data.params
    assert again.inputs.dataset_inputs == found.inputs.dataset_inputs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_copy_has_the_times_the_tables_and_the_verdicts_of_the_run(
    deterministic_run: Path, native_run: Path, store: str, tmp_path: Path
) -> None:
    from ppo_repro.tracking.mlflow_copy import track

    client = mlflow_client(store)
    ours, native = (client.get_run(track(run, store).run_id) for run in (deterministic_run, native_run))
    recorded, rows = manifest.load(deterministic_run), reader.read_iterations(deterministic_run)
    environment = json.loads((deterministic_run / "environment.json").read_text())
    started = datetime.fromisoformat(environment["started"]).timestamp()
    spent = times.read(deterministic_run, recorded)
    assert spent is not None and ours.info.start_time == round(started * 1000)
    assert ours.info.end_time == round((started + sum(spent.seconds.values())) * 1000)
    history = client.get_metric_history(ours.info.run_id, "iteration/tokens")
    assert [m.timestamp for m in history] == [round(moment * 1000) for moment in rows["ended_at"]]
    assert started < rows["ended_at"].min() and rows["ended_at"].is_monotonic_increasing
    assert history[-1].timestamp < ours.info.end_time and "iteration/ended_at" not in ours.data.metrics
    found = {d.dataset.name: d.dataset for d in ours.inputs.dataset_inputs}
    assert {"sequences", "tokens", "updates", "steps", "iterations", "evaluations"} <= set(found)
    assert json.loads(found["tokens"].profile)["num_rows"] == len(reader.read_tokens(deterministic_run))
    assert Path(json.loads(found["tokens"].source)["uri"]) == (deterministic_run / "records" / "tokens").absolute()
    columns = json.loads(found["tokens"].schema)["mlflow_colspec"]
    assert [c["name"] for c in columns] == list(reader.read_tokens(deterministic_run).columns)
    other = {d.dataset.name: d.dataset.digest for d in native.inputs.dataset_inputs}
    assert other["tokens"] != found["tokens"].digest, "another run has another digest"
    promises = {name: value for name, value in ours.data.tags.items() if name.startswith("verdict.")}
    assert set(promises.values()) == {"holds"} and len(promises) == 3
    assert native.data.tags["verdict.sampler_and_trainer_agree"] == "differs"
    assert "0 of" in ours.data.tags["mlflow.note.content"]


@pytest.mark.parametrize(
    ("uri", "address", "command"),
    [
        ("http://host:5000/", "http://host:5000/#/experiments/3/runs/ab", None),
        (
            "https://me:secret@host/mlflow",
            "https://host/mlflow/#/experiments/3/runs/ab",
            None,
        ),
        (
            "sqlite:////x y/m.db",
            "http://127.0.0.1:5000/#/experiments/3/runs/ab",
            "'sqlite:////x y/m.db'",
        ),
        (
            "postgresql://me:secret@h/x",
            "http://127.0.0.1:5000/#/experiments/3/runs/ab",
            "'postgresql://***@h/x'",
        ),
        ("databricks", "", None),
    ],
)
def test_the_link_leads_to_the_run_and_tells_no_password(uri: str, address: str, command: str | None) -> None:
    from ppo_repro.tracking.links import Place, fields, lines

    place = Place("3", "ab")
    said = "\n".join(lines(uri, place))
    assert "secret" not in said and "secret" not in json.dumps(fields(uri, place))
    address = f"{address}?workflowType=machine_learning" if address else ""
    assert fields(uri, place)["url"] == address and (address or "run ab of experiment 3") in said
    assert (f"mlflow ui --backend-store-uri {command}" in said) if command else ("mlflow ui" not in said)


def test_a_relative_database_is_named_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ppo_repro.tracking.links import Place, lines

    monkeypatch.chdir(tmp_path)
    assert f"--backend-store-uri sqlite:///{tmp_path}/m.db" in lines("sqlite:///m.db", Place("1", "a"))[1]


def records_of(path: Path) -> list[Any]:
    """The events of a TensorBoard file: length, checksum, bytes, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    content, found, at = path.read_bytes(), [], 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 8], "little")
        found.append(Event.FromString(content[at + 12 : at + 12 + size]))
        at += 16 + size
    return found


def test_event_files_have_what_was_recorded(deterministic_run: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("tensorboardX", reason="the extra [tensorboard] is not installed")
    assert _run(["track", str(deterministic_run), "--tensorboard", str(tmp_path / "tb")]) == 0
    assert f"tensorboard --logdir {tmp_path}/tb" in capsys.readouterr().out
    assert _run(["track", str(deterministic_run), "--tensorboard", str(tmp_path / "tb"), "--json"]) == 0
    assert not (Path.cwd() / "mlflow.db").exists(), "nothing goes into MLflow unasked"
    (path,) = (
        tmp_path / "tb" / "small" / deterministic_run.name
    ).iterdir()  # a second copy takes the place of the first
    rows, steps = reader.read_iterations(deterministic_run), reader.read_steps(deterministic_run)
    values = [(e.step, v.tag, v.simple_value, e.wall_time) for e in records_of(path) for v in e.summary.value]
    tokens = [(step, value, at) for step, tag, value, at in values if tag == "iteration/tokens"]
    assert tokens == [(k, float(n), at) for k, (n, at) in enumerate(zip(rows["tokens"], rows["ended_at"], strict=True))]
    losses = [value for _, tag, value, _ in values if tag == "step/policy_loss"]
    assert losses == pytest.approx(steps["policy_loss"].tolist(), rel=1e-6)  # float32 in the file


def test_without_the_library_event_files_are_refused(
    deterministic_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr("ppo_repro.tracking.finished.find_spec", lambda name: None)
    for command in (
        ["track", str(deterministic_run)],
        ["run", str(TINY), "--out", str(tmp_path)],
        ["grid", str(TINY_GRID), "--out", str(tmp_path)],
    ):
        assert _run([*command, "--tensorboard", str(tmp_path / "tb")]) == 2
        assert "install it with `pip install 'ppo_repro[tensorboard]'`" in one_line(capsys.readouterr().err)
    assert not list(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.slow
def test_an_unreachable_store_is_one_line(
    deterministic_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code = _run(["track", str(deterministic_run), "--uri", f"sqlite:///{tmp_path}/file/mlflow.db"])
    err = capsys.readouterr().err
    assert code == 2
    assert err.splitlines()[-1].startswith("error: --uri") and "the records are not affected" in err


@pytest.mark.slow
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
    assert json.loads(captured.out)["mlflow"]["run_id"] == found.info.run_id
    assert "report.html" in {a.path for a in client.list_artifacts(found.info.run_id)}
    assert found.info.status == "FINISHED"
    assert found.data.tags["fingerprint"] == manifest.load(run_dir).fingerprint
    history = client.get_metric_history(found.info.run_id, "step/policy_loss")
    assert [m.value for m in history] == reader.read_steps(run_dir)["policy_loss"].tolist()
    # what came piece by piece is what is copied in one go
    assert _run(["track", str(run_dir), "--uri", store]) == 0
    (again,) = client.search_runs([found.info.experiment_id])
    assert again.data.metrics == found.data.metrics and again.info.run_id != found.info.run_id


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_is_followed_is_logged_as_it_comes(deterministic_run: Path, store: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "growing"
    shutil.copytree(deterministic_run, run_dir)
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

    place = follow(run_dir, store, is_over)
    assert place is not None
    run_id = place.run_id
    assert seen == [0, 0, 0, 1, 1], "nothing twice, nothing late"
    history = client.get_metric_history(run_id, "iteration/tokens")
    assert [(m.step, m.value) for m in history] == list(
        enumerate(reader.read_iterations(deterministic_run)["tokens"].tolist())
    )
    steps = client.get_metric_history(run_id, "step/policy_loss")
    assert [m.step for m in steps] == list(range(len(reader.read_steps(deterministic_run))))
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
    assert (
        _run(
            [
                "grid",
                str(tmp_path / "g.yaml"),
                "--out",
                str(tmp_path),
                "--workers",
                "2",
                "--track",
                store,
                "--tensorboard",
                str(tmp_path / "tb"),
            ]
        )
        == 0
    )
    assert {path.parent.name for path in (tmp_path / "tb" / "g").glob("*/events.*")} == {
        "epochs=1,seed=1",
        "epochs=2,seed=1",
    }
    client = mlflow_client(store)
    runs = client.search_runs([client.get_experiment_by_name("g").experiment_id])
    by_name = {run.info.run_name: run for run in runs}
    assert set(by_name) == {"g", "epochs=1,seed=1", "epochs=2,seed=1"}
    parent = by_name.pop("g")
    assert parent.data.params["question"] == "q?"
    names = {a.path for a in client.list_artifacts(parent.info.run_id)}
    assert names == {"grid.yaml", "cells.parquet", "results.parquet", "report.html"}
    assert parent.info.start_time == min(run.info.start_time for run in by_name.values())
    assert parent.info.end_time == max(run.info.end_time for run in by_name.values())
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
def test_a_uri_that_is_none_is_one_line(deterministic_run: Path, uri: str, said: str, capsys: Any) -> None:
    assert _run(["track", str(deterministic_run), "--uri", uri]) == 2
    err = capsys.readouterr().err
    assert said in one_line(err) and "secret" not in err


def test_a_file_that_is_no_database_is_one_line_and_left_alone(
    deterministic_run: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "x.db").write_text("words\n" * 1000)
    assert _run(["track", str(deterministic_run), "--uri", f"sqlite:///{tmp_path}/x.db"]) == 2
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
