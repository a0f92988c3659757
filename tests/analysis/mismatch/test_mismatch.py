"""The mismatch metrics: by hand, against slow definitions, and the identities they must satisfy."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.mismatch.metrics import update_table, wide
from analysis.mismatch.sequence import Bounds, mismatch_sequence
from analysis.mismatch.sums import MismatchSums, merge_sums, mismatch_sums
from analysis.mismatch.token import bucket_of, mismatch_token, ordered_bits, ulp_distance
from tests.support.cases.pairs import CHUNKS, chunk, cut

LOG2 = math.log(2.0)
SOME = settings(max_examples=30)


def measured(frame: pd.DataFrame) -> pd.Series:
    """Value by (metric, reduction)."""
    table = update_table(mismatch_sums(mismatch_token(frame)))
    return table.set_index(["metric", "reduction"])["value"]


def same_sums(a: MismatchSums, b: MismatchSums) -> bool:
    def plain(sums: MismatchSums) -> dict[str, Any]:
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(sums).items()}

    return plain(a) == plain(b)


# log 1/2, 1/4, 1/8 as float32, and what is twice and half as likely
HALF, QUARTER, EIGHTH = (float(np.float32(-n * LOG2)) for n in (1, 2, 3))


def test_by_hand() -> None:
    # deltas 0 and -log 2 in one sequence, +log 2 in the other
    found = measured(chunk([QUARTER, QUARTER, QUARTER], [QUARTER, EIGHTH, HALF], [2, 1]))
    near = 1e-7  # log-probs are float32
    assert found["frac_bitwise_equal", "token_mean"] == 1 / 3
    assert found["abs_mean", "token_mean"] == pytest.approx(2 * LOG2 / 3, rel=near)
    assert found["abs_mean", "seq_mean_token_mean"] == pytest.approx((LOG2 / 2 + LOG2) / 2, rel=near)
    assert found["abs_mean", "seq_mean_token_sum"] == pytest.approx(LOG2, rel=near)
    assert found["abs_max", "token"] == pytest.approx(LOG2, rel=near)
    # rho 1, 1/2, 2
    assert found["rho_mean", "token_mean"] == pytest.approx(3.5 / 3, rel=near)
    assert found["mult_err", "token_mean"] == pytest.approx(5 / 3, rel=near)
    assert found["k1", "token_mean"] == pytest.approx(0.0, abs=near)
    assert found["k1", "seq_mean_token_mean"] == pytest.approx((LOG2 / 2 - LOG2) / 2, rel=near)
    assert found["k2", "token_mean"] == pytest.approx(LOG2**2 / 3, rel=near)
    assert found["k3", "token_mean"] == pytest.approx((-0.5 + LOG2 + 1 - LOG2) / 3, rel=2 * near)
    assert found["kl_pg", "token_mean"] == pytest.approx((-LOG2 / 2 + 2 * LOG2) / 3, rel=near)
    assert found["kl_pg_nonneg", "token_mean"] == pytest.approx((1.5 * LOG2 - 0.5) / 3, rel=1e-6)
    assert found["tv", "token_mean"] == pytest.approx(1.5 / 6, rel=near)
    assert found["chi2_token", "token"] == pytest.approx(5.25 / 3 - 1, rel=near)
    assert found["ess_frac", "token"] == pytest.approx(3.5**2 / (3 * 5.25), rel=near)
    assert found["one_sided_frac", "token_mean"] == 2 / 3
    # probabilities 1/4 against 1/4, 1/8, 1/2
    assert found["prob_abs_mean", "token_mean"] == pytest.approx(0.375 / 3, rel=near)
    assert found["prob_abs_max", "token"] == pytest.approx(0.25, rel=near)
    # products 1/2 and 2, geometric means sqrt(1/2) and 2
    assert found["rho_seq", "seq_mean"] == pytest.approx(1.25, rel=near)
    assert found["ess_seq", "seq"] == pytest.approx(2.5**2 / (2 * 4.25), rel=near)
    assert found["rho_geo", "seq_mean"] == pytest.approx((math.sqrt(0.5) + 2) / 2, rel=near)
    assert found["ppl_a", "seq_mean"] == pytest.approx(4.0, rel=near)
    assert found["ppl_b", "seq_mean"] == pytest.approx((math.sqrt(32) + 2) / 2, rel=near)
    assert found["log_ppl_diff_max", "seq"] == pytest.approx(LOG2 / 2, rel=near)
    # the first sequence diverges at its second token, the second at its first: 2 of 3 exposures
    assert found["hazard", "token_mean"] == 2 / 3
    assert found["frac_diverged", "seq"] == 1.0
    assert found["n_tokens", "count"] == 3 and found["n_sequences", "count"] == 2


def test_correlations_and_slope_by_hand() -> None:
    # delta = -logprobs_a / 2: temperature 2 before normalising
    found = measured(chunk([-1.0, -2.0, -4.0], [-0.5, -1.0, -2.0]))
    assert found["delta_logp_slope", "token"] == pytest.approx(-0.5, rel=1e-12)
    assert found["pearson_logp", "token"] == pytest.approx(1.0, abs=1e-12)
    constant = measured(chunk([-1.0, -1.0], [-0.5, -0.25]))
    assert math.isnan(constant["pearson_logp", "token"]) and math.isnan(constant["delta_logp_slope", "token"])


@SOME
@given(CHUNKS)
def test_correlations_are_those_of_numpy(frame: pd.DataFrame) -> None:
    a, b = (frame[name].to_numpy().astype(np.float64) for name in ("logprobs_a", "logprobs_b"))
    found = measured(frame)
    for name, x, y in (("logp", a, b), ("prob", np.exp(a), np.exp(b))):
        if len(a) < 2 or min(x.std(), y.std()) < 1e-3:
            continue
        # numpy loses eps / (share of the variance in the mean square)
        assert found[f"pearson_{name}", "token"] == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-9)


def test_the_gap_of_the_correlation_keeps_digits_that_the_correlation_loses() -> None:
    generator = np.random.default_rng(0)
    a = -generator.random(5000).astype(np.float32)
    b = np.nextafter(a, np.float32(0.0), dtype=np.float32)
    found = measured(chunk(a.tolist(), b.tolist()))
    wide_a, wide_b = a.astype(np.longdouble), b.astype(np.longdouble)
    da, db = wide_a - wide_a.mean(), wide_b - wide_b.mean()
    expected = 1 - (da * db).sum() / np.sqrt((da * da).sum() * (db * db).sum())
    assert 1e-17 < expected < 1e-13
    assert found["pearson_logp_gap", "token"] == pytest.approx(float(expected), rel=1e-3)


def test_an_unresolved_kl_has_no_ratio() -> None:
    generator = np.random.default_rng(0)
    noise = generator.standard_normal(1000) * 1e-3
    unresolved = measured(chunk((-1 - noise).tolist(), (-1 + noise).tolist(), [5] * 200))
    assert math.isnan(unresolved["k3_over_k1", "token"])
    resolved = measured(chunk([-1.0] * 1000, (-1.1 + noise).tolist(), [5] * 200))
    assert resolved["k3_over_k1", "token"] == pytest.approx((math.expm1(-0.1) + 0.1) / 0.1, rel=1e-3)


def _slow(frame: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Means by the definitions, token by token."""
    rows = list(zip(frame["sequence"], map(float, frame["logprobs_a"]), map(float, frame["logprobs_b"]), strict=True))
    functions = {
        "abs_mean": lambda a, b: abs(b - a),
        "prob_abs_mean": lambda a, b: abs(math.exp(b) - math.exp(a)),
        "mult_err": lambda a, b: math.exp(abs(b - a)),
        "k1": lambda a, b: a - b,
        "k2": lambda a, b: (b - a) ** 2 / 2,
        "k3": lambda a, b: math.expm1(b - a) - (b - a),
        "kl_pg": lambda a, b: math.exp(b - a) * (b - a),
        "tv": lambda a, b: abs(math.expm1(b - a)) / 2,
        "rho_mean": lambda a, b: math.exp(b - a),
        "one_sided_frac": lambda a, b: float(b <= a),
    }
    found = {}
    for name, function in functions.items():
        by_sequence: dict[int, list[float]] = {}
        for sequence, a, b in rows:
            by_sequence.setdefault(sequence, []).append(function(a, b))
        lists = list(by_sequence.values())
        found[name, "token_mean"] = math.fsum(x for values in lists for x in values) / len(rows)
        if name in ("abs_mean", "k1", "k2", "k3"):
            found[name, "seq_mean_token_mean"] = math.fsum(math.fsum(x) / len(x) for x in lists) / len(lists)
            found[name, "seq_mean_token_sum"] = math.fsum(math.fsum(x) for x in lists) / len(lists)
    return found


