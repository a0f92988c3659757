"""Faults made on purpose by hand: versions, what the trainer receives, encodings; and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_repro.base.errors import UserError
from ppo_repro.base.ranks import ALONE
from ppo_repro.base.seeding import words
from ppo_repro.base.watcher import Watcher
from ppo_repro.config.mismatch import MismatchConfig, TrainerFaults
from ppo_repro.runs.prepare import prepare
from ppo_repro.sampler import Completion, Request, Sampling
from ppo_repro.sampling.faults.logits import biased
from ppo_repro.sampling.faults.sampler import FlippingSampler, flip_bit, with_faults
from ppo_repro.sampling.faults.trainer import dropout, received
from ppo_repro.tasks.tokenizer import train_bpe
from tests.support.bare import bare_rollout
from tests.support.models import CONFIGS, small_model
from tests.support.runs import small_config
from tests.support.thread_ranks import Thread, threads


class NoWarmStart(Watcher):
    def step(self, name: str, *_: object) -> None:
        assert name != "warm start"


def test_what_the_trainer_receives() -> None:
    rollout = bare_rollout(torch.tensor([3, 2, 1]), reasons=("stop", "length", "stop"))
    tokenizer = train_bpe(["12 12 12 3"], 8)
    assert received(TrainerFaults(), rollout, tokenizer) is rollout
    ends = received(TrainerFaults(eos_in_loss=False), rollout, tokenizer)
    assert ends.in_losses is not None
    assert ends.in_losses.tolist() == [True, True, False, True, True, False]
    assert received(TrainerFaults(temperature_scored=False), rollout, tokenizer) == replace(rollout, temperature=1.0)
    assert received(TrainerFaults(top_p_scored=False), rollout, tokenizer).kept_tokens.shape == (6, 0)
    (one,) = tokenizer("1", add_special_tokens=False)["input_ids"]
    faults = TrainerFaults(prompt_before="1", prompt_after="1", padding_leak=4)
    pads = (tokenizer.pad_token_id,) * 2
    assert received(faults, rollout, tokenizer).prompts.prompt_ids[0] == (*pads, one, 5, 6, one)


@settings(max_examples=20)
@given(st.integers(1, 7), st.sampled_from([0.1, 0.5]))
def test_dropout_depends_on_token_and_stream_alone(cut: int, p: float) -> None:
    hook = dropout(p, 7)
    hidden, tokens = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8) * 3
    whole = hook(hidden, tokens, ("scoring", 2))
    parts = [hook(hidden[i], tokens[i], ("scoring", 2)) for i in (slice(0, cut), slice(cut, 8))]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, hook(hidden, tokens, ("update", 2)))
    for row, token in enumerate(tokens.tolist()):
        drawn = words(16, "dropout", 7, "scoring", 2, token)
        expected = [0.0 if int(word) / 2**64 < p else 1 / (1 - p) for word in drawn]
        assert (whole[row] / hidden[row]).tolist() == pytest.approx(expected, rel=1e-6)
    assert dropout(0.0, 7)(hidden, tokens, ("scoring", 2)) is hidden


def test_a_biased_token_is_biased_everywhere() -> None:
    logits = torch.randn(50, 400, generator=torch.Generator().manual_seed(2))
    offsets = (biased(logits, 7, 2.0, 0.3) - logits).double()
    assert offsets.std(0).max() < 1e-6, "the same at every position"
    # 5 standard errors of the standard deviation of 400 normal numbers
    assert abs(float(offsets.mean(0).std()) / 0.6 - 1) < 5 / math.sqrt(800)
    assert not torch.equal(biased(logits, 7, 2.0, 0.3), biased(logits, 8, 2.0, 0.3))


class Echo:
    """A sampler that answers with the prompt."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return [Completion.uncut(request.prompt_ids, [-1.0] * len(request.prompt_ids), "stop") for request in requests]


