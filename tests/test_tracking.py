"""A recorded run in a real MLflow store on SQLite."""

import warnings
from pathlib import Path

import pytest

from ppo_repro.cli import _run
from ppo_repro.records import manifest, reader


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)  # artifacts go beside the database
    return f"sqlite:///{tmp_path}/mlflow.db"


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
    assert [m.step for m in evaluated] == [0, 2], "a value that was not measured is not logged"
    names = {a.path for a in client.list_artifacts(found.info.run_id)}
    assert names == {"manifest.json", "config.yaml", "environment.json"}


def test_an_unreachable_store_is_one_line(exact_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code = _run(["track", str(exact_run), "--uri", f"sqlite:///{tmp_path}/file/mlflow.db"])
    err = capsys.readouterr().err
    assert code == 2
    assert err.splitlines()[-1].startswith("error: --uri") and "the records are unharmed" in err


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_track_copies_a_control_run_too(store: str, tmp_path: Path) -> None:
    from ppo_repro.control.run import run
    from ppo_repro.runs.progress import Silent
    from tests.control_for_tests import small_control

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