@SOME
@given(CHUNKS)
def test_means_are_those_of_the_definitions(frame: pd.DataFrame) -> None:
    found = measured(frame)
    for key, expected in _slow(frame).items():
        # rounding of sums of up to 6 tokens with values below 1e3
        assert found[key] == pytest.approx(expected, rel=1e-12, abs=1e-12), key


@SOME
@given(CHUNKS, st.lists(st.integers(0, 7), max_size=4))
def test_no_chunking_changes_a_bit(frame: pd.DataFrame, borders: list[int]) -> None:
    whole = mismatch_sums(mismatch_token(frame))
    parts = [mismatch_sums(mismatch_token(part)) for part in cut(frame, borders)]
    assert same_sums(reduce(merge_sums, parts), whole)


@SOME
@given(CHUNKS, st.randoms(use_true_random=False))
def test_no_order_of_sequences_changes_a_bit(frame: pd.DataFrame, random: Any) -> None:
    order = list(frame["sequence"].unique())
    random.shuffle(order)
    shuffled = pd.concat([frame[frame["sequence"] == sequence] for sequence in order], ignore_index=True)
    found = [mismatch_sums(mismatch_token(one)) for one in (frame, shuffled)]
    assert same_sums(*found)


@SOME
@given(CHUNKS, st.randoms(use_true_random=False))
def test_order_of_tokens_matters_to_no_mean_but_pairing_matters_to_the_correlation(
    frame: pd.DataFrame, random: Any
) -> None:
    order = list(range(len(frame)))
    random.shuffle(order)
    single = frame.assign(sequence=np.arange(len(frame)), position=0)
    shuffled = single.iloc[order].reset_index(drop=True)
    one, other = measured(single), measured(shuffled)
    assert one.equals(other)
    mispaired = frame.assign(logprobs_b=np.roll(frame["logprobs_a"].to_numpy(), 1))
    found = measured(mispaired)
    if frame["logprobs_a"].nunique() > 2:
        assert found["pearson_logp", "token"] < 1.0
        # the same multiset: rolling by one leaves the mean difference 0
        assert found["k1", "token_mean"] == pytest.approx(0.0, abs=1e-12)
        assert found["k3", "token_mean"] > 0.0


