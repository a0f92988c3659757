"""Each fault, made on a softmax over random logits, has its own name in the diagnosis.

`tests/runs/test_faults.py` makes the faults of a trainer with real models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro import testing
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.logprob_pairs import PAIR, TOKEN_KEY
from ppo_repro.testing.advice import ADVICE
from ppo_repro.testing.diagnosis import Diagnosis, diagnose_chunks
from tests.support.json_lines import write_lines

ITERATIONS, SEQUENCES, LONGEST, VOCAB, EOS = 4, 24, 20, 89, 1
LOGPROBS = ("logprobs_a", "logprobs_b", "logprobs_b_again")


def diagnose(pairs: pd.DataFrame) -> Diagnosis:
    return diagnose_chunks([pairs])


class Sampled:
    """Responses to random logits [tokens, VOCAB], and the frame of what sampler and trainer computed for them."""

    def __init__(self, seed: int, temperature: float = 1.0, top_k: int = VOCAB, bias: float = 0.0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        count = ITERATIONS * SEQUENCES
        self.lengths = torch.randint(LONGEST // 2, LONGEST + 1, (count,), generator=self.generator)
        self.logits = 3.0 * self.normal(int(self.lengths.sum()), VOCAB)
        z = (self.logits + bias * self.normal(VOCAB)) / temperature
        kept = z >= z.topk(top_k).values[:, -1:]
        self.ids = torch.multinomial(z.masked_fill(~kept, -math.inf).softmax(1), 1, generator=self.generator)
        mass = (z.softmax(1) * kept).sum(1).log() if top_k < VOCAB else torch.zeros(len(z))
        owner = np.repeat(np.arange(count), self.lengths)
        self.frame = pd.DataFrame(
            {
                "iteration": (owner // SEQUENCES).astype(np.int32),
                "sequence": (owner % SEQUENCES).astype(np.int32),
                "position": np.concatenate([np.arange(n, dtype=np.int32) for n in self.lengths]),
                "token_id": self.ids[:, 0].numpy().astype(np.int32),
                "logprobs_a": (self.of_ids(z) - mass).numpy(),
                "log_kept_mass": mass.numpy(),
                "pad_length": (LONGEST - self.lengths.numpy()[owner]).astype(np.int32),
                "steps_since_sync": np.int32(0),
                "prompt_differs": np.int32(0),
            }
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def of_ids(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(1).gather(1, self.ids)[:, 0]

    def pairs(self, logits: Tensor | None = None, again: Tensor | None = None) -> pd.DataFrame:
        """With the trainer's log-probs of `logits`; it scores twice."""
        logits = self.logits if logits is None else logits
        p = logits.softmax(1)
        return self.frame.assign(
            token_id_b=self.frame["token_id"],
            logprobs_b=self.of_ids(logits).numpy(),
            logprobs_b_again=self.of_ids(logits if again is None else again).numpy(),
            entropies=-(p * logits.log_softmax(1)).sum(1).numpy(),
            prob_sq_sums=p.square().sum(1).numpy(),
        )

    def rows(self, column: str) -> Tensor:
        """A column of the frame as float32 [tokens, 1]."""
        return torch.tensor(self.frame[column].to_numpy(np.float32))[:, None]


def native() -> pd.DataFrame:
    s = Sampled(0)
    return s.pairs(s.logits * (1 + 2**-22 * s.normal(len(s.logits), 1)))


def moved(change: Callable[[np.ndarray, pd.DataFrame], np.ndarray]) -> pd.DataFrame:
    """The sampler's log-probs come to other tokens."""
    pairs = Sampled(1).pairs()
    return pairs.assign(logprobs_a=change(pairs["logprobs_a"].to_numpy(), pairs))


def shuffled(a: np.ndarray, pairs: pd.DataFrame) -> np.ndarray:
    parts = [a[places] for places in pairs.groupby(["iteration", "sequence"], sort=True).indices.values()]
    return np.concatenate(parts[::-1])


def forced_eos() -> pd.DataFrame:
    """A response at the limit gets an end token instead of its last one, with that one's log-prob."""
    s = Sampled(2)
    last = (s.rows("position") == LONGEST - 1)[:, 0].numpy()
    s.ids[torch.from_numpy(last)] = EOS
    s.frame.loc[last, "token_id"] = EOS
    return s.pairs()


def stale(step: float, every: int = 99) -> pd.DataFrame:
    """The trainer's logits go on with each iteration; the sampler gets its weights every `every`-th time."""
    s = Sampled(3)
    late = s.rows("iteration") % every
    pairs = s.pairs(s.logits + step * late * s.normal(*s.logits.shape))
    return pairs.assign(steps_since_sync=late[:, 0].numpy().astype(np.int32))


