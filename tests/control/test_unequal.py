"""A control run ends where bits differ that deterministic numerics promise. Every fault is one flipped bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.checks.bisect import bisect
from ppo_repro.config.section import run_folder
from ppo_repro.control import loop
from ppo_repro.control.buffers import MinibatchUpdate, Rollout
from ppo_repro.errors import UserError
from ppo_repro.records import manifest
from ppo_repro.runs.resume import Resumed
from ppo_repro.runs.unequal import Response, first_unequal
from ppo_repro.runs.verify import verify
from ppo_repro.stages.agreement import UnequalBits
from ppo_repro.watcher import Silent
from tests.support.control import resume, run, small_control
from tests.support.unequal import flipped


def test_an_action_whose_log_prob_is_another_one_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.roll_out

    def other(*arguments: Any) -> Rollout:
        rollout = real(*arguments)
        faulty = flipped(rollout.rollout_logprobs, 5) if arguments[-1] == 1 else rollout.rollout_logprobs
        return dataclasses.replace(rollout, rollout_logprobs=faulty)

    monkeypatch.setattr(loop, "roll_out", other)
    config = small_control("ppo.iterations=2")
    with pytest.raises(UnequalBits, match=r"iteration 1, response 0, token 5: rollout_logprobs .*, old_logprobs "):
        run(config, tmp_path, Silent())
    run_dir = run_folder(config, tmp_path)
    recorded = manifest.load(run_dir)
    assert recorded.status == "failed" and len(recorded.iterations) == 1
    assert (verify(run_dir).model_folders, verify(run_dir).unfinished) == (1, ())
    assert first_unequal(run_dir) == Response(1, 0)
    with pytest.raises(UserError):  # there is no language model in it
        bisect(run_dir, (), tmp_path)
    monkeypatch.undo()
    assert resume(run_dir, Silent()) == Resumed(0, 1)
    without, _ = run(config, tmp_path / "without", Silent())
    assert manifest.load(run_dir).fingerprint == manifest.load(without).fingerprint


@pytest.mark.parametrize(("column", "says"), [("ratios", "ratios"), ("new_values", "values")])
def test_a_ratio_or_a_value_of_the_first_minibatch_ends_the_run(
    column: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.update

    def other(*arguments: Any) -> Iterator[MinibatchUpdate]:
        first, *others = real(*arguments)
        yield dataclasses.replace(first, **{column: flipped(getattr(first, column), 0)})
        yield from others

    monkeypatch.setattr(loop, "update", other)
    with pytest.raises(UnequalBits, match=rf"^iteration 0, response \d+, token \d+: {says} "):
        run(small_control(), tmp_path, Silent())