@SOME
@given(CHUNKS)
def test_identical_inputs_have_no_divergence(frame: pd.DataFrame) -> None:
    found = measured(frame.assign(logprobs_b=frame["logprobs_a"]))
    for metric in ("abs_mean", "prob_abs_mean", "k1", "k2", "k3", "kl_pg", "kl_pg_nonneg", "tv", "hazard"):
        assert found[metric, "token_mean"] == 0.0
    zeros = ("abs_max", "prob_abs_max", "abs_std", "chi2_token", "cv2", "abs_p50", "abs_p999")
    assert all(found[metric, "token"] == 0.0 for metric in zeros)
    assert all(found[metric, "seq_mean"] == 0.0 for metric in ("log_rho_seq", "log_ppl_diff", "log_ppl_abs_diff"))
    assert found["chi2_seq", "seq"] == 0.0 and found["frac_diverged", "seq"] == 0.0
    assert found["frac_bitwise_equal", "token_mean"] == found["mult_err", "token_mean"] == 1.0
    assert found["rho_mean", "token_mean"] == found["ess_frac", "token"] == found["ess_seq", "seq"] == 1.0
    assert found["rho_geo", "seq_mean"] == found["ppl_ratio", "seq_mean"] == found["rho_seq", "seq_mean"] == 1.0
    assert found["pearson_logp", "token"] in (1.0,) or math.isnan(found["pearson_logp", "token"])
    assert found["ulp_max", "token"] == 0.0 or math.isnan(found["ulp_max", "token"])


