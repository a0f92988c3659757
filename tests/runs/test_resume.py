"""A run that ended early goes on to what it would have been, to the bit; anything doubtful is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.files import only_writer
from ppo_repro.numerics.optimizer import OptimizerState
from ppo_repro.records import manifest
from ppo_repro.runs import checkpoint_format
from ppo_repro.runs.checkpoint_format import Checkpoint
from ppo_repro.runs.run import Resumed
from ppo_repro.watcher import Silent
from tests.support.cli import PROMPTS, Cli, folder_config, one_line, write_prompts
from tests.support.language import resume
from tests.support.resume import OTHER_LAYOUT, THREADS, Recorded, kill, launch_run, newest, record, wait_until
from tests.support.row_dependent import NOISE, row_dependent_linear
from tests.support.runs import small_config
from tests.support.synthetic_run import rewrite_cell


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Seven iterations, a checkpoint after every second, two kept."""
    return record(small_config("ppo.iterations=7", "checkpoints.every=2"), tmp_path_factory.mktemp("deterministic"))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    overrides = "ppo.iterations=7", "checkpoints.every=2", "numerics.mode=native"
    with row_dependent_linear(NOISE):
        return record(small_config(*overrides), tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Two iterations without checkpoints."""
    return record(small_config("ppo.iterations=2"), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("iterations", "start", "overrides"),
    [(2, 2, OTHER_LAYOUT), pytest.param(5, 4, THREADS, marks=pytest.mark.slow), (7, 6, [])],
)
def test_a_resumed_run_is_the_uninterrupted_run(
    exact: Recorded, tmp_path: Path, iterations: int, start: int, overrides: list[str]
) -> None:
    run_dir = exact.copy(iterations, tmp_path)
    assert manifest.load(run_dir).status == "running"
    records = {path: path.read_bytes() for path in (run_dir / "records").rglob("*.parquet")}
    evaluations = (iterations + 1) // 2  # before every second iteration
    assert len(records) == 5 * iterations + evaluations + 1  # the steps of the warm start
    assert resume(run_dir, Silent(), overrides) == Resumed(start, iterations)
    exact.require_same(run_dir)
    assert all(path.read_bytes() == content for path, content in records.items()), "a committed file was rewritten"
    noted = json.loads((run_dir / "resumed-001.json").read_text())
    assert (noted["iteration"], noted["overrides"]) == (start, overrides)


def test_checkpoints_change_no_result(exact: Recorded, deterministic_run: Path) -> None:
    without = manifest.load(deterministic_run).iterations
    assert len(without) == 3 and without == manifest.load(exact.whole).iterations[:3]
    assert {path.name for path in (deterministic_run / "checkpoints").iterdir()} == {
        "final",
        "final_state",
        "value_model",
    }


def test_a_run_without_checkpoints_starts_again_and_compares(plain: Recorded, tmp_path: Path) -> None:
    run_dir = plain.copy(1, tmp_path)
    assert resume(run_dir, Silent(), THREADS) == Resumed(0, 1)
    plain.require_same(run_dir)


@pytest.mark.usefixtures("row_noise")
@pytest.mark.slow
def test_native_numerics_resume_under_their_own_layout_only(native: Recorded, tmp_path: Path) -> None:
    run_dir = native.copy(3, tmp_path)
    resume(run_dir, Silent())
    native.require_same(run_dir)
    with pytest.raises(PromiseBroken, match="iteration 2"):
        resume(native.copy(3, tmp_path / "b"), Silent(), OTHER_LAYOUT)
    run_dir = native.copy(2, tmp_path / "c")
    resume(run_dir, Silent(), OTHER_LAYOUT)
    assert manifest.load(run_dir).fingerprint != manifest.load(native.whole).fingerprint


def test_only_the_newest_checkpoints_are_kept(exact: Recorded) -> None:
    kept = {n: [p.name for p in sorted((exact.parts / str(n) / "checkpoints").iterdir())] for n in (1, 3, 5, 7)}
    assert kept == {
        1: ["reference"],
        3: ["iteration-000002", "reference"],
        5: ["iteration-000002", "iteration-000004", "reference"],
        7: ["iteration-000004", "iteration-000006", "reference"],
    }


def times(factor: float, field: str, name: str) -> Callable[[OptimizerState], OptimizerState]:
    def change(state: OptimizerState) -> OptimizerState:
        tensors = getattr(state, field)
        return dataclasses.replace(state, **{field: {**tensors, name: tensors[name] * factor}})

    return change


def later(state: OptimizerState) -> OptimizerState:
    return dataclasses.replace(state, steps={name: steps + 1 for name, steps in state.steps.items()})


def altered(run_dir: Path, optimizer: str, change: Callable[[OptimizerState], OptimizerState]) -> None:
    """Change an optimizer's state in the newest checkpoint, all checksums right."""
    saved: Checkpoint = checkpoint_format.load(newest(run_dir))
    changed = dataclasses.replace(saved, **{optimizer: change(getattr(saved, optimizer))})
    checkpoint_format.save(changed, newest(run_dir))


ALTERATIONS = [
    ("policy_optimizer", later),
    ("value_optimizer", later),
    ("policy_optimizer", times(1.01, "first", "model.layers.0.mlp.up_proj.weight")),
    ("value_optimizer", times(1.01, "second", "head.weight")),
]


@pytest.mark.parametrize(("optimizer", "change"), ALTERATIONS)
def test_every_part_of_the_optimizer_state_is_needed(
    exact: Recorded, tmp_path: Path, optimizer: str, change: Callable[[OptimizerState], OptimizerState]
) -> None:
    run_dir = exact.copy(3, tmp_path)
    altered(run_dir, optimizer, lambda state: state)
    before = newest(run_dir) / "checkpoint.json"
    assert before.read_bytes() == (newest(exact.parts / "3") / "checkpoint.json").read_bytes()
    altered(run_dir, optimizer, change)
    with pytest.raises(PromiseBroken, match=r"table (updates|steps), iteration 2, column "):
        resume(run_dir, Silent())


def test_the_controls_are_needed(exact: Recorded, tmp_path: Path) -> None:
    run_dir = exact.copy(3, tmp_path)
    saved = checkpoint_format.load(newest(run_dir))
    other = dataclasses.replace(saved.coefficients, kl_coef=saved.coefficients.kl_coef * (1 + 2.0**-20))
    checkpoint_format.save(dataclasses.replace(saved, coefficients=other), newest(run_dir))
    with pytest.raises(PromiseBroken, match=r"table sequences, iteration 2, column kl_penalty_sum"):
        resume(run_dir, Silent())


def test_a_state_altered_beyond_the_records_is_another_fingerprint(exact: Recorded, tmp_path: Path) -> None:
    run_dir = exact.copy(6, tmp_path)
    altered(run_dir, *ALTERATIONS[0])
    resume(run_dir, Silent())
    found, expected = manifest.load(run_dir), manifest.load(exact.whole)
    assert found.iterations[:6] == expected.iterations[:6]
    assert found.fingerprint != expected.fingerprint


def test_a_record_that_differs_is_named_and_kept(cli: Cli, exact: Recorded, tmp_path: Path) -> None:
    run_dir = exact.copy(3, tmp_path)

    def raised(values: object) -> object:
        values[11] += 1.0  # type: ignore[index]
        return values

    rewrite_cell(run_dir, "tokens", 2, "advantages", raised)
    records = {path: path.read_bytes() for path in (run_dir / "records").rglob("*.parquet")}
    code, _, err = cli("resume", run_dir)
    assert code == 1
    assert "promise broken: table tokens, iteration 2, column advantages, row 11 (" in err
    assert manifest.load(run_dir).status == "failed" and len(manifest.load(run_dir).iterations) == 3
    assert {path: path.read_bytes() for path in (run_dir / "records").rglob("*.parquet")} == records


def test_a_damaged_checkpoint_is_refused_until_it_is_removed(cli: Cli, exact: Recorded, tmp_path: Path) -> None:
    run_dir = exact.copy(5, tmp_path)
    last, older = newest(run_dir), run_dir / "checkpoints" / "iteration-000002"
    for folder, otherwise in ((last, "resume from iteration 2"), (older, "start from the beginning")):
        path = folder / "value_model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        before = (run_dir / "manifest.json").read_bytes()
        code, _, err = cli("resume", run_dir)
        assert code == 2 and f"{path}: has another SHA-256" in one_line(err)
        assert one_line(err).endswith(f"remove {folder} to {otherwise}")
        assert (run_dir / "manifest.json").read_bytes() == before
        if folder == last:
            intact = exact.parts / "5" / "checkpoints" / "iteration-000002"
            shutil.rmtree(folder)
            resumed = Path(shutil.copytree(run_dir, tmp_path / "resumed"))
            assert resume(resumed, Silent()) == Resumed(2, 5) and intact.exists()
            exact.require_same(resumed)


def test_a_checkpoint_of_another_run_or_place_is_refused(exact: Recorded, native: Recorded, tmp_path: Path) -> None:
    run_dir = exact.copy(3, tmp_path)
    folder = newest(run_dir)
    folder.rename(folder.with_name("iteration-000003"))
    with pytest.raises(UserError, match="iteration-000003: holds iteration 2; the folder was renamed; remove "):
        resume(run_dir, Silent())
    shutil.rmtree(newest(run_dir))
    shutil.copytree(newest(native.parts / "3"), folder)
    with pytest.raises(UserError, match="follows other records than this run's"):
        resume(run_dir, Silent())
    shutil.rmtree(newest(run_dir))
    shutil.copytree(newest(exact.parts / "4"), run_dir / "checkpoints" / "iteration-000004")
    with pytest.raises(UserError, match="the run has 3 recorded iterations; the checkpoint is not of this run"):
        resume(run_dir, Silent())
    saved = checkpoint_format.load(newest(exact.parts / "3"))
    shutil.rmtree(newest(run_dir))
    checkpoint_format.save(dataclasses.replace(saved, origin=dataclasses.replace(saved.origin, task="00")), folder)
    with pytest.raises(UserError, match="prompts, answers or end tokens are not what they were"):
        resume(run_dir, Silent())


def test_a_changed_reference_is_refused(exact: Recorded, tmp_path: Path) -> None:
    run_dir = exact.copy(3, tmp_path)
    reference = run_dir / "checkpoints" / "reference"
    (reference / "added_tokens.json").write_text("{}")
    with pytest.raises(UserError, match=r"added_tokens.json: was not there .* remove .*checkpoints to start from the"):
        resume(run_dir, Silent())
    (reference / "added_tokens.json").unlink()
    for path in reference.iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        whole = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"reference/{path.name}: has another SHA-256"):
            resume(run_dir, Silent())
        path.unlink()
        with pytest.raises(UserError, match=f"reference/{path.name}: cannot be read"):
            resume(run_dir, Silent())
        path.write_bytes(whole)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capsys)


