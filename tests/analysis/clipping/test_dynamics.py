"""Clipping over the steps of an iteration: transitions, overshoot, early stops, the gain of an update."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.clipping.dynamics import band_transitions, early_stop, epochs_to_half, overshoot_shares
from analysis.clipping.quality import evaluation_gains, update_numbers, update_quality
from analysis.clipping.update_rows import IterationRows
from analysis.clipping.words import clip_words, word_ratios
from ppo_repro.errors import UserError
from tests.support.cases.clip_rows import items, make_item, single
from tests.support.runs import small_config

CONFIG = small_config()


def test_transitions_by_hand() -> None:
    up = np.log(1.5)
    # three outside, of whom two come back; the fourth stays inside
    item = make_item([4], np.array([[up, up, up, 0.0], [up, 0.0, 0.0, 0.0]]), np.ones(4))
    row = band_transitions(item).iloc[0]
    assert (row["epoch"], row["n_out"], row["return_rate"], row["leave_rate"]) == (0, 3, 2 / 3, 0.0)
    assert row["still_clipped_rate"] == 1 / 3
    only = make_item([2], np.zeros((1, 2)), np.ones(2))
    assert not len(band_transitions(only))


def test_overshoot_shares_by_hand() -> None:
    # two minibatches of one response: step 0 all ones, step 1 sees 0.3, epoch 1 sees 0.3 and 0.3
    up = np.log(1.5)
    item = make_item([1, 1], np.array([[0.0, up], [up, up]]), np.ones(2), minibatches=2)
    shares = overshoot_shares(item.rows, item.rule)
    assert shares["first_step_share"] == pytest.approx(1 / 3) and shares["first_epoch_share"] == pytest.approx(1 / 3)


def steps_with(kl_k1: list[float], kl_k3: list[float], grad_zero: list[float]) -> pd.DataFrame:
    count = len(kl_k1)
    frame = pd.DataFrame({"iteration": 0, "epoch": range(count), "step": range(count), "subset": "all"})
    return frame.assign(n_tok=10, kl_k1=kl_k1, kl_k3=kl_k3, grad_zero=grad_zero, band_out=grad_zero)


def test_early_stop_and_epochs_to_half_by_hand() -> None:
    table = steps_with([0.0, -0.01, 0.05], [0.0, 0.03, 0.05], [0.0, 0.4, 0.6])
    found = early_stop(table, 0.02).set_index("estimate")
    assert found["steps_taken"].to_dict() == {"k1": 3, "k3": 2, "mean_new_minus_old": 3}
    assert found["stopped"].to_dict() == {"k1": True, "k3": True, "mean_new_minus_old": False}
    assert early_stop(table, 0.02, 1.5).set_index("estimate").loc["k3", "steps_taken"] == 3
    assert epochs_to_half(table)["epochs_to_half_grad_zero"].tolist() == [3.0]
    assert np.isnan(epochs_to_half(table.assign(grad_zero=0.1))["epochs_to_half_grad_zero"].iloc[0])
    for bad in (0.0, -1.0, np.nan):
        with pytest.raises(UserError, match="target_kl"):
            early_stop(table, bad)


def test_mean_new_minus_old_is_minus_the_divergence() -> None:
    # exact expectations over a small categorical: E_p[log q - log p] = -KL < 0
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    assert (p * np.log(q / p)).sum() < 0 < (p * (q / p - 1 - np.log(q / p))).sum()


@settings(max_examples=10)  # each example builds data frames
@given(items(), st.integers(0, 3))
def test_tokens_in_the_band_keep_their_word_in_its_wider_band(item: IterationRows, seed: int) -> None:
    generator = np.random.default_rng(seed)
    low, high = np.log1p(-item.rule.low), np.log1p(item.rule.high)
    inside = generator.uniform(low, high, len(item.rows))
    calm = replace(item, rows=item.rows.assign(log_ratios=inside))
    words = word_ratios(calm)
    assert not words["any_token_out"].any() and not words["word_band_out"].any()
    table = clip_words(item)
    assert table["n_words"].sum() == len(word_ratios(item))
    ones = word_ratios(item).query("n_tok == 1")
    # (1 + high)^1 as a log and as a ratio may differ in the last bit, random ratios do not lie there
    assert (ones["token_band_out"] == ones["word_band_out"]).all()


def test_update_quality_by_hand() -> None:
    item = single([np.log(1.5), np.log(1.1)], [1.0, 1.0])
    numbers = update_numbers(item, CONFIG)
    # min(r A, clip(r) A) - A: 0.2 and 0.1, token mean
    assert numbers["surrogate_gain"] == pytest.approx(0.15)
    first = {**numbers, "iteration": 0, "score_mean": 1.0, "score_variance_of_mean": 0.09}
    second = {**numbers, "iteration": 1, "score_mean": 0.5, "score_variance_of_mean": 0.16}
    table = update_quality([first, second])
    assert table["score_gain"].iloc[0] == -0.5 and table["score_gain_se"].iloc[0] == pytest.approx(0.5)
    assert table["improved"].iloc[0] == 0.0 and pd.isna(table["improved"].iloc[1])


def test_evaluation_gains_by_hand() -> None:
    iterations = pd.DataFrame({"iteration": [0, 1, 2], "eval_accuracy": [0.5, np.nan, 0.25]})
    table = evaluation_gains(iterations, {"eval_accuracy": 0.75}, 100)
    assert table["gain"].tolist() == [-0.25, 0.5] and table["updates"].tolist() == [2, 1]
    assert table["worse"].tolist() == [True, False] and table["worse_beyond_noise"].tolist() == [True, False]
    assert table["se_unpaired"].iloc[0] == pytest.approx(np.sqrt((0.25 + 0.1875) / 100))
