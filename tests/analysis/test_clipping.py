"""The tables of the clip analysis: by hand, against definitions, and on recorded runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.clip_buckets import clip_bucket
from ppo_repro.analysis.clip_steps import clip_step, effective_samples, kl_estimates
from ppo_repro.analysis.clipping import clip_tables, early_stop
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from tests.analysis.clip_rows import RULE, make_item, single
from tests.support.cli import Cli
from tests.support.language import fork, tiny_run

UP = np.log(1.5)


def whole(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["subset"] == "all"].reset_index(drop=True)


def test_the_step_table_by_hand() -> None:
    # two tokens up to 1.5 and down to 0.5, both on the side that is clipped, one unmoved
    item = single([UP, np.log(0.5), 0.0], [1.0, -1.0, 2.0])
    table = clip_step(item)
    row = whole(table).iloc[0]
    assert (row["n_tokens"], row["n_nonfinite"]) == (3, 0)
    assert table["n_tokens"].tolist() == [3, 2, 1]
    assert row["removed"] == 2 / 3
    assert row["clip_high"] == row["clip_low"] == 1 / 3
    assert (row["ratio_mean"], row["ratio_max"], row["ratio_min"]) == pytest.approx((1.0, 1.5, 0.5))
    assert row["beyond_twice"] == 2 / 3
    # masses |r A| = 1.5, 0.5, 2
    assert row["removed_mass"] == pytest.approx(0.5)
    # with the recorded weights 0.5, 2, 1 and 3, 1, 1 times these masses: 2.25, 1, 2
    weighted = replace(item, rows=item.rows.assign(loss_weights=[0.5, 2.0, 1.0], importance_weights=[3.0, 1.0, 1.0]))
    assert whole(clip_step(weighted)).iloc[0]["removed_mass"] == pytest.approx(3.25 / 5.25)
    assert row["k1"] == pytest.approx(-np.log(0.75) / 3)
    assert row["k3"] == pytest.approx(-np.log(0.75) / 3)  # the ratios' mean is 1
    assert (row["ess_frac"], row["clip_floor"]) == (pytest.approx(9 / (3 * 3.5)), 0)
    # x^2 / 2; in float32 exp(x) - 1 - x would be noise
    assert kl_estimates(np.full(9, 1e-7)).k3 == pytest.approx(5e-15, rel=1e-6)
    assert effective_samples(np.array([0.0, 800.0])) == pytest.approx(0.5)
    odd = whole(clip_step(single([np.inf, np.nan, 0.0, 0.1], [1.0, 1.0, 1.0, 1.0]))).iloc[0]
    assert odd["n_nonfinite"] == 2
    assert np.isnan(odd["ratio_mean"])
    assert np.isnan(odd["k1"])
    assert odd["clip_high"] == 0.25


def test_the_floor_is_what_the_mismatch_alone_clips() -> None:
    rule = replace(RULE, anchor="rollout")
    delta = np.array([0.3, -0.3, 0.3, 0.0])
    # the ratio to the rollout is exp(delta) before any step: 1.35 and 0.74
    item = make_item([4], delta[None], np.array([1.0, -1.0, -1.0, 1.0]), rule, delta=delta)
    row = whole(clip_step(item)).iloc[0]
    assert row["outside"] == 0.75
    assert row["clip_floor"] == row["removed"] == 0.5
    with_old = replace(item, rule=RULE, rows=item.rows.assign(anchor_logprobs=item.rows["old_logprobs"]))
    assert whole(clip_step(with_old)).iloc[0]["clip_floor"] == 0.0


def test_buckets_by_hand() -> None:
    old = np.log([0.95, 0.95, 0.2, 1.0])
    item = make_item([4], np.array([[0.0, 0.0, 1.0, 1.0]]), np.array([1.0, 1.0, 1.0, -1.0]), old_logprobs=old)
    buckets = clip_bucket(item).query("kind == 'prob'").set_index(["subset", "lo"])
    assert buckets["n_tokens"].to_dict() == {
        ("all", 0.1): 1, ("all", 0.9): 2, ("all", 0.99): 1,
        ("adv_pos", 0.1): 1, ("adv_pos", 0.9): 2, ("adv_neg", 0.99): 1,
    }  # fmt: skip
    assert buckets["removed"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert clip_bucket(item).query("kind == 'position' and subset == 'all'")["hi"].tolist() == [1.0, 2.0, 4.0]
    item.rows.loc[0, "entropies"] = np.nan  # in no bucket, so that no bucket counts it
    assert clip_bucket(item).query("kind == 'entropy' and subset == 'all'")["n_tokens"].sum() == 3


def test_tables_of_a_run_agree_with_what_training_recorded(native_run: Path) -> None:
    tables, steps = clip_tables(native_run), reader.read_steps(native_run)
    by_step = whole(tables.by_step)
    assert by_step["n_tokens"].tolist() == steps["tokens"].tolist()
    # recorded from float32 differences of log-probs, and for |x| > 1 from a float32 exponential
    np.testing.assert_allclose(by_step["k3"], steps["approx_kl"], rtol=1e-5, atol=1e-12)
    # float32 against float64: a ratio within rounding of a bound, a value at equal distance from the return
    assert (np.abs(by_step["removed"] - steps["clip_fraction"]) * by_step["n_tokens"]).sum() <= 2
    assert (np.abs(by_step["value_removed"] - steps["value_clip_fraction"]) * by_step["n_value_tokens"]).sum() <= 2
    assert set(clip_tables(native_run, iterations=[1], band=(0.1, 0.1)).by_step["iteration"]) == {1}


def test_a_lean_run_has_no_surrogate_mass(tmp_path: Path, cli: Cli) -> None:
    lean, full = (
        tiny_run(tmp_path / level, "ppo.iterations=1", f"records.level={level}") for level in ("lean", "full")
    )
    tables = [clip_tables(run_dir) for run_dir in (lean, full)]
    assert [table.by_step["removed_mass"].notna().any() for table in tables] == [False, True]
    lines = [cli.done("analyse", "clipping", run_dir).splitlines() for run_dir in (lean, full)]
    assert [line for line in lines[1] if line not in lines[0]] == [lines[1][3]]
    assert "of the surrogate mass" in lines[1][3]


def test_an_early_stop_by_hand() -> None:
    step = {"subset": "all", "n_tokens": 5, "iteration": [0, 0, 0, 1, 1], "step": [0, 1, 2, 3, 4]}
    kl = {"k1": [0.01, 0.03, 0.05, -0.03, 0.02], "k3": [0.0, 0.01, 0.02, 0.01, 0.05]}
    stops = early_stop(pd.DataFrame({**step, **kl}), 0.02).set_index(["iteration", "estimate"])
    assert stops["steps_taken"].to_dict() == {
        (0, "k1"): 2, (0, "k3"): 3, (1, "k1"): 2, (1, "k3"): 2,
    }  # fmt: skip
    assert stops["stopped"].tolist() == [True, False, False, True]
    with pytest.raises(UserError, match="target_kl = 0: must be a positive number"):
        early_stop(pd.DataFrame(), 0.0)


def test_a_wrong_target_is_refused_before_the_run_is_read(tmp_path: Path, cli: Cli) -> None:
    """The folder has no records, but the message is about the target."""
    refused = cli("analyse", "clipping", tmp_path, "--early-stop-kl", "0")
    assert refused == (2, "", "error: target_kl = 0: must be a positive number (nats per token)\n")


def test_an_empty_list_of_iterations_is_refused(native_run: Path) -> None:
    with pytest.raises(UserError, match=r"^iterations = \[\]: names no iteration"):
        clip_tables(native_run, iterations=[])


def test_a_fork_is_counted_from_its_first_own_iteration_on(tmp_path: Path, cli: Cli) -> None:
    """The iterations before have another clip range and another anchor."""
    origin = tiny_run(tmp_path, "model.warm_start_steps=3", "ppo.iterations=2", "checkpoints.every=1")
    forked = fork(origin, tmp_path, 1, "ppo.objective.clip_range=0.01", "ppo.ratio_anchor=old")
    visits = len(reader.read_updates(forked, iterations=[1]))
    assert f"token visits {visits:,} in " in cli.done("analyse", "clipping", forked)
    assert f"token visits {len(reader.read_updates(origin)):,} in " in cli.done("analyse", "clipping", origin)
    with pytest.raises(UserError, match="iteration 0 is of the run that was forked"):
        clip_tables(forked, iterations=[1, 0])
    words = ("analyse", "tokenization", forked, "--iteration")
    assert "\nclip band\n" in cli.done(*words, "1")
    copied = cli.done(*words, "0")
    assert "\nclip band: not counted, iteration 0 is of the run that was forked\n" in copied
    assert "\nclip band\n" not in copied
