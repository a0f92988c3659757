"""Every definition of clipped by hand; agreement with the records of training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ppo_repro.analysis.clip_flags import Flags, column, flags_of_ratios, ratios_of, token_flags, value_flags
from ppo_repro.analysis.visits import load_iterations, policy_rows
from ppo_repro.records import reader
from tests.analysis.clip_rows import RULE, make_item, single
from tests.support.language import small_run

UP, DOWN, INSIDE = np.log(1.5), np.log(0.5), np.log(1.1)


def test_the_classes_by_hand() -> None:
    item = single([UP, DOWN, UP, DOWN, UP, INSIDE], [1.0, -1.0, -1.0, 1.0, 0.0, 1.0])
    assert Flags(*(flag.tolist() for flag in token_flags(item.rows, item.rule))) == Flags(
        outside=[True, True, True, True, True, False],
        clip_high=[True, False, False, False, False, False],
        clip_low=[False, True, False, False, False, False],
        wrong_high=[False, False, True, False, False, False],
        wrong_low=[False, False, False, True, False, False],
        outside_without_advantage=[False, False, False, False, True, False],
        clip_dual=[False] * 6,
        removed=[True, True, False, False, False, False],
    )


def test_the_dual_clip_by_hand() -> None:
    rule = replace(RULE, dual=3.0)
    flags = flags_of_ratios(np.array([2.9, 3.0, 3.1, 3.1]), np.array([-1.0, -1.0, -1.0, 1.0]), rule)
    assert flags.clip_dual.tolist() == [False, False, True, False]
    assert flags.wrong_high.tolist() == [True, True, True, False]
    assert flags.removed.tolist() == [False, False, True, True]


def test_the_value_flags_by_hand() -> None:
    old, new = np.array([0.0, 0.0, 0.0]), np.array([[0.5, 0.5, 0.1]])
    item = make_item([3], np.zeros((1, 3)), np.ones(3), values=(old, new, np.array([1.0, -1.0, -1.0])))
    flags = value_flags(item.rows, 0.2)
    assert flags.value_outside.tolist() == [True, True, False]
    # clipped to 0.2: farther from 1 than 0.5 is, nearer to -1
    assert flags.value_removed.tolist() == [True, False, False]
    assert not np.any(value_flags(item.rows, np.inf))
    # clipped to 0.25, as far from 0.5 as 0.75 is: the gradient stays
    even = make_item([1], np.zeros((1, 1)), np.ones(1), values=(old[:1], np.array([[0.75]]), np.array([0.5])))
    assert [flag.tolist() for flag in value_flags(even.rows, 0.25)] == [[True], [False]]


def assert_agrees_with_records(run_dir: Path) -> None:
    """Our flags of a recorded run against the flags and step metrics that training wrote."""
    steps = reader.read_steps(run_dir)
    seen = 0
    for item in load_iterations(run_dir):
        rows, rule = policy_rows(item), item.rule
        flags = token_flags(rows, rule)
        recorded = rows["clip_flag"].str.startswith("clip_")
        # float32 against float64: only a ratio within rounding of a bound may differ
        bounds = np.array([1.0 - rule.low, 1.0 + rule.high, rule.dual or np.inf])
        near = (np.abs(ratios_of(column(rows, "log_ratios"))[:, None] - bounds) < 1e-5).any(axis=1)
        assert (flags.removed == recorded)[~near].all()
        assert near.mean() < 0.01
        by_step = recorded.groupby([rows["epoch"], rows["minibatch"]]).mean()
        own = steps[(steps["iteration"] == item.iteration) & steps["clip_fraction"].notna()]
        np.testing.assert_array_equal(by_step.to_numpy(), own["clip_fraction"].to_numpy())
        with_value = item.rows[item.rows["new_values"].notna()]
        if len(with_value):
            # float32 against float64: a value within rounding of the bound or of equal distance may differ
            different = value_flags(with_value, item.value_reach).value_removed != with_value["value_clipped"]
            assert different.mean() < 0.002
        seen += len(rows)
    assert seen > 0


def test_flags_agree_with_the_recorded_run(native_run: Path) -> None:
    assert_agrees_with_records(native_run)


OTHER_RUNS = {
    "dual and asymmetric": (
        "ppo.objective={kind: clip, clip_range: 0.1, clip_range_high: 0.3, dual_clip: 1.4}",
        "ppo.learning_rate=1e-2",
    ),
    "adaptive, old anchor, scaled values": (
        "ppo.objective={kind: adaptive_clip, target_kl: 0.01}",
        "ppo.ratio_anchor=old",
        "value.normalize_returns=true",
    ),
    "early stop, more value epochs": ("ppo.early_stop_kl=0.003", "value.epochs=3"),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_flags_agree_under_every_kind_of_clip(name: str, tmp_path: Path) -> None:
    run_dir = small_run(tmp_path, "numerics.mode=native", "ppo.iterations=2", *OTHER_RUNS[name])
    assert_agrees_with_records(run_dir)
    if name.startswith("dual"):
        assert sum(token_flags(policy_rows(i), i.rule).clip_dual.sum() for i in load_iterations(run_dir)) > 0
