"""Buckets, corrections, clip floor and tables: by hand, merged, and against the records of training."""

from __future__ import annotations

import math
from functools import reduce
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.mismatch import bucket, clip_floor, correction, parity
from analysis.mismatch import tables as mismatch
from analysis.mismatch.correction import Correction
from analysis.mismatch.metrics import wide
from analysis.mismatch.token import mismatch_token
from analysis.pairs.places import PLACES
from analysis.pairs.runs import run_pairs
from ppo_repro.errors import UserError
from ppo_repro.records import reader
from tests.support import synthetic_run
from tests.support.cases.pairs import CHUNKS, chunk, cut, random_chunk

SOME = settings(max_examples=30)
LOG = math.log


def buckets_of(frame: pd.DataFrame) -> pd.DataFrame:
    return bucket.bucket_table(bucket.bucket_sums(mismatch_token(frame)))


def test_buckets_by_hand() -> None:
    # probabilities 0.05, 0.2, 0.2, 0.95 at positions 0 to 3; a token that is not finite is in no bucket
    a = [LOG(0.05), LOG(0.2), LOG(0.2), LOG(0.95), -math.inf]
    found = buckets_of(chunk(a, [LOG(0.05), LOG(0.1), LOG(0.4), LOG(0.95), -1.0]))
    probs = found[found["kind"] == "prob"]
    assert probs[["lo", "hi", "n"]].to_numpy().tolist() == [[0.01, 0.1, 1], [0.1, 0.3, 2], [0.9, 0.99, 1]]
    assert probs["abs_mean"].tolist() == pytest.approx([0.0, LOG(2), 0.0], rel=1e-6)
    assert probs["prob_abs_mean"].tolist() == pytest.approx([0.0, 0.15, 0.0], rel=1e-6)
    assert probs["k3"].tolist() == pytest.approx([0.0, (0.5 - 1 + 2 - 1) / 2, 0.0], abs=1e-6)
    assert probs["frac_eq"].tolist() == [1.0, 0.0, 1.0]
    positions = found[found["kind"] == "position"]
    assert positions[["lo", "hi", "n"]].to_numpy().tolist() == [[0, 1, 1], [1, 2, 1], [2, 4, 2]]
    assert found[found["kind"] == "seq_len"][["lo", "hi", "n"]].to_numpy().tolist() == [[4, 8, 4]]
    assert "entropy" not in set(found["kind"])
    # middles 0, 1, 2.5 with |delta| 0, log 2, log(2) / 2: pairwise slopes log 2, log(2) / 5, -log(2) / 3
    assert bucket.position_slope(found) == pytest.approx(LOG(2) / 5, rel=1e-6)


@SOME
@given(CHUNKS, st.lists(st.integers(0, 7), max_size=4))
def test_buckets_of_parts_add_up(frame: pd.DataFrame, borders: list[int]) -> None:
    frame = frame.assign(**{place: (frame["sequence"] % 3).astype("int32") for place in PLACES})
    whole = bucket.bucket_sums(mismatch_token(frame))
    parts = [bucket.bucket_sums(mismatch_token(part)) for part in cut(frame, borders)]
    merged = reduce(bucket.merge_buckets, parts)
    for kind, one in whole.items():
        assert (merged[kind].n == one.n).all() and (merged[kind].equal == one.equal).all()
        assert (merged[kind].abs_counts == one.abs_counts).all()
        assert (merged[kind].largest == one.largest).all()
        # n 2**-52 sum |x|; k1 has the largest terms, at most 10
        assert np.abs(merged[kind].sums - one.sums).max() <= len(frame) ** 2 * 10 * 2.0**-52
        assert one.n.sum() == len(frame)


def test_two_plots_are_needed() -> None:
    # noise of the same size in every logit: log p moves by ~(1 - p), p by ~p (1 - p)
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((20_000, 8)) * 3
    noisy = logits + generator.standard_normal(logits.shape) * 1e-3
    a, b = (x[:, 0] - np.log(np.exp(x).sum(axis=1)) for x in (logits, noisy))
    found = buckets_of(chunk(a.tolist(), b.tolist(), [10] * 2000))
    probs = found[found["kind"] == "prob"].set_index("lo")
    assert probs.loc[0.001, "abs_mean"] > 5 * probs.loc[0.9, "abs_mean"]
    assert probs.loc[0.3, "prob_abs_mean"] > 5 * probs.loc[0.001, "prob_abs_mean"]