@SOME
@given(CHUNKS)
def test_inequalities(frame: pd.DataFrame) -> None:
    found, tokens = measured(frame), mismatch_token(frame)
    assert (tokens["k2"] >= 0).all() and (tokens["k3"] >= 0).all()
    assert found["kl_pg_nonneg", "token_mean"] >= 0
    rounding = 1e-12
    assert 1 / len(frame) - rounding <= found["ess_frac", "token"] <= 1
    assert 1 / found["n_sequences", "count"] - rounding <= found["ess_seq", "seq"] <= 1
    assert found["mult_err", "token_mean"] >= max(1.0, found["rho_mean", "token_mean"]) - rounding
    assert found["abs_mean", "token_mean"] <= found["abs_max", "token"] * (1 + rounding)
    assert found["abs_p50", "token"] <= found["abs_p99", "token"] <= found["abs_max", "token"]
    # k3 - k1 = expm1(delta)
    assert (tokens["k3"] + tokens["delta"]).to_numpy() == pytest.approx(np.expm1(tokens["delta"]), rel=1e-12, abs=1e-15)
    sequences = mismatch_sequence(tokens)
    n = sequences["tokens"]
    assert (sequences["log_rho_seq"]).to_numpy() == pytest.approx(n * np.log(sequences["rho_geo"]), abs=1e-12)
    assert (np.exp(sequences["log_ppl_diff"]) * sequences["rho_geo"]).to_numpy() == pytest.approx(1.0, rel=rounding)
    arithmetic = tokens.groupby("sequence")["rho"].mean().to_numpy()
    assert (sequences["rho_geo"].to_numpy() <= arithmetic * (1 + rounding)).all()


@SOME
@given(CHUNKS)
def test_swapping_the_sides(frame: pd.DataFrame) -> None:
    swapped = frame.assign(logprobs_a=frame["logprobs_b"], logprobs_b=frame["logprobs_a"])
    one, other = measured(frame), measured(swapped)
    for metric in ("abs_mean", "prob_abs_mean", "mult_err", "k2", "frac_bitwise_equal", "hazard"):
        assert other[metric, "token_mean"] == one[metric, "token_mean"]
    for metric in ("abs_max", "ulp_p50", "ulp_max", "abs_p99"):
        assert other[metric, "token"] == pytest.approx(one[metric, "token"], abs=0.0, nan_ok=True)
    assert other["pearson_logp", "token"] == pytest.approx(one["pearson_logp", "token"], abs=1e-9, nan_ok=True)
    assert other["k1", "token_mean"] == -one["k1", "token_mean"]
    assert other["rho_max", "token"] == pytest.approx(1 / one["rho_min", "token"], rel=1e-12)


def test_what_is_no_invariant() -> None:
    # every rho 0.9: the sample estimates of chi^2 and of KL(a || b) by k1 may be negative
    found = measured(chunk([-1.0, -1.0], [-1.0 + math.log(0.9)] * 2))
    assert found["chi2_token", "token"] == pytest.approx(0.81 - 1, rel=1e-6)
    assert measured(chunk([-1.0], [-0.5]))["k1", "token_mean"] == -0.5
    uneven = measured(chunk([-1.0, -1.0, -1.0], [-1.5, -1.0, -1.0], [1, 2]))
    assert uneven["abs_mean", "token_mean"] == 0.5 / 3
    assert uneven["abs_mean", "seq_mean_token_mean"] == 0.25