def dropout(rate: float) -> pd.DataFrame:
    s = Sampled(4)
    first, second = (s.logits + rate * s.normal(*s.logits.shape) for _ in range(2))
    return s.pairs(first, second)


def padding_leak() -> pd.DataFrame:
    s = Sampled(5)
    return s.pairs(s.logits + 0.1 * s.rows("pad_length") * s.normal(*s.logits.shape))


def rounded(dtype: torch.dtype) -> pd.DataFrame:
    s = Sampled(6)
    return s.pairs(s.logits.to(dtype).float())


def coarse_logprobs() -> pd.DataFrame:
    pairs = rounded(torch.bfloat16)
    b = torch.tensor(pairs["logprobs_b"]).bfloat16().float().numpy()
    return pairs.assign(logprobs_b=b, logprobs_b_again=b)


def coarse_logprobs_of_certain_tokens() -> pd.DataFrame:
    """Some tokens are certain on both sides: every format has their log-prob, 0."""
    pairs = coarse_logprobs()
    certain = np.arange(len(pairs)) % 20 == 0
    return pairs.assign(**{name: np.where(certain, 0, pairs[name]) for name in LOGPROBS})


def retokenized() -> pd.DataFrame:
    """From the middle on, every second response has other tokens on the trainer's side."""
    s = Sampled(7)
    other = ((s.rows("sequence") % 2 == 0) & (s.rows("position") >= LONGEST // 3))[:, 0]
    pairs = s.pairs()
    s.ids = torch.where(other[:, None], (s.ids + 7) % VOCAB, s.ids)
    return pairs.assign(token_id_b=s.ids[:, 0].numpy().astype(np.int32), logprobs_b=s.of_ids(s.logits).numpy())


# how it is made, and the verdict with every column
FAULTS: dict[str, tuple[Callable[[], pd.DataFrame], str]] = {
    "temperature 0.9": (lambda: Sampled(8, 0.9).pairs(), "temperature"),
    "temperature 2": (lambda: Sampled(9, 2.0).pairs(), "temperature"),
    "top-k 5": (lambda: Sampled(10, top_k=5).pairs(), "truncated_sampling"),
    "rolled on": (lambda: moved(lambda a, _: np.roll(a, 1)), "off_by_one"),
    "rolled back": (lambda: moved(lambda a, _: np.roll(a, -1)), "off_by_one"),
    "shuffled": (lambda: moved(shuffled), "shuffled"),
    "zero fill": (lambda: moved(lambda a, p: np.where(p["position"] < LONGEST // 2, a, 0)), "zero_filled"),
    "forced EOS": (forced_eos, "unknown"),
    "stale": (lambda: stale(0.1), "stale_weights"),
    "stale, sync every 2": (lambda: stale(1e-3, 2), "stale_weights"),
    "token bias": (lambda: Sampled(11, bias=0.1).pairs(), "token_bias"),
    "dropout": (lambda: dropout(0.1), "dropout"),
    "padding leak": (padding_leak, "padding_leak"),
    "bfloat16": (lambda: rounded(torch.bfloat16), "unknown"),
    "bfloat16 log-probs": (coarse_logprobs, "reduced_precision"),
    "bfloat16 log-probs, some 0": (coarse_logprobs_of_certain_tokens, "reduced_precision"),
    "retokenized": (retokenized, "retokenization"),
}
# what ids, positions and log-probs tell alone, and what they cannot tell
ALONE = {"off_by_one", "shuffled", "zero_filled", "reduced_precision"}
NEED_A_COLUMN = (
    *("retokenization", "other_prompt", "truncated_sampling", "temperature", "padding_leak", "dropout"),
    *("stale_weights", "token_bias"),
)


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_or_unknown_and_no_other(name: str) -> None:
    make, verdict = FAULTS[name]
    pairs = make()
    found, alone = diagnose(pairs), diagnose(pairs[PAIR])
    assert (found.verdict, found.untested, found.needed) == (verdict, (), ""), found.evidence
    assert found.advice == ADVICE[found.verdict].sentence, found.evidence
    assert found.tier not in ("T0", "T1", "T2")
    expected = (verdict, ()) if verdict in ALONE else ("unknown", NEED_A_COLUMN)
    assert (alone.verdict, alone.untested) == expected, alone.evidence
    assert all(column in alone.needed for column in ("entropies", "token_id_b", "pad_length")) == bool(alone.untested)


DUMPED = {"logprobs_a": "rollout_logprobs", "logprobs_b": "old_logprobs"}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_from_a_file(name: str, tmp_path: Path) -> None:
    make, verdict = FAULTS[name]
    make().rename(columns=DUMPED).to_parquet(tmp_path / "dump.parquet")
    found = testing.diagnose(tmp_path / "dump.parquet")
    assert (found.verdict, found.untested, found.needed) == (verdict, (), ""), found.evidence


def test_a_run_and_its_own_table_have_one_cause(native_run: Path) -> None:
    found, of_frame = testing.diagnose(native_run), testing.diagnose(reader.read_tokens(native_run), "ppo_repro")
    assert (found.verdict, found.tier) == (of_frame.verdict, of_frame.tier) == ("floating_point_noise", "T2")
    assert found.evidence["repeat_over_delta"] > 0, "a run records a second pass of the trainer"
    assert math.isnan(of_frame.evidence["repeat_over_delta"])
    with pytest.raises(UserError, match="leave names out"):
        testing.diagnose(native_run, testing.Names("a", "b"))


def responses_of(pairs: pd.DataFrame) -> list[dict[str, object]]:
    """Rows of a dump; a number of the whole response is one number."""
    of_response, rows = ["pad_length", "steps_since_sync", "prompt_differs"], []
    names = DUMPED | {"token_id": "response_ids"}
    for (iteration, _), tokens in pairs.groupby(["iteration", "sequence"]):
        lists = tokens.rename(columns=names).drop(columns=[*TOKEN_KEY, *of_response]).to_dict("list")
        rows.append({"iteration": iteration, **lists, **tokens[of_response].iloc[0].to_dict()})
    return rows


def test_responses_of_a_file_have_numbers_of_their_own(tmp_path: Path) -> None:
    for make, verdict in ((padding_leak, "padding_leak"), (lambda: stale(0.1), "stale_weights")):
        rows = responses_of(make())
        found = testing.diagnose(write_lines(tmp_path / "a.jsonl", rows))
        assert (found.verdict, found.untested) == (verdict, ())


def test_a_temperature_that_only_the_sampler_has_is_named_from_a_file(tmp_path: Path) -> None:
    names = DUMPED | {"prob_sq_sums": "sum_pi_squared", "entropies": "entropys"}  # verl's
    pairs = Sampled(13, 0.8).pairs()[[*PAIR, "entropies", "prob_sq_sums"]]
    pairs.rename(columns=names).to_parquet(tmp_path / "dump.parquet")
    found = testing.diagnose(tmp_path / "dump.parquet")
    assert found.verdict == "temperature"
    assert found.evidence["temperature_ratio"] == pytest.approx(0.8, rel=0.02)


@pytest.mark.parametrize(
    ("make", "column", "untested"),
    [
        (lambda: retokenized().drop(columns="logprobs_b_again"), "token_id_b", "retokenization"),
        (padding_leak, "pad_length", "padding_leak"),
        (lambda: Sampled(8, 0.9).pairs(), "entropies", "temperature"),
        (lambda: Sampled(8, 0.9).pairs(), "prob_sq_sums", "temperature"),
    ],
)
def test_a_column_that_some_responses_of_a_file_lack_tests_nothing(
    make: Callable[[], pd.DataFrame], column: str, untested: str, tmp_path: Path
) -> None:
    rows = responses_of(make())
    for row in rows[::SEQUENCES]:  # one of each iteration
        del row[column]
    found = testing.diagnose(write_lines(tmp_path / "a.jsonl", rows))
    assert found.verdict == "unknown"
    assert untested in found.untested


def test_a_column_that_is_the_same_everywhere_tests_nothing() -> None:
    pairs = rounded(torch.bfloat16).assign(pad_length=3, steps_since_sync=1)
    assert diagnose(pairs).untested == ("padding_leak", "stale_weights")
    assert diagnose(pairs).needed == "pad_length of each row, some of them 0; steps_since_sync, some of them 0"


@pytest.mark.parametrize(("differ", "verdict"), [(10, "unknown"), (20, "padding_leak")])
def test_a_thousand_sequences_in_a_group_are_counted(differ: int, verdict: str) -> None:
    """Of 1,100 sequences 600 are padded. 10 that differ are padded by chance once in 430 times, 20 once in 190,000."""
    sequence = np.arange(1100)
    pairs = pd.DataFrame(
        {
            "iteration": 0,
            "sequence": sequence,
            "position": 0,
            "token_id": 1,
            "logprobs_a": np.full(1100, -1.0, np.float32),
            "logprobs_b": np.where(sequence < 1100 - differ, -1.0, -2.0).astype(np.float32),
            "pad_length": np.where(sequence < 500, 0, 3),
        }
    )
    assert diagnose(pairs).verdict == verdict


def test_the_mass_of_one_response_that_is_missing_leaves_truncation_untested() -> None:
    pairs = Sampled(10, top_k=5).pairs()
    pairs.loc[0, "log_kept_mass"] = np.nan
    assert (diagnose(pairs).verdict, diagnose(pairs).untested) == ("unknown", ("truncated_sampling",))


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b / math.log(2),
        np.cumsum,
        lambda b: np.maximum(b, -2.0),
        lambda b: b - 0.3,
        lambda b: np.where(np.arange(len(b)) % 5 == 4, b - 1.0, b),  # the last tokens
        lambda b: np.where(np.arange(len(b)) < 250, b, 0.9 * b),  # from an iteration on: no sign of old weights
    ],
)
def test_what_no_cause_predicts_is_unknown_whatever_columns_say(change: Callable[[np.ndarray], np.ndarray]) -> None:
    generator = np.random.default_rng(5)
    b = -generator.exponential(1.5, 500)
    pairs = made(change(b).tolist(), b.tolist(), [5] * 100).assign(token_id=generator.integers(3, 60, 500))
    pairs["iteration"] = pairs["sequence"] // 50
    others = {"log_kept_mass": 0.0, "pad_length": 3, "entropies": 1.5, "prob_sq_sums": 0.4, "prompt_differs": 1}
    others |= {"logprobs_b_again": pairs["logprobs_b"], "token_id_b": pairs["token_id"] + 1, "steps_since_sync": 0}
    for frame in (pairs, pairs.assign(**others)):
        assert diagnose(frame).verdict == "unknown"


def test_an_iteration_without_a_second_pass_leaves_that_of_the_others() -> None:
    a, b, again = ([-1.0 - 0.01 * k + d for k in range(40)] for d in (0.0, 0.02, -0.02))
    pairs = made(a, b, [10] * 4).assign(logprobs_b_again=np.array(again, np.float32))
    noisy = pairs.assign(logprobs_b=pairs["logprobs_b"] + np.float32(0.03) * (np.arange(40) % 3 - 1).astype(np.float32))
    assert diagnose(noisy).evidence["repeat_over_delta"] > 0
    later = noisy.assign(iteration=1, logprobs_b_again=np.float32("nan"))
    both = pd.concat([noisy, later], ignore_index=True)
    assert diagnose(both).evidence["repeat_over_delta"] == diagnose(noisy).evidence["repeat_over_delta"]


def test_log_probs_above_0_are_said_to_be_none() -> None:
    found = diagnose(made([-1.0, 2.0, -2.0, 1.0], [-1.0, -2.0, -2.0, -1.0], [2, 2]))
    assert (found.verdict, found.advice) == ("unknown", "2 log-probs are above 0; give log-probs in nats.")


def test_where_nothing_is_wrong_nothing_is_named() -> None:
    found = diagnose(Sampled(0).pairs())
    assert (found.verdict, found.tier, found.evidence["k3"]) == ("none", "T0", 0.0)
    found = diagnose(native())
    assert (found.verdict, found.tier) == ("floating_point_noise", "T2")
    assert 0.0 < found.evidence["k3"] < 1e-10


@pytest.mark.parametrize("value", [0.5, 0.9, 1.2])
def test_a_temperature_is_measured(value: float) -> None:
    found = diagnose(Sampled(12, value).pairs())
    # at 1/2 the parabola is exact, which leaves float32; elsewhere a third term of the series
    assert found.evidence["temperature_ratio"] == pytest.approx(value, rel=1e-5 if value == 0.5 else 0.02)


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
    assert (found["abs_mean"], found["abs_max"]) == (0.25, 0.5)
    assert found["frac_bitwise_equal"] == 0.25
    k3 = (math.expm1(0.5) - 0.5 + math.expm1(-0.25) + 0.25 + math.expm1(0.25) - 0.25) / 4
    assert found["k3"] == pytest.approx(k3, rel=1e-12)  # the same numbers in another order


@settings(max_examples=10)
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
    assert expected.evidence["tokens"] == len(pairs)


def test_numbers_that_are_not_finite_are_counted() -> None:
    pairs = made([-1.0, -2.0, math.nan, -1.0], [-1.0, -2.0, -3.0, -math.inf], [2, 2])
    found = diagnose(pairs)
    assert (found.verdict, found.evidence["n_nonfinite"], found.evidence["tokens"]) == ("non_finite", 2.0, 2.0)
    with pytest.raises(UserError, match="no token with two finite log-probs"):
        diagnose(pairs.iloc[2:])


def test_what_is_not_a_frame_of_pairs_is_refused() -> None:
    pairs = made([-1.0, -2.0], [-1.0, -2.5], [2])
    for name in ("iteration", "token_id"):
        with pytest.raises(UserError, match=f"no column '{name}'"):
            diagnose(pairs.drop(columns=name))
    with pytest.raises(UserError, match="logprobs_b is float64: must be float32"):
        diagnose(pairs.astype({"logprobs_b": np.float64}))
    with pytest.raises(UserError, match="iteration 0, sequence 0, position 1 twice"):
        diagnose(pd.concat([pairs, pairs.iloc[1:]]))
