"""Room on the disk: a run that could not keep its models is refused before its first iteration."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import load_config
from ppo_repro.runs import execute
from ppo_repro.runs.kept_checkpoints import require_room
from tests.support.cli import one_line, sets
from tests.support.language import resume, tiny_run
from tests.support.paths import ROOT, TINY
from tests.support.resume import record

HEADERS = 100_000  # bytes: more than the names of all tensors take in all files of a run
LORA = "lora={rank: 2, alpha: 4.0}"
MADE = "reward.terms=[{kind: trained_model, num_pairs: 8, minibatch_size: 4, learning_rate: 1e-3}]"
Usage = namedtuple("Usage", "free")


@pytest.mark.parametrize(
    "overrides",
    [
        ("checkpoints.every=1",),
        ("checkpoints.every=2", "checkpoints.keep=1", "ppo.iterations=3"),
        ("checkpoints.every=1", "checkpoints.keep=all", "ppo.iterations=4"),
        (LORA, "checkpoints.every=1"),
        (MADE,),
    ],
    ids=["two checkpoints", "one, and moments at the end", "all", "adapters", "a reward model"],
)
def test_the_bytes_that_a_run_keeps_are_known_before_its_first_iteration(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[int]()
    monkeypatch.setattr(execute, "require_room", lambda run_dir, to_keep: said.append(to_keep))
    wide = "model.hidden_size=64", "model.intermediate_size=256", "model.warm_start_steps=0"
    run_dir = tiny_run(tmp_path, *wide, *overrides)
    kept = bytes_of(run_dir)
    assert said[0] > 4 * HEADERS, "a model that was forgotten would show"
    assert said[0] <= kept < said[0] + HEADERS


def bytes_of(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in (run_dir / "checkpoints").rglob("*.safetensors"))


def test_a_resumed_run_needs_room_for_the_checkpoints_that_it_will_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = "model.hidden_size=64", "model.intermediate_size=256", "model.warm_start_steps=0"
    recorded = record(load_config(TINY, [*wide, "ppo.iterations=5", "checkpoints={every: 2, keep: all}"]), tmp_path)
    run_dir = recorded.copy(3, tmp_path)
    before = bytes_of(run_dir)
    resume(run_dir, ["checkpoints.every=1"])
    checkpoints = sorted((run_dir / "checkpoints").glob("iteration-*"))
    assert [path.stem for path in checkpoints] == [f"iteration-{number:06d}" for number in (2, 3, 4, 5)]
    needed = bytes_of(run_dir) - before
    assert needed > 3 * HEADERS
    shutil.rmtree(run_dir)
    run_dir = recorded.copy(3, tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(free=needed - HEADERS))
    with pytest.raises(UserError, match="not enough room"):
        resume(run_dir, ["checkpoints.every=1"])
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(free=needed))
    resume(run_dir, ["checkpoints.every=1"])


def test_what_an_earlier_process_wrote_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "iteration-000001.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(free=5_000))
    require_room(tmp_path, 6_000)
    with pytest.raises(UserError, match=r"need at least 5\.0 kB more, and 5\.0 kB are free; make room"):
        require_room(tmp_path, 6_001)


@pytest.mark.slow
def test_a_disk_that_is_too_small_is_one_line_and_no_folder(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    command = [sys.executable, "-m", "ppo_repro", "run", str(TINY), "--out", str(tmp_path)]
    wide = sets("model.hidden_size=512", "model.intermediate_size=1024", "model.warm_start_steps=0")
    script = 'mount -t tmpfs -o size=8m tmpfs "$0" && "$@"; code=$?; ls "$0"/tiny; exit $code'
    mounted = ["unshare", "-rm", "sh", "-c", script, str(tmp_path)]
    done = subprocess.run([*mounted, *command, *wide], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "not enough room: models and checkpoints need at least " in one_line(done.stderr)
    assert ", and 8." in one_line(done.stderr)
    assert "seed7" not in done.stdout