def test_what_cannot_be_resumed_is_one_line_and_changes_nothing(cli: Cli, exact: Recorded, tmp_path: Path) -> None:
    run_dir = exact.copy(3, tmp_path)
    shutil.copytree(exact.whole, tmp_path / "finished")
    shutil.copytree(run_dir, tmp_path / "edited")
    config = tmp_path / "edited" / "config.yaml"
    config.write_text(config.read_text().replace("iterations: 7", "iterations: 8"))
    (tmp_path / "empty").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    mistakes = [
        ([tmp_path / "finished"], "the run is finished; look at it with `ppo-repro show"),
        ([tmp_path / "edited"], "config.yaml: is not the configuration the run was started with"),
        ([tmp_path / "nowhere"], "no such folder"),
        ([tmp_path / "empty"], "holds no manifest.json"),
        (
            [run_dir, "--set", "ppo.objective.clip_range=0.1"],
            "may change fields of layout, rollout.engine and records only",
        ),
        ([run_dir, "--set", "layout.threads=none"], "layout.threads = 'none'"),
        (
            [run_dir, "--set", "rollout.engine={kind: sglang, numerics: stock}"],
            "rollout.engine: would sample with",
        ),
    ]
    for arguments, said in mistakes:
        code, out, err = cli("resume", *arguments)
        assert code == 2 and out == "" and said in one_line(err)
    with only_writer(run_dir):
        code, _, err = cli("resume", run_dir)
        assert code == 2 and "another process is writing this run" in one_line(err)
        assert cli("show", run_dir)[0] == 0, "a reader needs no lock"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
    assert not (tmp_path / "empty" / "lock").exists()


