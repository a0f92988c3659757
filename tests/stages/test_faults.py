"""Lags and faults by hand: versions, masks, weights of losses, encodings; and what is refused."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ppo_repro.stages.faults import dropped, training_weights
from ppo_repro.tasks.retokenization import chosen, encode_again

from ppo_repro.errors import UserError
from ppo_repro.models.state import Versions
from ppo_repro.ppo.weights import loss_weights
from ppo_repro.rollout.sampler import biased
from ppo_repro.runs.prepare import prepare
from ppo_repro.seeding import words
from ppo_repro.tasks.tokenizer import decode, spans, train_bpe
from tests.support.runs import small_config

LENGTHS, REASONS = torch.tensor([3, 2, 1]), ("stop", "length", "stop")


def test_older_weights_come_back_and_go() -> None:
    live = {"w": torch.zeros(2)}
    merged: list[float] = []
    versions = Versions(live, 2, lambda: merged.append(float(live["w"][0])))
    for version in range(4):
        live["w"].fill_(version)
        versions.keep(version)
    versions.forget(3)
    assert sorted(versions.kept) == [1, 2, 3]
    with versions.at(1):
        assert live["w"].tolist() == [1.0, 1.0]
    with versions.at(3):
        assert live["w"].tolist() == [3.0, 3.0]
    assert live["w"].tolist() == [3.0, 3.0] and merged == [1.0, 3.0], "the present policy is not loaded"
    versions.forget(4)
    other = Versions({"w": torch.full((2,), 4.0)}, 2)
    other.restore(versions.tensors(), 4)
    assert {v: w["w"].tolist() for v, w in other.kept.items()} == {2: [2.0, 2.0], 3: [3.0, 3.0]}
    with pytest.raises(ValueError, match=r"has older policies \[2, 3\], and the sampler needs \[3, 4\]"):
        other.restore(versions.tensors(), 5)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 4, 1 / 4, 0, 1 / 4, 1 / 4, 0]),
        ("sequence_mean", [1 / 6, 1 / 6, 0, 1 / 6, 1 / 6, 0]),
        ("sequence_sum", [1 / 3, 1 / 3, 0, 1 / 3, 1 / 3, 0]),
    ],
)
def test_an_end_token_has_no_loss(aggregation: str, expected: list[float]) -> None:
    config = small_config(f"ppo.aggregation={aggregation}", "mismatch.trainer.eos_in_loss=false")
    found = training_weights(config, LENGTHS, REASONS, None)
    assert found.tolist() == pytest.approx(expected, rel=1e-6) and found[2] == found[5] == 0
    usual = training_weights(small_config(f"ppo.aggregation={aggregation}"), LENGTHS, REASONS, None)
    assert torch.equal(usual, loss_weights(aggregation, LENGTHS)) and usual.min() > 0
    only_ends = training_weights(config, torch.tensor([1, 1]), ("stop", "stop"), None)
    assert only_ends.tolist() == [0.0, 0.0]


def test_an_end_token_and_a_token_left_out_have_no_loss() -> None:
    config = small_config("mismatch.trainer.eos_in_loss=false")
    counted = torch.tensor([True, False, True, True, True, True])
    found = training_weights(config, LENGTHS, REASONS, counted)
    assert found.tolist() == pytest.approx([1 / 3, 0, 0, 1 / 3, 1 / 3, 0], rel=1e-6)


@settings(max_examples=20)
@given(st.integers(1, 7), st.sampled_from([0.1, 0.5]))
def test_dropout_depends_on_token_and_stream_alone(cut: int, p: float) -> None:
    config = small_config(f"mismatch.trainer.dropout={p}")
    hidden, tokens = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8) * 3
    whole = dropped(config, hidden, tokens, ("scoring", 2))
    parts = [dropped(config, hidden[i], tokens[i], ("scoring", 2)) for i in (slice(0, cut), slice(cut, 8))]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, dropped(config, hidden, tokens, ("update", 2)))
    for row, token in enumerate(tokens.tolist()):
        drawn = words(16, "dropout", config.seed, "scoring", 2, token)
        expected = [0.0 if int(word) / 2**64 < p else 1 / (1 - p) for word in drawn]
        assert (whole[row] / hidden[row]).tolist() == pytest.approx(expected, rel=1e-6)
    assert dropped(small_config(), hidden, tokens, ("scoring", 2)) is hidden


def test_a_biased_token_is_biased_everywhere() -> None:
    logits = torch.randn(50, 400, generator=torch.Generator().manual_seed(2))
    offsets = (biased(logits, 7, 2.0, 0.3) - logits).double()
    assert offsets.std(0).max() < 1e-6, "the same at every position"
    # 5 standard errors of the standard deviation of 400 normal numbers
    assert abs(float(offsets.mean(0).std()) / 0.6 - 1) < 5 / math.sqrt(800)
    assert not torch.equal(biased(logits, 7, 2.0, 0.3), biased(logits, 8, 2.0, 0.3))


def test_an_encoding_by_hand() -> None:
    tokenizer = train_bpe(["12 12 12 3"], 8)
    one, two, both, end = (tokenizer.convert_tokens_to_ids(t) for t in ("1", "2", "12", "<eos>"))
    ids = [one, two, both, end]
    found = encode_again(tokenizer, ids, spans(tokenizer, ids, "1212"), 6, True)
    assert found is not None and found.ids == [both, both, end]
    assert (found.owners, found.sources, found.as_sampled) == ([0, 0, 1, 2], [1, 2, 3], [False, True, True])
    assert found.summed(torch.tensor([-1.0, -2.0, -4.0, -8.0])).tolist() == [-3.0, -4.0, -8.0]
    assert encode_again(tokenizer, ids, spans(tokenizer, ids, "1212"), 2, True) is None, "no room"
    assert encode_again(tokenizer, [0, 0], spans(tokenizer, [0, 0], ""), 6, False) is None, "no text"
    assert [sum(chosen(share, range(2000))) for share in (0.0, 1.0)] == [0, 2000]
    assert abs(sum(chosen(0.25, range(2000))) - 500) < 5 * math.sqrt(2000 * 0.25 * 0.75)


@given(st.lists(st.integers(0, 11), min_size=1, max_size=9))
def test_an_encoding_keeps_text_and_log_prob(drawn: list[int]) -> None:
    tokenizer = train_bpe(["12 12 12 3 é"], 12)
    ids = [token % len(tokenizer) for token in drawn]
    text = decode(tokenizer, ids)
    ended = ids[-1] == tokenizer.eos_token_id
    found = encode_again(tokenizer, ids, spans(tokenizer, ids, text), 40, ended)
    if found is None:
        return
    logprobs = -torch.arange(1.0, len(ids) + 1)
    assert float(found.summed(logprobs).sum()) == float(logprobs.sum())
    assert found.ids[: len(found.ids) - ended] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(found.owners) == len(ids) and all(0 <= source < len(ids) for source in found.sources)
    assert found.owners == sorted(found.owners)
    if found.ids == ids:
        assert all(found.as_sampled)


REFUSED = {
    ("mismatch.trainer.top_p_scored=false",): "top_p_scored = false needs rollout.top_k or rollout.top_p",
    ("mismatch.trainer.temperature_scored=false",): "temperature_scored = false needs a rollout.temperature other",
    ("mismatch.trainer.retokenize=1", "rollout.top_k=3"): "retokenize needs rollout.top_k = 0 and rollout.top_p = 1",
    ("mismatch.trainer.retokenize=1.5",): r"retokenize = 1\.5",
    ("mismatch.trainer.dropout=1",): "dropout = 1",
    ("mismatch.trainer.padding_leak=-1",): "padding_leak = -1",
    ("mismatch.sampler.token_bias=0",): "token_bias = 0",
    ("mismatch.sampler.token_bias=1", "rollout.engine.kind=sglang"): "token_bias needs rollout.engine.kind = torch",
    ("mismatch.sampler.lag=-1",): "lag = -1",
    ("mismatch.sampler.lag=1", "ppo.iterations=1"): "lag needs ppo.iterations of at least 2",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=lambda o: " ".join(o))
def test_what_has_no_effect_or_contradicts_itself_is_refused(overrides: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=f"mismatch.*{REFUSED[overrides]}") as stop:
        small_config(*overrides)
    assert "\n" not in str(stop.value)


def test_nothing_set_is_written_nowhere() -> None:
    assert "mismatch:" not in str(small_config().model_dump(mode="json")) and "'mismatch'" not in str(
        small_config("mismatch.trainer.dropout=0", "mismatch.sampler.lag=0").model_dump(mode="json")
    )
    assert small_config("mismatch.trainer.dropout=0.0").digest() == small_config().digest()
    assert small_config("mismatch.trainer.dropout=0.1").digest() != small_config().digest()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("mismatch.trainer.padding_leak=1000", "has 1000 tokens in training"),
        ("rollout.top_k=9999", "rollout.top_k = 9999: the vocabulary has"),
        ("ppo.replay_routes=true", "needs a mixture of experts"),
    ],
)
def test_what_does_not_go_with_the_model_is_said_before_the_warm_start(option: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        prepare(small_config(option), lambda step, total, loss: pytest.fail("the warm start has begun"))
