"""The tables of the clip analysis: by hand, against definitions, invariants, and on recorded runs."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings

from analysis.clipping.bucket import lift_interval
from analysis.clipping.dynamics import early_stop
from analysis.clipping.flags import FLAGS, token_flags
from analysis.clipping.ratios import histogram_bins, histogram_index, overshoot_survival, ratio_hist
from analysis.clipping.step import clip_step, effective_samples, kl_estimates, overshoot
from analysis.clipping.tables import clip_tables, main, overview
from analysis.clipping.update_rows import IterationRows, load_iterations
from analysis.clipping.weights import logit_step, loss_weights, masses
from analysis.dialects.report import long_table
from ppo_repro.records import reader
from ppo_repro.watcher import Silent
from tests.support.cases.clip_rows import RULE, items, make_item, single
from tests.support.language import run
from tests.support.runs import small_config

CONFIG = small_config()


def whole(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["subset"] == "all"].reset_index(drop=True)


def test_the_step_table_by_hand() -> None:
    # two tokens up to 1.5 and down to 0.5, both on the side that is clipped, one unmoved
    item = single([np.log(1.5), np.log(0.5), 0.0], [1.0, -1.0, 2.0])
    row = whole(clip_step(item, CONFIG)).iloc[0]
    assert (row["n_tok"], row["n_adv_zero"], row["n_nonfinite"]) == (3, 0, 0)
    assert row["grad_zero"] == 2 / 3 and row["clip_high"] == row["clip_low"] == 1 / 3
    assert (row["r_mean"], row["r_max"], row["r_min"], row["r_q0.5"]) == pytest.approx((1.0, 1.5, 0.5, 1.0))
    # overshoot 0.3 and 0.3 of three tokens, both beyond the range of 0.2 once more
    assert row["overshoot_mean"] == pytest.approx(0.2) and row["overshoot_beyond_range"] == 2 / 3
    # masses |r A| = 1.5, 0.5, 2
    assert row["gm_clip"] == pytest.approx(0.5)
    assert row["kl_k1"] == pytest.approx(-np.log(0.75) / 3)
    assert row["kl_k3"] == pytest.approx(-np.log(0.75) / 3)  # the ratios' mean is 1
    assert row["ess_tok"] == pytest.approx(9 / (3 * 3.5))
    assert row["clip_floor"] == 0 and row["clip_excess"] == row["grad_zero"]


def test_the_floor_is_what_the_mismatch_alone_clips() -> None:
    rule = replace(RULE, anchor="rollout")
    delta = np.array([0.3, -0.3, 0.3, 0.0])
    # the ratio to the rollout is exp(delta) before any step: 1.35 and 0.74
    item = make_item([4], delta[None], np.array([1.0, -1.0, -1.0, 1.0]), rule, delta=delta)
    row = whole(clip_step(item, CONFIG)).iloc[0]
    assert row["clip_floor_band"] == 0.75 and row["clip_floor"] == 0.5 and row["clip_excess"] == 0.0
    assert row["var_share_mismatch"] == pytest.approx(1.0)
    with_old = replace(item, rule=RULE, rows=item.rows.assign(anchor_logprobs=item.rows["old_logprobs"]))
    assert whole(clip_step(with_old, CONFIG)).iloc[0]["clip_floor"] == 0.0


@settings(max_examples=10)  # each example builds data frames
@given(items(with_mismatch=True))
def test_rates_are_means_of_flags_and_subsets_add_up(item: IterationRows) -> None:
    table, flags = clip_step(item, CONFIG), token_flags(item.rows, item.rule)
    by_step = flags.groupby([item.rows["epoch"], item.rows["minibatch"]])[list(FLAGS)].mean()
    np.testing.assert_allclose(whole(table)[list(FLAGS)].to_numpy(float), by_step.to_numpy(float), rtol=1e-12)
    counts = table.pivot_table(index="step", columns="subset", values="n_tok", aggfunc="sum")
    zero = whole(table).set_index("step")["n_adv_zero"]
    assert (counts["adv_pos"] + counts["adv_neg"] + zero == counts["all"]).all()
    assert (counts["word_start"] + counts["continuation"] == counts["all"]).all()
    seen = whole(table)
    lowest = 1.0 / seen["n_tok"]
    assert ((seen["ess_tok"] >= lowest * (1 - 1e-12)) & (seen["ess_tok"] <= 1 + 1e-12)).all()
    assert (seen["kl_k3"] >= 0).all() and (seen["kl_k2"] >= 0).all()


def test_what_is_not_finite_is_counted_and_not_replaced() -> None:
    item = single([np.inf, np.nan, 0.0, 0.1], [1.0, 1.0, 1.0, 1.0])
    row = whole(clip_step(item, CONFIG)).iloc[0]
    assert row["n_nonfinite"] == 2 and np.isnan(row["r_mean"]) and np.isnan(row["kl_k1"])
    assert row["clip_high"] == 0.25


def test_kl_estimates_of_tiny_ratios_keep_their_digits() -> None:
    x = np.full(1000, 1e-7)
    # x^2 / 2; in float32 exp(x) - 1 - x would be noise
    assert kl_estimates(x)["kl_k3"] == pytest.approx(5e-15, rel=1e-6)
    assert effective_samples(np.array([0.0, 800.0])) == pytest.approx(0.5)


def test_loss_weights_by_hand() -> None:
    item = make_item([1, 3], np.zeros((1, 4)), np.ones(4), delta=np.array([0.0, 1.0, -1.0, 0.0]))
    weights = loss_weights(item.rows, small_config("ppo.aggregation=sequence_mean"), item.tokens)
    assert weights == pytest.approx([0.5, 1 / 6, 1 / 6, 1 / 6])
    assert loss_weights(item.rows, small_config("ppo.aggregation=sequence_sum"), item.tokens) == pytest.approx(
        [0.5] * 4
    )
    masked = small_config("ppo.ratio_anchor=old", "ppo.importance_weights={kind: masked, cap: 2.0}")
    assert loss_weights(item.rows, masked, item.tokens) == pytest.approx([0.25, 0, 0, 0.25])
    cut = small_config("ppo.ratio_anchor=old", "ppo.importance_weights={kind: truncated, cap: 2.0}")
    assert loss_weights(item.rows, cut, item.tokens) == pytest.approx([0.25, 0.5, np.exp(-1) / 4, 0.25])
    by_response = small_config(
        "ppo.ratio_anchor=old", "ppo.importance_weights={kind: truncated, cap: 2.0, level: sequence}"
    )
    assert loss_weights(item.rows, by_response, item.tokens) == pytest.approx([0.25] * 4)


def test_the_logit_gradient_norm_is_the_definitions() -> None:
    pi = np.array([0.5, 0.3, 0.2])
    gradient = np.eye(3)[1] - pi
    assert logit_step(np.array([0.3]), np.array([(pi**2).sum()]))[0] == pytest.approx((gradient**2).sum())
    item = make_item([1], np.array([[np.log(2.0)]]), np.array([-3.0]), old_logprobs=np.log([0.3]))
    item.rows["prob_sq_sums"] = (pi**2).sum()
    assert masses(item.rows, CONFIG, item.tokens)["logit_grad_norm"].iloc[0] == pytest.approx(
        6.0 * np.linalg.norm(gradient)
    )


def test_a_small_logit_step_moves_the_log_prob_as_the_null_says() -> None:
    logits, action, size = np.array([0.2, -1.0, 0.7, 0.0]), 1, 1e-5
    pi = np.exp(logits) / np.exp(logits).sum()
    moved = logits + size * (np.eye(4)[action] - pi)
    after = np.exp(moved) / np.exp(moved).sum()
    predicted = size * logit_step(pi[[action]], np.array([(pi**2).sum()]))[0]
    assert np.log(after[action] / pi[action]) == pytest.approx(predicted, rel=1e-4)


def test_the_histogram_counts_every_token_once_and_is_symmetric() -> None:
    bins = histogram_bins()
    x = np.array([0.0, 0.005, -0.005, 0.0051, 5.0, 5.1, -np.inf, np.nan])
    found = bins.iloc[histogram_index(x)]
    assert found["bin_lo"].iloc[:6].tolist() == [0.0, 0.0, -0.005, 0.005, 3.0, 5.0]
    assert found["bin_hi"].iloc[:6].tolist() == [0.0, 0.005, 0.0, 0.01, 5.0, np.inf]
    assert found["bin_lo"].iloc[6] == -np.inf and np.isnan(found["bin_lo"].iloc[7])


@settings(max_examples=10)  # each example builds data frames
@given(items())
def test_histograms_add_up(item: IterationRows) -> None:
    table = ratio_hist(item)
    assert table["count"].sum() == len(item.rows)
    signs = np.sign(item.rows["advantages"]).value_counts()
    assert table.groupby("adv_sign")["count"].sum().to_dict() == {s: signs.get(s, 0) for s in (-1, 0, 1)}
    mirrored = histogram_index(-item.rows["log_ratios"].to_numpy())
    np.testing.assert_array_equal(mirrored, 36 - histogram_index(item.rows["log_ratios"].to_numpy()))
    survival = overshoot_survival(item)
    out = token_flags(item.rows, item.rule)["band_out"].sum()
    # at a bound, r > 1 + high and r - (1 + high) > 0 are the same
    assert survival[survival["beyond"] == 0]["count"].sum() == out
    assert (survival.groupby("epoch")["count"].diff().dropna() <= 0).all()


def test_overshoot_by_hand() -> None:
    assert overshoot(np.array([1.5, 0.5, 1.1, 0.8]), RULE) == pytest.approx([0.3, 0.3, 0.0, 0.0])


def test_lifts_by_hand() -> None:
    # half of the tokens in each of two bins; all clipped ones in bin 0
    codes, cut = np.array([0, 0, 1, 1]), np.array([True, False, False, False])
    lift, low, high = lift_interval(codes, 2, np.array([0, 1, 0, 1]), cut)
    assert lift.tolist() == [2.0, 0.0] and np.isnan(low[1])
    # influence of response 0: 1/1 - 1/2 - 1/1 + 2/4 = 0, of response 1 likewise 0
    assert low[0] == high[0] == 2.0


def test_the_interval_is_that_of_a_bootstrap_over_responses() -> None:
    generator = np.random.default_rng(5)
    responses, length = 300, 6
    sequences = np.repeat(np.arange(responses), length)
    codes = generator.integers(0, 2, len(sequences))
    # responses differ in how often they are clipped, so tokens are not independent
    chance = np.repeat(generator.beta(0.5, 2.0, responses), length) * np.where(codes == 0, 1.0, 0.5)
    cut = generator.random(len(sequences)) < chance
    _, low, high = lift_interval(codes, 2, sequences, cut)

    def once() -> float:
        drawn = generator.integers(0, responses, responses)
        rows = (drawn[:, None] * length + np.arange(length)).ravel()
        return float(cut[rows][codes[rows] == 0].mean() / cut[rows].mean())

    logs = np.log([once() for _ in range(2000)])
    # a standard deviation from 2000 draws is known to 1.6 %, linearisation adds about as much
    assert (np.log(high[0]) - np.log(low[0])) / (2 * 1.96) == pytest.approx(logs.std(), rel=0.1)


@pytest.mark.parametrize("name", ["deterministic_run", "native_run"])
def test_tables_of_a_run_agree_with_what_training_recorded(name: str, request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(name)
    tables = clip_tables(run_dir)
    steps = reader.read_steps(run_dir)
    own = whole(tables.clip_step)
    assert own["n_tok"].tolist() == steps["tokens"].tolist()
    # recorded from float32 differences of log-probs, and for |x| > 1 from a float32 exponential
    np.testing.assert_allclose(own["kl_k3"], steps["approx_kl"], rtol=1e-5, atol=1e-12)
    differ = tables.flag_differences["differ"].sum()
    assert (np.abs(own["grad_zero"] - steps["clip_fraction"]) * own["n_tok"]).sum() <= differ + 1e-9
    off = np.abs(own["vf_grad_zero"] - steps["value_clip_fraction"]) * own["n_value_tok"]
    assert off.sum() <= 2  # float32 against float64 at equal distance from the return
    assert tables.flag_differences["unexplained"].sum() == 0
    assert tables.ratio_hist["count"].sum() == steps["tokens"].sum()
    for field in fields(tables):
        assert (getattr(tables, field.name)["run_id"] == tables.clip_step["run_id"].iloc[0]).all()
    assert any("gradient removed" in line for line in overview(tables, 0.01))


def test_an_early_stop_is_found_where_it_happened(tmp_path: Path) -> None:
    target = 0.003
    config = small_config("numerics.mode=native", "ppo.iterations=2", f"ppo.early_stop_kl={target}", "value.epochs=3")
    run_dir = run(config, tmp_path, Silent())[0]
    tables = clip_tables(run_dir)
    taken = early_stop(tables.clip_step, target).query("estimate == 'k3'")
    recorded = reader.read_iterations(run_dir)["policy_steps"].tolist()
    assert taken["steps_taken"].tolist() == recorded == tables.update_quality["policy_steps"].tolist()
    assert taken["stopped"].all() and max(recorded) < 6
    # the value model went on: its steps are in the table, without policy rates
    resting = whole(tables.clip_step).query("n_tok == 0")
    assert len(resting) and resting["grad_zero"].isna().all() and (resting["n_value_tok"] > 0).all()


def test_a_run_without_a_value_model_has_no_value_rates(tmp_path: Path) -> None:
    overrides = (
        "advantages={kind: group}",
        "value={kind: none}",
        "kl={placement: none}",
        "ppo.objective.dual_clip=1.5",
    )
    config = small_config("numerics.mode=native", "ppo.iterations=1", *overrides)
    run_dir = run(config, tmp_path, Silent())[0]
    tables = clip_tables(run_dir)
    assert tables.clip_step["vf_grad_zero"].isna().all() and not tables.clip_step["n_value_tok"].any()
    assert tables.flag_differences["unexplained"].sum() == 0
    # responses whose group agrees have no advantage
    assert (whole(tables.clip_step)["n_adv_zero"] > 0).any()
    words = long_table(run_dir).set_index("key")["value"]
    assert words[["critic/vf_clipfrac", "train/value_clipfrac", "losses/explained_variance"]].isna().all()


def test_a_run_that_clips_nothing_is_refused_unless_a_range_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config("numerics.mode=native", "ppo.iterations=1", "ppo.objective={kind: unclipped}")
    run_dir = run(config, tmp_path, Silent())[0]
    assert main([str(run_dir)]) == 2
    assert "ppo.objective.kind = unclipped clips nothing" in capsys.readouterr().err
    assert main([str(run_dir), "--clip-range", "0.1", "0.1"]) == 0
    assert "recorded flags" not in capsys.readouterr().out


def test_the_command_prints_and_writes(
    deterministic_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(deterministic_run), "--out", str(tmp_path / "tables"), "--early-stop-kl", "0.01"]) == 0
    assert "early stop at 0.01 by k3" in capsys.readouterr().out
    written = pd.read_parquet(tmp_path / "tables" / "clip_step.parquet")
    pd.testing.assert_frame_equal(written, clip_tables(deterministic_run).clip_step)
    assert main([str(deterministic_run), "--clip-range", "0", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_one_iteration_of_a_run_reads_the_same(deterministic_run: Path) -> None:
    item = next(iter(load_iterations(deterministic_run, iterations=[1])))
    every = clip_tables(deterministic_run).clip_step.drop(columns="run_id")
    alone = clip_step(item, small_config())
    expected = every[every["iteration"] == 1].reset_index(drop=True)
    pd.testing.assert_frame_equal(alone, expected)
    assert not len(clip_tables(deterministic_run, iterations=[1], band=(0.1, 0.1)).flag_differences)