@SOME
@given(st.integers(2, 8), st.integers(0, 1000), st.floats(0.01, 3.0))
def test_expectations_over_a_whole_distribution(size: int, seed: int, scale: float) -> None:
    # repeat each token in proportion to g, so that a plain mean over the rows is the expectation under g
    generator = np.random.default_rng(seed)
    parts = generator.integers(1, 6, size)
    g = parts / parts.sum()
    logits = generator.standard_normal(size) * scale
    p = np.exp(logits) / np.exp(logits).sum()
    a, b = np.repeat(np.log(g), parts), np.repeat(np.log(p), parts)
    found = measured(chunk(a.tolist(), b.tolist(), [1] * len(a)))
    kl, reverse = float((g * np.log(g / p)).sum()), float((p * np.log(p / g)).sum())
    chi2 = float((p * p / g).sum()) - 1

    def close(value: float) -> Any:
        # log-probs are rounded to float32, each by up to 6e-8 of its size
        return pytest.approx(value, rel=1e-5, abs=2e-6)

    assert found["k1", "token_mean"] == close(kl)
    assert found["k3", "token_mean"] == close(kl)
    assert found["kl_pg", "token_mean"] == close(reverse)
    assert found["kl_pg_nonneg", "token_mean"] == close(reverse)
    assert found["rho_mean", "token_mean"] == close(1.0)
    assert found["chi2_token", "token"] == close(chi2)
    assert found["ess_frac", "token"] == close(1 / (1 + chi2))
    assert found["tv", "token_mean"] == close(float(np.abs(g - p).sum()) / 2)
    tokens = mismatch_token(chunk(a.tolist(), b.tolist(), [1] * len(a)))
    # what NeMo-RL calls policy_kl_error: chi^2(g || p) - KL(g || p), no KL of either direction
    alarm = float((np.expm1(-tokens["delta"]) + tokens["delta"]).mean())
    assert alarm == close(float((g * g / p).sum()) - 1 - kl)


def test_ulps_by_hand() -> None:
    a = np.array([1.0, -1.0, 0.0, -0.0, 1e-45, -1e-45, -2.0], dtype=np.float32)
    b = np.array([np.nextafter(np.float32(1), np.float32(2)), -1.0, -0.0, 0.0, -1e-45, -0.0, 2.0], dtype=np.float32)
    assert ulp_distance(a, b).tolist() == [1, 0, 0, 0, 2, 1, 2 * (0x40000000)]
    assert ulp_distance(a, b).dtype == np.int64
    # the largest distance there is, beyond int32
    top = np.array([np.finfo(np.float32).max], dtype=np.float32)
    assert ulp_distance(top, -top).tolist() == [2 * 0x7F7FFFFF]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=10))
def test_ordered_bits_are_in_the_order_of_the_values(values: list[float]) -> None:
    array = np.sort(np.array(values, dtype=np.float32))
    assert (np.diff(ordered_bits(array)) >= 0).all()
    for value in array[np.abs(array) < 1e38]:
        following = np.nextafter(value, np.float32(np.inf), dtype=np.float32)
        # the two zeros are one number
        assert ulp_distance(np.array([value]), np.array([following])).tolist() == [1]


