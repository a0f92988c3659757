"""Every fault is actually made, and the diagnosis names it and no other, over models and seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.diagnosis.causes import ADVICE
from analysis.diagnosis.diagnose import diagnose, diagnose_chunks
from analysis.diagnosis.evidence import NEEDED, added, measure
from ppo_repro.errors import UserError
from tests.support.cases import mismatch_faults as faults
from tests.support.cases.mismatch_faults import Setting

pytestmark = pytest.mark.usefixtures("row_noise")

Fault = Callable[[Setting], pd.DataFrame]
# fault, cause with every column, causes from ids, places and log-probs alone
UNSHAPED = "stale_weights or dropout or temperature or truncated_sampling or unknown"
SOME_ROWS = "padding_leak or retokenization or stale_weights"
COARSE = f"reduced_precision or {UNSHAPED}"
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "temperature 0.9": (faults.temperature, "temperature", UNSHAPED),
    "temperature 0.5": (partial(faults.temperature, value=0.5), "temperature", UNSHAPED),
    "temperature 1.2": (partial(faults.temperature, value=1.2), "temperature", UNSHAPED),
    "temperature 2": (partial(faults.temperature, value=2.0), "temperature", UNSHAPED),
    "top-p 0.9": (faults.truncated, "truncated_sampling", UNSHAPED),
    "top-k 5": (partial(faults.truncated, top_p=1.0, top_k=5), "truncated_sampling", UNSHAPED),
    "rolled on": (faults.rolled, "off_by_one", "off_by_one"),
    "rolled back": (partial(faults.rolled, by=-1), "off_by_one", "off_by_one"),
    "shuffled": (faults.shuffled, "shuffled", "shuffled"),
    "zero fill": (faults.zero_filled, "zero_filled", "zero_filled"),
    "forced EOS, old log-prob": (faults.forced_eos, "forced_eos", "forced_eos"),
    "forced EOS, 0": (partial(faults.forced_eos, logprob=0.0), "forced_eos", "forced_eos"),
    "stale, lr 1e-3": (faults.stale, "stale_weights", "stale_weights"),
    "stale, lr 1e-2": (partial(faults.stale, learning_rate=1e-2), "stale_weights", "stale_weights"),
    "stale, lr 1e-5, sync 2": (partial(faults.stale, every=2, learning_rate=1e-5), "stale_weights", "stale_weights"),
    "token bias 0.1": (faults.token_bias, "token_bias", "token_bias or stale_weights"),
    "token bias 2": (partial(faults.token_bias, size=2.0), "token_bias", "token_bias or stale_weights"),
    "dropout 0.1": (faults.with_dropout, "dropout", UNSHAPED),
    "dropout 0.01": (partial(faults.with_dropout, rate=0.01), "dropout", UNSHAPED),
    "padding leak": (faults.padding_leak, "padding_leak", SOME_ROWS),
    "bfloat16": (faults.reduced_precision, "reduced_precision", COARSE),
    "float16": (partial(faults.reduced_precision, dtype=torch.float16), "reduced_precision", COARSE),
    "bfloat16 log-probs": (faults.coarse_logprobs, "reduced_precision", "reduced_precision"),
    "retokenized": (faults.retokenized, "retokenization", SOME_ROWS),
}
DETERMINISTIC, NATIVE = Setting("qwen3", "deterministic", 0), Setting("qwen3", "native", 1)
# one of each cause; the long test has all of them
CAUSES = ("top-p 0.9", "rolled on", "shuffled", "zero fill", "forced EOS, 0", "stale, lr 1e-3", "token bias 0.1")
CAUSES += ("temperature 0.9", "dropout 0.1", "padding leak", "bfloat16", "retokenized")
QUICK = [(NATIVE, name) for name in CAUSES] + [(DETERMINISTIC, "temperature 0.9")]
MANY = [Setting(a, m, s) for a in ("qwen3", "gpt2", "llama") for m in ("deterministic", "native") for s in (2, 3, 4)]


def check(setting: Setting, name: str) -> None:
    fault, verdict, with_logprobs_alone = FAULTS[name]
    pairs = fault(setting)
    found = diagnose(pairs)
    assert found.verdict == verdict, found.evidence
    assert found.tier not in ("T0", "T1", "T2") and found.advice == ADVICE[found.causes[0]] and not found.needed
    alone = diagnose(pairs[list(NEEDED)])
    assert alone.verdict == with_logprobs_alone, alone.evidence
    assert bool(alone.needed) == (len(alone.causes) > 1)


def shown(value: Setting | str) -> str:
    return value if isinstance(value, str) else f"{value.architecture}-{value.mode}-{value.seed}"


@pytest.mark.parametrize(("setting", "name"), QUICK, ids=shown)
def test_each_fault_is_named_and_no_other(setting: Setting, name: str) -> None:
    check(setting, name)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", MANY, ids=shown)
def test_each_fault_is_named_in_other_models_and_seeds(setting: Setting) -> None:
    for name in FAULTS:
        check(setting, name)


@pytest.mark.parametrize("setting", [DETERMINISTIC, NATIVE], ids=shown)
def test_where_nothing_is_wrong_nothing_is_named(setting: Setting) -> None:
    found = diagnose(faults.clean(setting))
    deterministic = setting.mode == "deterministic"
    assert (found.verdict, found.tier) == (("none", "T0") if deterministic else ("floating_point_noise", "T2"))
    assert found.evidence["k3"] == 0.0 if deterministic else 0.0 < found.evidence["k3"] < 1e-10


def test_a_temperature_is_measured() -> None:
    for value in (0.5, 0.9, 1.2):
        found = diagnose(faults.temperature(NATIVE, value))
        # at 1/2 the parabola is exact, which leaves float32; elsewhere a third term of the series
        assert found.evidence["temperature_ratio"] == pytest.approx(value, rel=1e-5 if value == 0.5 else 0.02)


def test_what_is_given_narrows_what_is_named() -> None:
    pairs = faults.reduced_precision(NATIVE)
    alone = pairs[list(NEEDED)]
    assert (
        diagnose(alone.assign(steps_since_sync=0)).verdict
        == "reduced_precision or dropout or temperature or truncated_sampling or unknown"
    )
    again = alone.assign(logprobs_b_again=pairs["logprobs_b_again"])
    assert (
        diagnose(again).verdict == "reduced_precision or stale_weights or temperature or truncated_sampling or unknown"
    )
    assert "steps_since_sync" in diagnose(again).needed and "logprobs_b_again" not in diagnose(again).needed


def made(a: list[float], b: list[float], lengths: list[int]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "iteration": 0,
            "sequence": np.repeat(np.arange(len(lengths)), lengths),
            "position": np.concatenate([np.arange(n) for n in lengths]),
            "token_id": 5,
            "logprobs_a": np.array(a, dtype=np.float32),
            "logprobs_b": np.array(b, dtype=np.float32),
        }
    )


def test_evidence_by_hand() -> None:
    # delta = 0.5, -0.25, 0, 0.25; two sequences of two tokens with sums 0.25 and 0.25
    found = diagnose(made([-1.0, -1.0, -2.0, -1.25], [-0.5, -1.25, -2.0, -1.0], [2, 2])).evidence
    assert (found["mean_abs"], found["max_abs"], found["k1"]) == (0.25, 0.5, -0.125)
    assert found["k1_se"] == 0.0  # both sequences have the same mean
    assert found["frac_bitwise_equal"] == 0.25
    k3 = (math.expm1(0.5) - 0.5 + math.expm1(-0.25) + 0.25 + math.expm1(0.25) - 0.25) / 4
    assert found["k3"] == pytest.approx(k3, rel=1e-12)  # the same numbers in another order
    # delta^2 = .25, .0625, 0, .0625: the last tokens hold 1/8 + 1/8 ... of .375
    assert found["left_without_last"] == pytest.approx((0.375 - 0.0625 - 0.0625) / 0.375, rel=1e-12)


def test_the_standard_error_is_that_of_clusters() -> None:
    generator = np.random.default_rng(3)
    lengths = generator.integers(1, 9, 40).tolist()
    b = -generator.exponential(1.0, sum(lengths))
    pairs = made((b - np.repeat(generator.normal(0, 0.3, 40), lengths)).tolist(), b.tolist(), lengths)
    delta = pairs["logprobs_b"].astype(float) - pairs["logprobs_a"].astype(float)
    mean, total = delta.mean(), 0.0
    for sequence in range(40):
        mine = delta[pairs["sequence"] == sequence]
        total += (mine.sum() - mean * len(mine)) ** 2
    expected = math.sqrt(total / len(delta) ** 2 * 40 / 39)
    assert diagnose(pairs).evidence["k1_se"] == pytest.approx(expected, rel=1e-9)  # summed in another order
    assert expected > 1.5 * delta.std() / math.sqrt(len(delta))  # tokens of a sequence are not independent


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.0, 1e-6, 1e-2, 1.0]))
def test_order_of_rows_and_pieces_do_not_matter(seed: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 7, 12).tolist()
    b = -generator.exponential(1.0, sum(lengths))
    pairs = made((b + scale * generator.normal(size=len(b))).tolist(), b.tolist(), lengths)
    pairs["iteration"] = pairs["sequence"] % 3
    expected = diagnose(pairs)
    assert repr(diagnose(pairs.sample(frac=1.0, random_state=seed % 2**31))) == repr(expected)
    parts = [pairs[pairs["iteration"] == i] for i in range(3)]
    assert repr(diagnose_chunks(iter(parts))) == repr(expected)
    assert repr(diagnose_chunks([pd.concat(parts[:2]), parts[2]])) == repr(expected)
    sums = added([measure(part) for part in parts])
    assert 0 <= sums["unequal"] <= sums["tokens"] == len(pairs) and sums["delta_abs"] >= abs(sums["delta"])


def test_numbers_that_are_not_finite_are_counted() -> None:
    pairs = made([-1.0, -2.0, math.nan, -1.0], [-1.0, -2.0, -3.0, -math.inf], [2, 2])
    found = diagnose(pairs)
    assert (found.verdict, found.evidence["nonfinite"], found.evidence["tokens"]) == ("non_finite", 2.0, 2.0)
    with pytest.raises(UserError, match="no token with two finite log-probs"):
        diagnose(pairs.iloc[2:])


def test_what_is_not_a_frame_of_pairs_is_refused() -> None:
    pairs = made([-1.0, -2.0], [-1.0, -2.5], [2])
    with pytest.raises(UserError, match="no column 'token_id'"):
        diagnose(pairs.drop(columns="token_id"))
    with pytest.raises(UserError, match="logprobs_b is float64: must be float32"):
        diagnose(pairs.astype({"logprobs_b": np.float64}))
    with pytest.raises(UserError, match="iteration 0, sequence 0, position 1 twice"):
        diagnose(pd.concat([pairs, pairs.iloc[1:]]))


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b / math.log(2),
        lambda b: np.cumsum(b),
        lambda b: np.maximum(b, -2.0),
        lambda b: b - 0.3,
        lambda b: np.where(np.arange(len(b)) % 5 == 4, b - 1.0, b),  # the last tokens, of several ids
    ],
)
def test_signs_alone_name_nothing(change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Every log-prob is on one side of the other, as after a cut, but not by the mass that a cut keeps."""
    generator = np.random.default_rng(5)
    b = -generator.exponential(1.5, 500)
    pairs = made(change(b).tolist(), b.tolist(), [5] * 100).assign(token_id=generator.integers(3, 60, 500))
    assert diagnose(pairs).verdict.endswith("unknown")
    everything = pairs.assign(log_kept_mass=0.0, steps_since_sync=0, logprobs_b_again=pairs["logprobs_b"])
    everything = everything.assign(entropies=1.5, prob_sq_sums=0.4)
    assert diagnose(everything).verdict in ("unknown", "token_bias")


def test_all_zeros_may_be_greedy_sampling() -> None:
    pairs = made([0.0] * 6, [-0.1, -0.2, -0.3, -2.0, -0.1, -0.2], [3, 3])
    assert diagnose(pairs).verdict == "zero_filled or truncated_sampling"
    assert diagnose(pairs.assign(log_kept_mass=pairs["logprobs_b"])).verdict == "truncated_sampling"
    assert diagnose(pairs.assign(log_kept_mass=np.float32(0.0))).verdict == "zero_filled"
