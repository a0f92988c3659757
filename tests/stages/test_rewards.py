"""Each option of `kl`, `reward` and `advantages` reaches its formula: rewards and advantages by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ppo_repro.buffers import ForwardPass, Rewards, Rollout, Spans
from ppo_repro.config.files import load_config
from ppo_repro.stages.advantages import compute_advantages
from ppo_repro.stages.rewards import rewards_from
from ppo_repro.tasks.rewards import Judgement
from tests.support.bare import bare_forward, bare_rollout
from tests.support.paths import TINY

# a response of two words in three tokens, and one of one token, both to one prompt
SCORES = [6.0, -1.0]
WORDS = (Spans([], [], [], [], [0, 0, 1], []), Spans([], [], [], [], [0], []))
E = math.e


def rollout() -> Rollout:
    found = bare_rollout(torch.tensor([3, 1]))
    return replace(found, prompts=replace(found.prompts, prompt_key=("a", "a")), spans=WORDS)


def forward() -> ForwardPass:
    """Old log-probs that are 1, 0, -1 and 2 above the reference's."""
    return replace(
        bare_forward(torch.tensor([1.0, 0.0, -1.0, 2.0])),
        ref_logprobs=torch.zeros(4),
        ref_kl=torch.tensor([2.0, 4.0, 6.0, 8.0]),
        values=torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )


def rewards(*overrides: str, reverse_ref_kl: list[float] | None = None) -> Rewards:
    found = forward() if reverse_ref_kl is None else replace(forward(), reverse_ref_kl=torch.tensor(reverse_ref_kl))
    return rewards_from(load_config(TINY, overrides), Judgement(SCORES, [], [True, False]), rollout(), found, 0.5)


def whitened(values: list[float], shift: bool) -> list[float]:
    mean = sum(values) / 4
    scale = math.sqrt(sum((x - mean) ** 2 for x in values) / 4 + 1e-8)
    return [(x - mean) / scale + (0.0 if shift else mean) for x in values]


USUAL = [-0.5, 0.0, 6.5, -2.0]  # k1 on every token, the score on the last one
REWARDS: dict[str, list[float]] = {
    "kl.charge=token": USUAL,
    "kl.charge=word": [0.0, -0.5, 6.5, -2.0],
    "kl.charge=length_normalized": [-0.5 / 3, 0.0, 6.0 + 0.5 / 3, -2.0],
    "kl={charge: last_sum, estimator: exact}": [0.0, 0.0, 0.0, -5.0],
    "kl={charge: last_mean, estimator: exact}": [0.0, 0.0, 4.0, -5.0],
    "kl.estimator=k2": [-0.25, 0.0, 5.75, -2.0],
    "kl.estimator=exact": [-1.0, -2.0, 3.0, -5.0],
    "kl.direction=reference_policy": [0.5 / E, 0.0, 6.0 - 0.5 * E, -1.0 + E**-2],
    "kl={placement: loss}": [0.0, 0.0, 6.0, -1.0],
    "reward.placement=word_ends": [-0.5, 3.0, 3.5, -2.0],
    "reward.whiten=full": whitened(USUAL, shift=True),
    "reward.whiten=scale": whitened(USUAL, shift=False),
}


@pytest.mark.parametrize("option", REWARDS)
def test_rewards_by_hand(option: str) -> None:
    assert rewards(option).rewards.tolist() == pytest.approx(REWARDS[option], rel=1e-6)


def test_the_exact_divergence_of_the_other_direction_is_charged() -> None:
    reverse = "kl={estimator: exact, direction: reference_policy}"
    found = rewards(reverse, reverse_ref_kl=[1.0, 1.0, 1.0, 4.0])
    assert found.rewards.tolist() == [-0.5, -0.5, 5.5, -3.0]
    with pytest.raises(AssertionError):
        rewards(reverse)  # the forward pass did not compute it


PLAIN = [5.0, 4.0, 3.0, -5.0]  # the score less the values
GROUP = "value={kind: none}", "kl={placement: none}"
ADVANTAGES: dict[tuple[str, ...], list[float]] = {
    ("advantages={gae_lambda: 1, whiten: none}",): PLAIN,
    ("advantages={gae_lambda: 0, whiten: none}",): [1.0, 1.0, 3.0, -5.0],
    ("advantages={gae_lambda: 1, gamma: 0.5, whiten: none}",): [0.5, 1.0, 3.0, -5.0],
    ("advantages={gae_lambda: 1, whiten: full}",): whitened(PLAIN, shift=True),
    ("advantages={gae_lambda: 1, whiten: scale}",): whitened(PLAIN, shift=False),
    ("advantages={kind: group, scale: false}", *GROUP): [3.5, 3.5, 3.5, -3.5],
    ("advantages={kind: group, scale: true}", *GROUP): [3.5 / (3.5 + 1e-6)] * 3 + [-3.5 / (3.5 + 1e-6)],
}


@pytest.mark.parametrize("options", ADVANTAGES, ids=lambda options: options[0])
def test_advantages_by_hand(options: tuple[str, ...]) -> None:
    found = compute_advantages(
        load_config(TINY, options).advantages, rollout(), forward(), rewards("kl={placement: none}")
    )
    assert found.advantages.tolist() == pytest.approx(ADVANTAGES[options], rel=1e-6)


def test_the_tokens_of_all_responses_to_a_prompt_are_one_group() -> None:
    about = {name: column.tolist() for name, column in rollout().about_tokens().items()}
    assert about == {"responses": [0, 0, 0, 1], "groups": [0] * 4, "positions": [0, 1, 2, 0], "lengths": [3, 3, 3, 1]}