def corrections_of(frame: pd.DataFrame, *corrections: Correction) -> pd.DataFrame:
    return correction.correction_table(correction.correction_sums(mismatch_token(frame), corrections)).set_index(
        ["level", "metric"]
    )


def test_corrections_by_hand() -> None:
    # rho 4 and 1 in one response, 1/4, 1/2 and 2 in the other, one response that is not finite
    a = [LOG(0.1), -1.0, LOG(0.4), LOG(0.4), LOG(0.1), -1.0]
    b = [LOG(0.4), -1.0, LOG(0.1), LOG(0.2), LOG(0.2), -math.inf]
    found = corrections_of(
        chunk(a, b, [2, 3, 1]),
        Correction("token", 0.4, 3.0, veto=0.3),
        Correction("sequence", 0.3, 3.0),
        Correction("geometric", 0.7, 1.5),
    )
    value = found["value"]
    assert value["token", "tis_trunc_frac_high"] == pytest.approx(1 / 5)
    assert value["token", "tis_trunc_frac_low"] == pytest.approx(1 / 5)
    assert value["token", "tis_weight_mean_before"] == pytest.approx(7.75 / 5, rel=1e-6)
    assert value["token", "tis_weight_mean_after"] == pytest.approx(6.75 / 5, rel=1e-6)
    assert value["token", "mask_frac"] == pytest.approx(2 / 5)
    assert value["token", "seq_mask_frac"] == 1.0
    assert value["token", "veto_frac"] == 0.5
    # products 4 and 1/4
    assert value["sequence", "tis_trunc_frac_high"] == value["sequence", "tis_trunc_frac_low"] == 0.5
    assert value["sequence", "tis_weight_mean_after"] == pytest.approx(3.25 / 2, rel=1e-6)
    assert value["sequence", "mask_frac"] == value["sequence", "seq_mask_frac"] == 1.0
    # geometric means 2 and (1/4)^(1/3) = 0.63
    assert value["geometric", "tis_weight_mean_before"] == pytest.approx((2 + 0.25 ** (1 / 3)) / 2, rel=1e-6)
    assert value["geometric", "mask_frac"] == 1.0
    assert set(found["sequences"]) == {2} and set(found["tokens"]) == {5}