@pytest.mark.parametrize(("processes", "count"), [(1, 5), (2, 5), (3, 5), (4, 2), (2, 0)])
@pytest.mark.parametrize("iteration", [0, 1])
def test_one_token_is_flipped_whatever_the_number_of_processes(processes: int, count: int, iteration: int) -> None:
    requests = [Request((10 + i, 20 + i), i) for i in range(count)]

    def flipped(rank: Thread) -> list[tuple[int, ...]]:
        state: Any = SimpleNamespace(iteration=iteration)
        mine = [requests[i] for i in rank.mine(count)]
        completions = FlippingSampler(Echo(), state, rank, range(2, 40)).generate(mine, Sampling())
        return [tuple(completion.response_ids) for completion in completions]

    with ThreadPoolExecutor(processes) as pool:
        found = [ids for part in pool.map(flipped, threads(processes)) for ids in part]
    expected = [request.prompt_ids for request in requests]
    if count and iteration == 0:
        expected[0] = (9, 20)
    assert found == expected


def test_no_token_is_flipped_to_one_that_is_special_ends_a_response_or_is_unknown() -> None:
    tokenizer = train_bpe(["12 12 12 3"], 8)
    known = sorted(tokenizer.get_vocab().values())
    assert known[:2] == sorted(tokenizer.all_special_ids) == [0, 1]
    end, last = 4, known[-1]
    state: Any = SimpleNamespace(iteration=0, policy=SimpleNamespace(config=SimpleNamespace(vocab_size=last)))
    sampler = with_faults(MismatchConfig(flip="token"), Echo(), state, tokenizer, {1, end}, ALONE)

    def flipped(token: int) -> int:
        (completion,) = sampler.generate([Request((token, 0, 1), 0)], Sampling())
        assert completion.response_ids[1:] == (0, 1)
        return completion.response_ids[0]

    found = {token: flipped(token) for token in range(last + 1)}
    assert set(found.values()).isdisjoint({0, 1, end, last})
    assert found == {token: max(token - 1, 2) for token in range(last + 1)} | {2: 3, end + 1: end - 1}


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_flipped_bit_is_not_of_an_embedding(family: str) -> None:
    policy = small_model(CONFIGS[family](), 0)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    flip_bit(policy)
    (changed,) = (name for name, weight in policy.named_parameters() if not torch.equal(weight, before[name]))
    assert ".layers.0." in changed or ".h.0." in changed


TURNS = "task={kind: python, path: task.py, num_eval_prompts: 5, max_turns: 2}"
REFUSED = {
    ("mismatch.trainer.top_p_scored=false",): "top_p_scored = false needs rollout.top_k or rollout.top_p",
    ("mismatch.trainer.temperature_scored=false",): "temperature_scored = false needs a rollout.temperature other",
    ("mismatch.trainer.retokenize=1", "rollout.top_k=3"): "retokenize needs rollout.top_k = 0 and rollout.top_p = 1",
    ("mismatch.flip=token", "rollout.top_k=3"): "flip = token needs rollout.top_k = 0 and rollout.top_p = 1",
    ("mismatch.flip=token", "rollout.top_p=0.9"): "flip = token needs rollout.top_k = 0 and rollout.top_p = 1",
    ("mismatch.flip=token", TURNS): "flip = token needs task.max_turns = 1",
    ("mismatch.sampler.token_bias=1", "rollout.engine.kind=sglang"): "token_bias needs rollout.engine.kind = torch",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=lambda o: " ".join(o))
def test_what_has_no_effect_or_contradicts_itself_is_refused(overrides: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=f"mismatch.*{REFUSED[overrides]}"):
        small_config(*overrides)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("mismatch.trainer.padding_leak=1000", "has 1000 tokens in training"),
        ("rollout.top_k=9999", "rollout.top_k = 9999: "),
        ("ppo.replay_routes=true", "needs a mixture of experts"),
    ],
)
def test_what_does_not_go_with_the_model_is_said_before_the_warm_start(option: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        prepare(small_config(option), NoWarmStart())
