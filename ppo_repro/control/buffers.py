"""One frozen type per stage of a control iteration.

A fragment is the part of one episode that lies in one iteration. Fragments stand for responses, environment steps for
tokens. Letters: B fragments, N = num_envs x steps_per_env steps of all fragments one after the other, ordered by
environment and time, O observation size, A action size, M steps of a minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """The observations, actions and rewards of an iteration."""

    observations: Tensor  # [N, O] float32, before each action
    actions: Tensor  # [N, A] float32, as drawn: an index, or a real action before it is clipped to its space
    rollout_logprobs: Tensor  # [N] float32
    rewards: Tensor  # [N] float32
    lengths: Tensor  # [B] int64, at least 1 each, sum N
    final_observations: Tensor  # [B, O] float32, after the last action of each fragment
    end_reason: tuple[str, ...]  # [B] terminated by itself, truncated by its time limit, or cut by the iteration's end
    environment: tuple[int, ...]  # [B] which copy
    episode: tuple[int, ...]  # [B] which episode of that copy
    seed: tuple[int, ...]  # [B] the seed with which the episode was reset
    first_step: tuple[int, ...]  # [B] step of the episode at which the fragment begins
    last_step: tuple[int, ...]  # [B] step of the iteration with which it ends
    episode_return: tuple[float, ...]  # [B] rewards of the episode up to the end of the fragment


@dataclass(frozen=True)
class ForwardPass:
    """The results of both networks for the rollout, before any update."""

    old_logprobs: Tensor  # [N] float32
    entropies: Tensor  # [N] float32
    values: Tensor  # [N] float32, expected return before the action
    final_values: Tensor  # [B] float32, value of the state after the fragment; 0 if the episode is over


@dataclass(frozen=True)
class Advantages:
    """Generalized advantage estimates and the value targets."""

    raw_advantages: Tensor  # [N] float32
    returns: Tensor  # [N] float32, raw_advantages + values


@dataclass(frozen=True)
class MinibatchUpdate:
    """One optimizer step on M environment steps, and its inputs."""

    epoch: int
    minibatch: int
    tokens: Tensor  # [M] int64 index into the [N] fields
    advantages: Tensor  # [M] float32, whitened if configured
    new_logprobs: Tensor  # [M] float32, before this step
    ratios: Tensor  # [M] float32, exp(new_logprobs - rollout_logprobs)
    clip_flags: Tensor  # [M] uint8, a ppo.objectives.ClipFlag each
    new_values: Tensor  # [M] float32
    value_clipped: Tensor  # [M] bool, the clipped branch decided the value loss
    new_entropies: Tensor  # [M] float32
    policy_losses: Tensor  # [M] float32, surrogate minus the entropy bonus
    surrogates: Tensor  # [M] float32
    value_losses: Tensor  # [M] float32, before value_coef
    policy_loss: float  # mean of policy_losses
    surrogate_loss: float  # mean of surrogates
    entropy_loss: float  # minus entropy_coef times the mean entropy
    value_loss: float
    approx_kl: float  # KL(anchor || new), k3, mean
    learning_rate: float
    clip_range: float
    joint_grad_norm: float  # over both networks, before clipping
    policy_digest: str  # weights after the step
    value_digest: str


@dataclass(frozen=True)
class ControlIteration:
    """The results of all stages of one iteration."""

    index: int
    eval_return: float | None  # before the first iteration only; None where not evaluated
    rollout: Rollout
    forward: ForwardPass
    advantages: Advantages
    updates: tuple[MinibatchUpdate, ...]
    seconds: dict[str, float]  # wall time by phase: evaluation, rollout, forward, update, other

    def finished_returns(self) -> list[float]:
        """Return the returns of the episodes that ended in this iteration, in the order in which they ended."""
        r = self.rollout
        ended = zip(r.end_reason, r.last_step, r.environment, r.episode_return, strict=True)
        return [episode_return for reason, *_, episode_return in sorted(ended, key=lambda e: e[1:3]) if reason != "cut"]