@SOME
@given(CHUNKS, st.lists(st.integers(0, 7), max_size=4))
def test_corrections_of_parts_add_up_to_the_bit_and_wider_bounds_cut_less(
    frame: pd.DataFrame, borders: list[int]
) -> None:
    corrections = (Correction("token", 0.9, 1.1), Correction("token", 0.5, 2.0), Correction("geometric", 0.999, 1.001))
    whole = correction.correction_sums(mismatch_token(frame), corrections)
    parts = [correction.correction_sums(mismatch_token(part), corrections) for part in cut(frame, borders)]
    assert reduce(correction.merge_corrections, parts) == whole
    table = correction.correction_table(whole).set_index(["level", "high", "metric"])["value"]
    for metric in ("mask_frac", "seq_mask_frac", "tis_trunc_frac_high", "tis_trunc_frac_low"):
        assert table["token", 2.0, metric] <= table["token", 1.1, metric]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("word", 0.5, 2.0), "level = 'word': must be one of token, sequence, geometric"),
        (("token", 1.5, 2.0), "low = 1.5, high = 2.0: must be 0 <= low <= 1 <= high"),
        (("token", 0.5, 0.9), "must be 0 <= low <= 1 <= high"),
        (("token", 0.5, 2.0, 2.0), "veto = 2.0: must lie between 0 and 1"),
    ],
)
def test_corrections_that_are_none(arguments: tuple[str, float, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Correction(*arguments)


def test_clip_floor_by_hand() -> None:
    delta = np.log(np.array([1.3, 1.3, 0.7, 0.7, 1.0, 4.0]))
    advantages = np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    assert clip_floor.clip_floor_band(delta, 0.2, 0.2) == pytest.approx(5 / 6)
    assert clip_floor.clip_floor_band(delta, 0.2, 0.5) == pytest.approx(3 / 6)
    # A > 0 above, A < 0 below
    assert clip_floor.clip_floor(delta, advantages, 0.2, 0.2) == pytest.approx(2 / 6)
    assert clip_floor.clip_floor(delta, advantages, 0.2, 0.2, dual=3.0) == pytest.approx(3 / 6)
    assert math.isnan(clip_floor.clip_floor_band(np.zeros(0), 0.2, 0.2))


@pytest.mark.parametrize(("sigma", "expected"), [(0.0, 0.0), (0.05, 1.3e-4), (0.1, 0.045), (0.2, 0.31)])
def test_the_gaussian_floor(sigma: float, expected: float) -> None:
    # the published rounded numbers
    assert clip_floor.gaussian_floor_band(sigma, 0.2, 0.2) == pytest.approx(expected, rel=0.05)
    delta = np.random.default_rng(0).standard_normal(1_000_000) * sigma - sigma**2 / 2
    sampled = clip_floor.clip_floor_band(delta, 0.2, 0.2)
    # five binomial standard errors
    error = 5 * math.sqrt(max(sampled, 1e-6) * 1e-6)
    assert sampled == pytest.approx(clip_floor.gaussian_floor_band(sigma, 0.2, 0.2), abs=error)


def test_the_gaussian_rule_on_gaussian_noise() -> None:
    generator = np.random.default_rng(0)
    sigma, length = 0.05, 100
    delta = generator.standard_normal(200_000) * sigma - sigma**2 / 2
    frame = chunk((np.full(len(delta), -3.0)).tolist(), (-3.0 + delta).tolist(), [length] * 2000)
    table = mismatch.tables([mismatch.whole(mismatch.measure([frame]))]).update
    found = clip_floor.gaussian_comparison(table).set_index("metric")
    for metric, tolerance in {"k1": 0.5, "k2": 0.02, "k3": 0.02, "abs_mean": 0.01, "chi2_token": 0.5}.items():
        # k1 and chi2 have a standard error of sigma / sqrt n = 9 % of k1, 4.5 % of chi2's half
        assert found.loc[metric, "measured"] == pytest.approx(found.loc[metric, "gaussian"], rel=tolerance), metric
    # e^-0.25; heavy tails of products: the sample of 2,000 knows it to a few per cent
    assert found.loc["ess_seq", "measured"] == pytest.approx(math.exp(-0.25), rel=0.1)
    assert found.loc["ess_seq", "gaussian"] == pytest.approx(math.exp(-0.25), rel=0.01)


def test_clip_steps_agree_with_what_training_recorded(deterministic_run: Path, native_run: Path) -> None:
    for run in (deterministic_run, native_run):
        found = clip_floor.clip_steps(run).set_index(["iteration", "epoch", "minibatch"])
        recorded = reader.read_steps(run).set_index(["iteration", "epoch", "minibatch"])
        assert found.index.tolist() == recorded.index.tolist()
        assert found["clip_fraction"].tolist() == recorded["clip_fraction"].tolist()
        assert found["tokens"].tolist() == recorded["tokens"].tolist()
        # float noise of 1e-5 nats leaves no band of 0.2
        assert found["clip_floor"].tolist() == [0.0] * len(found)
        first = found.xs((0, 0), level=["epoch", "minibatch"])
        assert first["clip_excess"].tolist() == [0.0] * len(first)
        assert found["clip_excess"].max() > 0.0
    assert (found["sigma"] > 0).all() and not clip_floor.clip_steps(deterministic_run)["sigma"].any()


def test_exact_runs_have_no_mismatch_and_native_runs_do(deterministic_run: Path, native_run: Path) -> None:
    exact = mismatch.summary(deterministic_run).set_index(["metric", "reduction"])
    judged = exact[exact["ideal"].notna()]
    assert judged["value"].tolist() == judged["ideal"].tolist()
    native = mismatch.summary(native_run).set_index(["metric", "reduction"])["value"]
    assert native["frac_bitwise_equal", "token_mean"] < 1.0 and native["k3", "token_mean"] > 0.0
    assert native["abs_max", "token"] > 0.0 and native["ulp_max", "token"] > 0.0


@pytest.mark.parametrize("kind", ["deterministic", "native"])
def test_the_numbers_are_those_that_training_counted(kind: str, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(f"{kind}_run")
    measured = list(mismatch.measure(run_pairs(run)))
    tables = mismatch.tables(measured)
    recorded = reader.read_iterations(run)
    assert [one.iteration for one in measured] == recorded["iteration"].tolist()
    for one, row in zip(measured, recorded.itertuples(), strict=True):
        found = tables.update[tables.update["iteration"] == one.iteration].set_index(["metric", "reduction"])["value"]
        tokens = found["n_tokens", "count"]
        assert tokens == row.tokens
        equal = found["frac_bitwise_equal", "token_mean"] * tokens
        assert tokens - round(equal) == row.unequal_old_rollout_logprobs
        # recorded as a float32 difference
        assert np.float32(found["abs_max", "token"]) == np.float32(row.max_abs_old_rollout)
    counted = parity.parity(run)
    whole = mismatch.whole(measured).mismatch
    assert whole.tokens == counted.tokens
    unequal = sum(int((~mismatch_token(part)["bitwise_equal"]).sum()) for part in run_pairs(run))
    assert unequal == counted.unequal_old_rollout_logprobs


@pytest.mark.parametrize("rows", [3, 50])
def test_the_tables_of_a_run_do_not_depend_on_the_chunks(native_run: Path, rows: int) -> None:
    whole = mismatch.tables(mismatch.measure(run_pairs(native_run)))
    cut_up = mismatch.tables(mismatch.measure(run_pairs(native_run, rows=rows)))
    pd.testing.assert_frame_equal(cut_up.update, whole.update, check_exact=True)
    pd.testing.assert_frame_equal(cut_up.correction, whole.correction, check_exact=True)
    # sums of buckets are floats: n 2**-52 sum |x|
    pd.testing.assert_frame_equal(cut_up.bucket, whole.bucket, rtol=1e-9, atol=1e-20)
    assert mismatch.whole(mismatch.measure(run_pairs(native_run))).iteration == -1


def test_tables_are_written_and_come_back(tmp_path: Path) -> None:
    chunks = [random_chunk(0, [3, 2], 0.1, iteration) for iteration in range(3)]
    rows = mismatch.write_parquet(mismatch.sequence_tables(chunks), tmp_path / "sequences.parquet")
    assert rows == 6
    found = pd.read_parquet(tmp_path / "sequences.parquet")
    expected = pd.concat(list(mismatch.sequence_tables(chunks)), ignore_index=True)
    pd.testing.assert_frame_equal(found, expected, check_dtype=False)
    assert mismatch.write_parquet(mismatch.token_tables(chunks), tmp_path / "tokens.parquet") == 15
    with pytest.raises(UserError, match="already exists"):
        mismatch.write_parquet(mismatch.token_tables(chunks), tmp_path / "tokens.parquet")
    with pytest.raises(UserError, match="there is nothing to write"):
        mismatch.write_parquet([], tmp_path / "none.parquet")
    with pytest.raises(UserError, match="cannot be written"):
        mismatch.write_parquet(mismatch.token_tables(chunks), tmp_path / "no" / "folder.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sequences.parquet", "tokens.parquet"]


def test_labels_and_the_iteration_come_first() -> None:
    chunks = [random_chunk(0, [3, 2], 0.1, iteration) for iteration in range(2)]
    found = mismatch.tables(mismatch.measure(chunks), {"run": "a", "pair": "rollout_vs_old"})
    for table in (found.update, found.bucket, found.correction):
        assert list(table.columns[:3]) == ["run", "pair", "iteration"] and set(table["iteration"]) == {0, 1}
    assert wide(found.update)[["run", "pair", "iteration"]].to_numpy().tolist() == [
        ["a", "rollout_vs_old", 0],
        ["a", "rollout_vs_old", 1],
    ]


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    for empty in (lambda: mismatch.summary_of([]), lambda: mismatch.tables([]), lambda: mismatch.whole([])):
        with pytest.raises(UserError, match="there is no token to compare"):
            empty()


def test_the_command_prints_the_summary(native_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mismatch.main([str(native_run)]) == 0
    assert "frac_bitwise_equal" in capsys.readouterr().out
    run = synthetic_run.make_run(tmp_path / "a")
    assert mismatch.main([str(run), str(run), str(run)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "3 paths: one run or two, or files with --columns" in said.err