def test_resume_says_in_json_what_run_says(cli: Cli, exact: Recorded, tmp_path: Path) -> None:
    run_dir = exact.copy(7, tmp_path)
    code, out, err = cli("resume", run_dir, "--json", "--set", "layout.padding=none")
    summary = json.loads(out)
    assert code == 0 and summary["fingerprint"] == manifest.load(exact.whole).fingerprint
    assert (summary["iterations"], summary["status"]) == (7, "complete")
    assert "resumed after iteration 6; 1 recorded iterations came out identical" in err


def test_a_model_folder_is_not_needed_again_but_the_prompts_are(deterministic_run: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(deterministic_run / "checkpoints" / "final", tmp_path / "model"))
    prompts = write_prompts(tmp_path / "p.jsonl", *PROMPTS)
    path = folder_config(tmp_path / "c.yaml", model, prompts)
    recorded = record(load_config(path, ["checkpoints.every=1", "ppo.iterations=3"]), tmp_path / "a")
    run_dir = recorded.copy(1, tmp_path)
    shutil.rmtree(model)
    resume(run_dir, Silent(), OTHER_LAYOUT)
    recorded.require_same(run_dir)
    run_dir = recorded.copy(1, tmp_path / "b")
    text = prompts.read_text()
    prompts.write_text(text + "\n")
    with pytest.raises(UserError, match=r"p\.jsonl: changed since the run was recorded"):
        resume(run_dir, Silent())
    prompts.write_text(text)
    shutil.rmtree(newest(run_dir))
    with pytest.raises(UserError, match=r"model.*: cannot be read \(No such file"):
        resume(run_dir, Silent())
    assert manifest.load(run_dir).status == "running"


