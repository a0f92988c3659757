"""The sampler's log-prob is the trainer's, so the first ratio is exactly 1, and without learning every ratio is."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.analysis.agreement import run_agreement
from tests.support.language import small_run

NO_LEARNING = "ppo.learning_rate=0", "value.learning_rate=0"


def test_sampler_and_trainer_agree_on_every_bit(deterministic_run: Path) -> None:
    found = run_agreement(deterministic_run)
    assert found.tokens > 300
    assert found.first_minibatch_tokens > 80
    assert found.unequal_old_rollout_logprobs == 0
    assert found.unequal_first_ratios == 0
    assert found.unequal_values == 0
    assert found.unequal_ratios > 0, "the weights must have moved, or a constant would pass this test"


def test_native_numerics_fail_the_same_check(native_run: Path) -> None:
    found = run_agreement(native_run)
    assert found.unequal_old_rollout_logprobs > found.tokens // 20
    assert found.unequal_first_ratios > 0


def test_without_learning_every_ratio_of_every_epoch_is_one(tmp_path: Path) -> None:
    found = run_agreement(small_run(tmp_path, *NO_LEARNING, "ppo.epochs=3", "ppo.iterations=2"))
    assert found.update_rows == 3 * found.tokens
    assert found.unequal_ratios == 0
    assert found.unequal_update_values == 0


@pytest.mark.usefixtures("row_noise")
def test_without_learning_native_ratios_still_differ_from_one(tmp_path: Path) -> None:
    assert run_agreement(small_run(tmp_path, *NO_LEARNING, "numerics.mode=native")).unequal_ratios > 0
