"""In Gymnasium every first-minibatch ratio is 1, and neither the layout nor a kill changes a run."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from ppo_repro.analysis.agreement import run_agreement
from ppo_repro.base.errors import UserError
from ppo_repro.config.inputs import run_folder
from ppo_repro.control import loop
from ppo_repro.control.buffers import Rollout
from ppo_repro.records import manifest, reader
from ppo_repro.runs.resume import Resumed
from ppo_repro.stages.equal_bits import UnequalBits
from tests.support import synthetic_run
from tests.support.control import rerun, resume, run, small_control
from tests.support.row_dependent import row_dependent_linear
from tests.support.unequal import flipped

REAL = (
    "environment.id=Pendulum-v1", "environment.num_envs=3", "environment.steps_per_env=120", "ppo.minibatch_size=72",
    "ppo.value_clip_range=null", "ppo.iterations=2", "evaluation.episodes=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def real(folder: Path) -> Path:
    return run(small_control(*REAL), folder)[0]


@pytest.fixture(scope="module")
def native(folder: Path) -> Path:
    """The negative control: native numerics whose sums depend on the number of rows on every processor."""
    with row_dependent_linear():
        return run(small_control("numerics.mode=native"), folder)[0]


@pytest.fixture
def copy(control_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(control_run, tmp_path / "copy"))


@pytest.mark.parametrize("which", ["control_run", "real"])
def test_the_ratio_is_one_before_the_first_step_of_every_iteration(which: str, request: pytest.FixtureRequest) -> None:
    found = run_agreement(request.getfixturevalue(which))
    assert found.tokens >= 720
    assert found.first_minibatch_tokens >= 144
    assert found.unequal_old_rollout_logprobs == found.unequal_first_ratios == found.unequal_values == 0
    assert found.unequal_ratios > found.update_rows // 2, "the weights must have moved, or a constant would pass"


def test_native_numerics_fail_the_same_check(native: Path) -> None:
    found = run_agreement(native)
    assert found.unequal_old_rollout_logprobs > found.tokens // 50
    assert found.unequal_first_ratios > 0
    assert found.unequal_values > 0


@pytest.mark.parametrize("which", ["control_run", "real"])
def test_no_layout_changes_a_bit(which: str, request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(which)
    found = rerun(run_dir, ("layout.update_micro_batch=7",))
    assert found.difference is None, found.difference.describe()
    assert found.fingerprint == manifest.load(run_dir).fingerprint


@pytest.mark.parametrize("which", ["control_run", "real"])
def test_an_episode_can_be_played_again_from_its_seed_and_actions(which: str, request: pytest.FixtureRequest) -> None:
    """Gymnasium alone, without our environments, goes through the recorded observations and rewards."""
    run_dir = request.getfixturevalue(which)
    sequences, tokens = reader.read_sequences(run_dir), reader.read_tokens(run_dir)
    steps = tokens.merge(sequences, on=["iteration", "sequence"])
    env = gymnasium.make("CartPole-v1" if which == "control_run" else "Pendulum-v1")
    ended = 0
    for _, part in steps.groupby(["environment", "episode"]):
        part = part.sort_values(["iteration", "position"])
        observation, _ = env.reset(seed=int(part["seed"].iloc[0]))
        total = 0.0
        for row in part.itertuples():
            assert row.observations.tolist() == observation.tolist()
            action = int(row.actions[0]) if which == "control_run" else np.clip(row.actions, -2, 2)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            assert np.float32(reward) == np.float32(row.rewards)
        reason = part["end_reason"].iloc[-1]
        assert reason == ("terminated" if terminated else "truncated" if truncated else "cut")
        if reason != "cut":
            assert part["episode_return"].iloc[-1] == total
            ended += 1
    assert ended >= 3


def test_a_killed_run_is_completed_and_compared(copy: Path, control_run: Path) -> None:
    complete = manifest.load(control_run)
    synthetic_run.cut_back(copy, 2, "interrupted")
    with pytest.raises(UserError, match="the run is interrupted"):
        rerun(copy)
    assert resume(copy, ["layout.update_micro_batch=7"]) == Resumed(0, 2)
    resumed = manifest.load(copy)
    assert resumed == complete.model_copy(update={"notes": resumed.notes, "log_digest": resumed.log_digest})
    assert set(resumed.notes) == {"environment.json", "resumed-001.json", "times.json"}
    with pytest.raises(UserError, match="the run is finished"):
        resume(copy)


def test_a_layout_that_may_change_bits_is_refused(native: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(native, tmp_path / "native"))
    synthetic_run.cut_back(run_dir, 2, "interrupted")
    said = r"^--set layout\.update_micro_batch=7: the run has 0, and with numerics\.mode = native another layout may"
    with pytest.raises(UserError, match=said):
        resume(run_dir, ["layout.update_micro_batch=7"])


def test_an_action_whose_log_prob_is_another_one_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.roll_out

    def other(*arguments: Any) -> Rollout:
        rollout = real(*arguments)
        faulty = flipped(rollout.rollout_logprobs, 5) if arguments[-1] == 1 else rollout.rollout_logprobs
        return dataclasses.replace(rollout, rollout_logprobs=faulty)

    monkeypatch.setattr(loop, "roll_out", other)
    config = small_control("ppo.iterations=2")
    with pytest.raises(UnequalBits, match=r"iteration 1, response 0, token 5: rollout_logprobs .*, old_logprobs "):
        run(config, tmp_path)
    run_dir = run_folder(config, tmp_path)
    recorded = manifest.load(run_dir)
    assert recorded.status == "failed"
    assert len(recorded.iterations) == 1
    monkeypatch.undo()
    assert resume(run_dir) == Resumed(0, 1)
    without, _ = run(config, tmp_path / "without")
    assert manifest.load(run_dir).fingerprint == manifest.load(without).fingerprint