def test_ulps_near_zero_are_left_out() -> None:
    found = measured(chunk([-1e-6, -1.0], [-2e-6, float(np.nextafter(np.float32(-1), np.float32(0)))]))
    assert found["ulp_max", "token"] == 1.0 and found["n_ulp", "count"] == 1


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    frame = chunk([-1.0, -math.inf, -1.0, math.nan], [-1.5, -1.0, -1.0, math.nan], [2, 1, 1])
    tokens, found = mismatch_token(frame), measured(frame)
    assert tokens["finite"].tolist() == [True, False, True, False]
    assert tokens["bitwise_equal"].tolist() == [False, False, True, True]
    assert tokens["ulp"].tolist()[1::2] == [-1, -1] and tokens["prob_bucket"].tolist()[1::2] == [-1, -1]
    assert found["n_nonfinite", "count"] == 2 and found["n_incomplete_sequences", "count"] == 2
    assert found["abs_mean", "token_mean"] == 0.25
    # of sequences only the one without a gap
    assert found["rho_geo", "seq_mean"] == 1.0
    sequences = mismatch_sequence(tokens)
    assert sequences["nonfinite"].tolist() == [1, 0, 1]
    assert sequences["log_rho_seq"].isna().tolist() == [False, False, True]
    assert sequences["log_rho_seq"].tolist()[0] == math.inf
    assert sequences["keep_token"].tolist() == [False, True, False]


def test_exact_zeros_are_counted() -> None:
    found = measured(chunk([0.0, 0.0, -1.0], [0.0, -1.0, 0.0]))
    assert found["n_exact_zero_logp_a", "count"] == 2 and found["n_exact_zero_logp_b", "count"] == 2


def test_ratios_beyond_float64_are_infinite_and_said_to_be() -> None:
    found = measured(chunk([-1e4, -1.0], [-1.0, -1.0]))
    assert found["rho_max", "token"] == math.inf and found["rho_mean", "token_mean"] == math.inf
    assert math.isnan(found["ess_frac", "token"])


def test_nothing_is_nan_not_zero() -> None:
    found = measured(chunk([], [], []))
    assert found["n_tokens", "count"] == 0
    assert math.isnan(found["abs_mean", "token_mean"]) and math.isnan(found["ulp_max", "token"])
    assert math.isnan(found["abs_max", "token"]) and math.isnan(found["frac_diverged", "seq"])


def test_sequences_by_hand() -> None:
    frame = chunk([-1.0, -1.0, -1.0, -2.0], [-1.0, -1.25, -1.5, -2.0], [3, 1])
    found = mismatch_sequence(mismatch_token(frame), Bounds(token=(0.7, 2.0), sequence=(0.5, 2.0)), divergence_tau=0.3)
    assert found["tokens"].tolist() == [3, 1]
    assert found["log_rho_seq"].tolist() == [-0.75, 0.0]
    assert found["rho_geo"].tolist() == [math.exp(-0.25), 1.0]
    assert found["log_ppl_a"].tolist() == [1.0, 2.0] and found["log_ppl_b"].tolist() == [1.25, 2.0]
    assert found["abs_mean"].tolist() == [0.25, 0.0] and found["abs_max"].tolist() == [0.5, 0.0]
    assert found["first_div_bit"].tolist() == [1, pd.NA] and found["first_div_tau"].tolist() == [2, pd.NA]
    assert found["frac_bitwise_equal"].tolist() == [1 / 3, 1.0]
    assert found["keep_token"].tolist() == [False, True]  # exp(-1/2) < 0.7
    assert found["keep_sequence"].tolist() == [False, True]  # exp(-3/4) < 0.5
    assert found["keep_geometric"].tolist() == [False, True]


def test_buckets_hold_their_lower_edge() -> None:
    assert bucket_of(np.array([0.0, 0.1, 0.5, 1.0, 7.0, np.nan]), (0.0, 0.1, 1.0)).tolist() == [0, 1, 1, 1, 1, -1]


def test_the_wide_table() -> None:
    table = update_table(mismatch_sums(mismatch_token(chunk([-1.0], [-1.5]))))
    assert wide(table)["abs_mean/token_mean"].tolist() == [0.5]
    both = pd.concat([table.assign(iteration=0), table.assign(iteration=3)])
    assert wide(both)["iteration"].tolist() == [0, 3] and len(wide(both).columns) == len(table) + 1
