"""In episodes of several turns sampler and trainer agree at every sampled token, under every layout."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.base.ranks import ALONE
from ppo_repro.base.watcher import Silent
from ppo_repro.buffers import Episode
from ppo_repro.records import manifest, reader
from ppo_repro.runs import prepare
from ppo_repro.stages.equal_bits import UnequalBits, require_sampler_agrees
from ppo_repro.stages.forward import score_rollout
from ppo_repro.stages.rollout import choose_prompts, roll_out
from tests.support.language import rerun, resume
from tests.support.resume import Recorded, record
from tests.support.turns import turns_config

GAE = ("advantages.gamma=0.9", "advantages.gae_lambda=0.8", "advantages.whiten=none")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("turns")
    return record(turns_config(folder, *GAE, "checkpoints.every=1"), folder)


def sequences_of(run: Recorded) -> pd.DataFrame:
    return reader.read_sequences(run.whole)


def test_agreement_holds_over_whole_episodes(recorded: Recorded) -> None:
    tokens, sequences = reader.read_tokens(recorded.whole), sequences_of(recorded)
    bits = [tokens[name].to_numpy().view(np.int32) for name in ("old_logprobs", "rollout_logprobs")]
    assert len(tokens) > 60
    assert np.array_equal(*bits)
    steps = reader.read_iterations(recorded.whole)
    assert (steps["unequal_first_ratios"] == 0).all()
    assert (steps["unequal_values"] == 0).all()
    # the tokens after the environment's: there have to be some, or nothing was shown
    after = [np.flatnonzero(forced).max() < len(forced) - 1 for forced in sequences["is_forced"] if max(forced)]
    assert len(after) > 5
    assert all(after)


@pytest.mark.parametrize(
    "layout",
    [
        ("layout.prefix_cache=false", "layout.rollout_slots=2", "layout.padding=none"),
        ("layout.threads=2", "layout.prefill_chunk=1", "layout.padding=left", "layout.update_micro_batch=2"),
    ],
)
def test_another_layout_gives_the_same_run(recorded: Recorded, layout: tuple[str, ...]) -> None:
    """Without the prefix cache each turn is computed from its first token."""
    found = rerun(recorded.whole, list(layout))
    assert found.difference is None
    assert found.fingerprint == manifest.load(recorded.whole).fingerprint


@pytest.mark.usefixtures("row_dependent")
def test_another_layout_gives_another_run_in_native_numerics(tmp_path: Path) -> None:
    native = record(turns_config(tmp_path, "numerics.mode=native", "ppo.iterations=1"), tmp_path / "out")
    assert rerun(native.whole, ["layout.rollout_slots=2"]).difference is not None


def test_a_resumed_run_is_the_uninterrupted_run(recorded: Recorded, tmp_path: Path) -> None:
    run_dir = recorded.copy(1, tmp_path)
    assert resume(run_dir, ["layout.prefix_cache=false"]).start == 1
    recorded.require_same(run_dir)


def definition(rewards: list[float], values: list[float], forced: list[int]) -> list[Fraction]:
    """A_t = sum over the sampled k >= t of (gamma lambda)^(sampled tokens from t to k) delta_k, exactly.

    Walks over all tokens of the episode. delta_k = r_k + gamma V' - V_k; V' is the value before the next sampled token,
    however many forced ones are between, and 0 after the last.
    """
    gamma, decay = Fraction(9, 10), Fraction(72, 100)
    at = iter(zip(rewards, values, strict=True))
    known = [None if f else tuple(map(Fraction, next(at))) for f in forced]
    advantages = []
    for t, first in enumerate(known):
        if first is None:
            continue
        total, factor = Fraction(0), Fraction(1)
        for k in range(t, len(known)):
            here = known[k]
            if here is None:
                continue  # a forced token is no decision: neither an error nor a discount
            following = next((later for later in known[k + 1 :] if later is not None), None)
            total += factor * (here[0] + gamma * (following[1] if following else 0) - here[1])
            factor *= decay
        advantages.append(total)
    return advantages


def test_advantages_pass_over_forced_tokens(recorded: Recorded) -> None:
    tokens, sequences = reader.read_tokens(recorded.whole), sequences_of(recorded)
    by_sequence = tokens.groupby(["iteration", "sequence"])
    others = 0
    for (_, frame), forced in zip(by_sequence, sequences["is_forced"], strict=True):
        rewards, values = frame["rewards"].tolist(), frame["values"].tolist()
        expected = definition(rewards, values, list(forced))
        # float32 rounds each of at most fourteen steps; values and rewards are of order 1
        assert np.allclose(frame["raw_advantages"], [float(a) for a in expected], rtol=0, atol=1e-5)
        # the control: the same law where each forced token is a decision, with reward 0 and the value before it
        pairs, at = iter(zip(rewards, values, strict=True)), (0.0, values[0])
        filled = []
        for is_forced in forced:
            at = (0.0, at[1]) if is_forced else next(pairs)
            filled.append(at)
        counted = definition([r for r, _ in filled], [v for _, v in filled], [0] * len(filled))
        sampled = [a for a, is_forced in zip(counted, forced, strict=True) if not is_forced]
        others += sampled != expected
    assert others == sum(max(forced) for forced in sequences["is_forced"]) > 5


def test_an_episode_that_was_encoded_again_breaks_agreement(tmp_path: Path) -> None:
    """The control of the promise above: the same text and the same sampled tokens, forced tokens encoded otherwise."""
    config = turns_config(tmp_path)
    prepared = prepare.prepare(config, Silent())
    rollout = roll_out(config, prepared.task, prepared.sampler, choose_prompts(config, prepared.task, 0), ALONE)
    assert rollout.episodes is not None
    tokenizer = prepared.task.tokenizer

    def encoded_again(episode: Episode) -> Episode:
        pairs = []
        for token, forced in zip(episode.ids, episode.is_forced, strict=True):
            letters = tokenizer.decode([token]) if forced else ""
            pairs += [(i, True) for i in tokenizer.convert_tokens_to_ids(list(letters))] if forced else [(token, False)]
        return Episode(tuple(i for i, _ in pairs), tuple(f for _, f in pairs), episode.turns)

    again = replace(rollout, episodes=tuple(map(encoded_again, rollout.episodes)))
    assert [tokenizer.decode(e.ids) for e in again.episodes] == [tokenizer.decode(e.ids) for e in rollout.episodes]
    assert again.episodes != rollout.episodes
    for found in (rollout, again):
        forward = score_rollout(prepared.state, found, config, ALONE)
        if found is rollout:
            require_sampler_agrees(config, 0, found, forward)
        else:
            with pytest.raises(UnequalBits, match="rollout_logprobs"):
                require_sampler_agrees(config, 0, found, forward)
