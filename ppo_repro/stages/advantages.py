"""Stage `Advantages`: advantages and value targets of an iteration."""

from __future__ import annotations

import torch

from ppo_repro.buffers import Advantages, ForwardPass, Rewards, Rollout
from ppo_repro.config.algorithm import GroupAdvantages
from ppo_repro.config.run import RunConfig
from ppo_repro.ppo.advantages import gae, group_advantages, whiten


def compute_advantages(config: RunConfig, rollout: Rollout, forward: ForwardPass, rewards: Rewards) -> Advantages:
    """Advantages and value targets; whitening is over all tokens of the iteration."""
    settings = config.advantages
    if isinstance(settings, GroupAdvantages):
        by_response = group_advantages(rewards.scores.tolist(), rollout.prompts.keys, settings.scale)
        raw = torch.repeat_interleave(torch.tensor(by_response, dtype=torch.float32), rollout.lengths)
        return Advantages(raw_advantages=raw, advantages=raw, returns=None)
    assert forward.values is not None
    ended = torch.zeros(len(rollout.lengths))  # nothing follows a response, cut at the length limit or not
    raw = gae(rewards.rewards, forward.values, rollout.lengths, ended, settings.gamma, settings.gae_lambda)
    advantages = raw if settings.whiten == "none" else whiten(raw, shift=settings.whiten == "full")
    return Advantages(raw_advantages=raw, advantages=advantages, returns=raw + forward.values)