def test_a_full_disk_leaves_the_older_checkpoint_usable(exact: Recorded, tmp_path: Path) -> None:
    run_dir = exact.copy(5, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # tables are smaller, moments are larger
        with pytest.raises(UserError, match=r"iteration-000006: cannot be written \(File too large\)"):
            resume(run_dir, Silent())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert manifest.load(run_dir).status == "failed" and len(manifest.load(run_dir).iterations) == 6
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["iteration-000002", "iteration-000004", "reference"]
    assert resume(run_dir, Silent()) == Resumed(4, 6)
    exact.require_same(run_dir)


def test_an_interrupted_resume_keeps_the_folder(plain: Recorded, tmp_path: Path) -> None:
    class Interrupted(Silent):
        def warm_start(self, step: int, total: int, loss: float) -> None:
            raise KeyboardInterrupt

    run_dir = plain.copy(1, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        resume(run_dir, Interrupted())
    found = manifest.load(run_dir)
    assert (found.status, found.iterations) == ("interrupted", manifest.load(plain.whole).iterations[:1])


@pytest.mark.slow  # the copies above are what a kill leaves, and the lock is tried with `only_writer`
def test_a_killed_run_resumes_and_a_living_one_is_locked(exact: Recorded, tmp_path: Path) -> None:
    process, run_dir = launch_run(tmp_path, "ppo.iterations=7", "checkpoints.every=2")
    wait_until(process, (run_dir / "checkpoints" / "iteration-000002").exists)
    with pytest.raises(UserError, match="another process is writing this run"):
        resume(run_dir, Silent())
    time.sleep(random.Random(0).uniform(0, 0.5))
    kill(process)
    assert manifest.load(run_dir).status == "running"
    found = resume(run_dir, Silent(), OTHER_LAYOUT)
    assert 2 <= found.start <= found.recorded < 7
    exact.require_same(run_dir)
