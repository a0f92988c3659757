"""The promises of `stages/agreement.py` for control runs: whatever acts is the agent that is trained."""

from __future__ import annotations

import torch

from ppo_repro.config.control import ControlConfig
from ppo_repro.control.buffers import ForwardPass, MinibatchUpdate, Rollout
from ppo_repro.stages.agreement import require_ratios_of_one, require_same_bits


def require_sampler_agrees(config: ControlConfig, iteration: int, rollout: Rollout, forward: ForwardPass) -> None:
    """Raise UnequalBits where the log-prob of an action is not the one it was drawn with."""
    if config.numerics.mode == "deterministic":
        drawn, scored = ("rollout_logprobs", rollout.rollout_logprobs), ("old_logprobs", forward.old_logprobs)
        require_same_bits(iteration, rollout.lengths, drawn, scored, torch.arange(len(rollout.rewards)))


def require_first_step_agrees(
    config: ControlConfig, iteration: int, rollout: Rollout, forward: ForwardPass, first: MinibatchUpdate
) -> None:
    """Raise UnequalBits where the first minibatch has a ratio other than 1 or another value."""
    if config.numerics.mode == "deterministic":
        require_ratios_of_one(iteration, rollout.lengths, first.ratios, first.tokens)
        before, again = ("values", forward.values[first.tokens]), ("new_values", first.new_values)
        require_same_bits(iteration, rollout.lengths, before, again, first.tokens)
