"""Stage `Advantages`: the advantage and the value target of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.buffers import Advantages, ForwardPass, Rewards, Rollout
from ppo_repro.config.algorithm import AdvantagesConfig, GaeAdvantages, GroupAdvantages
from ppo_repro.ppo.advantages import gae, group_advantages, whiten
from ppo_repro.ppo.own_batches import AdvantageBatch
from ppo_repro.user.functions import BUILT_IN, Functions


def compute_advantages(
    settings: AdvantagesConfig,
    rollout: Rollout,
    forward: ForwardPass,
    rewards: Rewards,
    functions: Functions = BUILT_IN,
) -> Advantages:
    """Compute advantages and value targets of N tokens, float32. Whitening is over all tokens of the iteration."""
    if isinstance(settings, GroupAdvantages):
        by_response = group_advantages(rewards.scores.tolist(), rollout.prompts.prompt_key, settings.scale)
        raw = torch.repeat_interleave(torch.tensor(by_response, dtype=torch.float32), rollout.lengths)
        return Advantages(raw_advantages=raw, advantages=raw, returns=None)
    values = forward.values
    if functions.advantages is not None:
        raw = functions.advantages.advantages(_advantage_batch(rollout, rewards, values))
    else:
        assert isinstance(settings, GaeAdvantages)
        assert values is not None
        ended = torch.zeros(len(rollout.lengths))  # nothing follows a response, cut at the length limit or not
        raw = gae(rewards.rewards, values, rollout.lengths, ended, settings.gamma, settings.gae_lambda)
    advantages = raw if settings.whiten == "none" else whiten(raw, shift=settings.whiten == "full")
    return Advantages(raw_advantages=raw, advantages=advantages, returns=None if values is None else raw + values)


def _advantage_batch(rollout: Rollout, rewards: Rewards, values: Tensor | None) -> AdvantageBatch:
    return AdvantageBatch(
        **rollout.about_tokens(),
        rewards=rewards.rewards,
        values=values,
        scores=rewards.scores,
    )
