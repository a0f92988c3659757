"""The mismatch metrics by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.buckets import bucket_of
from ppo_repro.analysis.mismatch import mismatch_summary
from ppo_repro.analysis.mismatch_buckets import bucket_sums, bucket_table
from ppo_repro.analysis.run_pairs import run_pairs
from ppo_repro.statistics.mismatch_metrics import merged_sums, metric_values, mismatch_sums, with_mismatch
from ppo_repro.testing.diagnosis import diagnose_chunks
from ppo_repro.testing.guard import mismatch_of, pairs_of
from tests.analysis.chunks import chunk

LOG2 = math.log(2.0)


def measured(*frames: pd.DataFrame) -> pd.Series:
    """Value by (metric, reduction)."""
    return pd.Series(metric_values(merged_sums([mismatch_sums(with_mismatch(frame)) for frame in frames])))


# log 1/2, 1/4, 1/8 as float32, and what is twice and half as likely
HALF, QUARTER, EIGHTH = (float(np.float32(-n * LOG2)) for n in (1, 2, 3))


def test_by_hand() -> None:
    # deltas 0 and -log 2 in one response, +log 2 in the other
    found = measured(chunk([QUARTER, QUARTER, QUARTER], [QUARTER, EIGHTH, HALF], [2, 1]))
    expected = {
        ("frac_bitwise_equal", "token_mean"): 1 / 3,
        ("abs_mean", "token_mean"): 2 * LOG2 / 3,
        ("abs_max", "token"): LOG2,
        # rho 1, 1/2, 2
        ("rho_mean", "token_mean"): 3.5 / 3,
        ("rho_min", "token"): 0.5,
        ("rho_max", "token"): 2.0,
        ("k3", "token_mean"): 0.5 / 3,
        ("k3", "seq_mean_token_sum"): 0.5 / 2,
        ("kl_pg_nonneg", "token_mean"): (1.5 * LOG2 - 0.5) / 3,
        ("tv", "token_mean"): 1.5 / 6,
        ("ess_frac", "token"): 3.5**2 / (3 * 5.25),
        # probabilities 1/4 against 1/4, 1/8, 1/2
        ("prob_abs_mean", "token_mean"): 0.375 / 3,
        ("prob_abs_max", "token"): 0.25,
        # products 1/2 and 2
        ("chi2_seq", "seq"): (0.25 + 4) / 2 - 1,
        ("ess_seq", "seq"): 2.5**2 / (2 * 4.25),
        ("log_ppl_abs_diff", "seq_mean"): (LOG2 / 2 + LOG2) / 2,
        ("frac_diverged", "seq"): 1.0,
        ("n_tokens", "count"): 3.0,
    }
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key  # log-probs are float32
    assert found["k1", "token_mean"] == pytest.approx(0.0, abs=1e-7)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    frame = chunk([-1.0, -math.inf, -1.0, math.nan], [-1.5, -1.0, -1.0, math.nan], [2, 1, 1])
    tokens, found = with_mismatch(frame), measured(frame)
    assert tokens["finite"].tolist() == [True, False, True, False]
    assert tokens["bitwise_equal"].tolist() == [False, False, True, True]
    assert tokens["ulp"].tolist()[1::2] == [-1, -1]
    assert found["n_nonfinite", "count"] == 2
    assert found["abs_mean", "token_mean"] == 0.25
    assert found["log_ppl_abs_diff", "seq_mean"] == 0.0, "of responses only the one without a gap"
    assert found["frac_diverged", "seq"] == 0.0, "the same"
    far = measured(chunk([-1e4, -1.0], [-1.0, -1.0]))
    assert far["rho_max", "token"] == far["rho_mean", "token_mean"] == math.inf
    assert math.isnan(far["ess_frac", "token"])
    nothing = measured(chunk([], [], []))
    assert nothing["n_tokens", "count"] == 0
    assert nothing[["abs_mean", "abs_max", "ulp_max"]].isna().all()


def test_small_weights_have_their_effective_sample_size() -> None:
    # both weights are below 1e-9, one twice the other: (1 + 2)^2 / (2 (1 + 4))
    found = measured(chunk([0.0, 0.0], [-23.0, -23.0 - LOG2], [1, 1]))
    assert found["ess_frac", "token"] == pytest.approx(0.9, rel=1e-5)
    assert found["ess_seq", "seq"] == pytest.approx(0.9, rel=1e-5)


def buckets_of(frame: pd.DataFrame) -> pd.DataFrame:
    return bucket_table([bucket_sums(with_mismatch(frame))])


def test_buckets_by_hand() -> None:
    log = math.log
    # probabilities 0.05, 0.2, 0.2, 0.95 at positions 0 to 3; a token that is not finite is in no bucket
    a = [log(0.05), log(0.2), log(0.2), log(0.95), -math.inf]
    frame = chunk(a, [log(0.05), log(0.1), log(0.4), log(0.95), -1.0]).assign(turn=[0, 0, 1, 3, 3])
    found = buckets_of(frame)
    probs = found[found["kind"] == "prob"]
    assert probs[["lo", "hi", "n_tokens"]].to_numpy().tolist() == [[0.01, 0.1, 1], [0.1, 0.3, 2], [0.9, 0.99, 1]]
    assert probs["abs_mean"].tolist() == pytest.approx([0.0, LOG2, 0.0], rel=1e-6)
    assert probs["prob_abs_mean"].tolist() == pytest.approx([0.0, 0.15, 0.0], rel=1e-6)
    assert probs["abs_p99"].tolist() == pytest.approx([0.0, LOG2, 0.0], rel=2**-8)
    assert probs["frac_bitwise_equal"].tolist() == [1.0, 0.0, 1.0]
    limits = {
        kind: found[found["kind"] == kind][["lo", "hi", "n_tokens"]].to_numpy().tolist() for kind in set(found["kind"])
    }
    assert (limits["position"], limits["response_length"]) == ([[0, 1, 1], [1, 2, 1], [2, 4, 2]], [[4, 8, 4]])
    assert limits["turn"] == [[0, 1, 2], [1, 2, 1], [2, 4, 1]]
    assert "entropy" not in limits
    assert bucket_of(np.array([0.0, 0.1, 0.5, 1.0, 7.0, np.nan]), (0.0, 0.1, 1.0)).tolist() == [0, 1, 1, 1, 1, -1]


def test_equal_sides_have_every_ideal_value() -> None:
    frame = chunk([-1.0, -0.5, -2.0], [-1.0, -0.5, -2.0], [2, 1])
    summary = mismatch_summary([frame])
    judged = summary[summary["ideal"].notna()]
    assert judged["value"].tolist() == judged["ideal"].tolist()
    assert not summary.duplicated(["metric", "reduction"]).any()
    assert summary.set_index("metric")["value"][["n_tokens", "n_masked"]].tolist() == [3.0, 0.0]


def test_the_guard_and_the_diagnosis_have_the_numbers_of_the_summary(native_run: Path) -> None:
    summary = mismatch_summary(run_pairs(native_run)).set_index(["metric", "reduction"])["value"]
    names = {"abs_mean": "token_mean", "abs_max": "token", "k3": "token_mean", "n_nonfinite": "count"}
    expected = {name: summary[name, reduction] for name, reduction in names.items()}
    limited, evidence = mismatch_of(pairs_of(native_run)), diagnose_chunks(run_pairs(native_run)).evidence
    assert {name: limited[name][0] for name in names} == {name: evidence[name] for name in names} == expected
    equal = summary["frac_bitwise_equal", "token_mean"]
    assert limited["frac_unequal"][0] == pytest.approx(1 - equal, rel=1e-12)
    assert evidence["frac_bitwise_equal"] == equal < 1.0
