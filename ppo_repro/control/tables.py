"""From a control iteration's stages to the columns of its five tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ppo_repro.clock import moment
from ppo_repro.config.layout import Level
from ppo_repro.control.buffers import MinibatchUpdate
from ppo_repro.control.loop import ControlIteration
from ppo_repro.numerics.sums import mean_of, run_sums
from ppo_repro.ppo.advantages import explained_variance
from ppo_repro.ppo.objective import flag_names, removes_gradient
from ppo_repro.records import control_schema
from ppo_repro.records.arrow import to_arrow
from ppo_repro.records.columns import unequal_bits

Columns = dict[str, Any]
FULL_STEPS = ("surrogate_loss", "entropy_loss")


def iteration_tables(item: ControlIteration, level: Level) -> dict[str, pa.Table]:
    """All five tables of one iteration."""
    columns = {
        "sequences": _sequences(item),
        "tokens": _tokens(item),
        "updates": _updates(item),
        "steps": _steps(item),
        "iterations": _iteration(item),
    }
    if level != "lean":
        full = ("policy_losses", "surrogates", "value_losses")
        columns["updates"] |= {name: torch.cat([getattr(u, name) for u in item.updates]).numpy() for name in full}
        columns["steps"] |= {name: [getattr(u, name) for u in item.updates] for name in FULL_STEPS}
    return {table.name: to_arrow(table, columns[table.name]) for table in control_schema.TABLES}


def finished_returns(item: ControlIteration) -> list[float]:
    """Returns of the episodes that ended in this iteration, in the order in which they ended."""
    rollout = item.rollout
    ended = [i for i, reason in enumerate(rollout.end_reasons) if reason != "cut"]
    ended.sort(key=lambda i: (rollout.last_steps[i], rollout.environments[i]))
    return [rollout.episode_returns[i] for i in ended]


def _int32(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def _positions(lengths: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(fragment, position in it) of every step."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    return _int32(sequence), _int32(torch.arange(len(sequence)) - starts[sequence])


def _sequences(item: ControlIteration) -> Columns:
    rollout = item.rollout
    pairs = zip(rollout.end_reasons, rollout.episode_returns, strict=True)
    return {
        "iteration": np.full(len(rollout.lengths), item.index, np.int32),
        "sequence": np.arange(len(rollout.lengths), dtype=np.int32),
        "environment": _int32(rollout.environments),
        "episode": _int32(rollout.episodes),
        "seed": np.asarray(rollout.seeds, dtype=np.int64),
        "first_step": _int32(rollout.first_steps),
        "last_step": _int32(rollout.last_steps),
        "fragment_length": _int32(rollout.lengths),
        "end_reason": list(rollout.end_reasons),
        "final_observations": list(rollout.final_observations.numpy()),
        "final_values": item.forward.final_values.numpy(),
        "reward_sum": run_sums(rollout.rewards, rollout.lengths).numpy(),
        "episode_return": [None if reason == "cut" else total for reason, total in pairs],
    }


def _tokens(item: ControlIteration) -> Columns:
    rollout, forward, advantages = item.rollout, item.forward, item.advantages
    sequence, position = _positions(rollout.lengths)
    return {
        "iteration": np.full(len(sequence), item.index, np.int32),
        "sequence": sequence,
        "position": position,
        "observations": list(rollout.observations.numpy()),
        "actions": list(rollout.actions.numpy()),
        "rollout_logprobs": rollout.rollout_logprobs.numpy(),
        "old_logprobs": forward.old_logprobs.numpy(),
        "entropies": forward.entropies.numpy(),
        "values": forward.values.numpy(),
        "rewards": rollout.rewards.numpy(),
        "raw_advantages": advantages.raw_advantages.numpy(),
        "returns": advantages.returns.numpy(),
    }


def _updates(item: ControlIteration) -> Columns:
    sequence, position = _positions(item.rollout.lengths)

    def cat(column: Callable[[MinibatchUpdate], Tensor]) -> np.ndarray:
        return torch.cat([column(u) for u in item.updates]).numpy()

    tokens = cat(lambda u: u.tokens)
    sizes = [len(u.tokens) for u in item.updates]
    return {
        "iteration": np.full(len(tokens), item.index, np.int32),
        "epoch": np.repeat(_int32([u.epoch for u in item.updates]), sizes),
        "minibatch": np.repeat(_int32([u.minibatch for u in item.updates]), sizes),
        "sequence": sequence[tokens],
        "position": position[tokens],
        "advantages": cat(lambda u: u.advantages),
        "new_logprobs": cat(lambda u: u.new_logprobs),
        "ratios": cat(lambda u: u.ratios),
        "clip_flag": flag_names(torch.cat([u.clip_flags for u in item.updates])),
        "new_values": cat(lambda u: u.new_values),
        "value_clipped": cat(lambda u: u.value_clipped),
        "new_entropies": cat(lambda u: u.new_entropies),
    }


def _steps(item: ControlIteration) -> Columns:
    def column(name: str) -> list[Any]:
        return [getattr(u, name) for u in item.updates]

    copied = ("policy_loss", "value_loss", "approx_kl", "joint_grad_norm", "learning_rate", "clip_range")
    return {
        "iteration": np.full(len(item.updates), item.index, np.int32),
        "tokens": _int32([len(u.tokens) for u in item.updates]),
        "entropy": [mean_of(u.new_entropies) for u in item.updates],
        "clip_fraction": [mean_of(removes_gradient(u.clip_flags)) for u in item.updates],
        "value_clip_fraction": [mean_of(u.value_clipped) for u in item.updates],
        **{name: column(name) for name in (*copied, "policy_digest", "value_digest")},
        **{name: _int32(column(name)) for name in ("epoch", "minibatch")},
    }


def _iteration(item: ControlIteration) -> Columns:
    rollout, forward, first = item.rollout, item.forward, item.updates[0]
    ended = finished_returns(item)
    row: dict[str, Any] = {
        "episode_return_mean": math.fsum(ended) / len(ended) if ended else None,
        "entropy": mean_of(forward.entropies),
        "explained_variance": explained_variance(forward.values, item.advantages.returns),
        "unequal_old_rollout_logprobs": unequal_bits(forward.old_logprobs, rollout.rollout_logprobs),
        "max_abs_old_rollout": float((forward.old_logprobs - rollout.rollout_logprobs).abs().max()),
        "first_minibatch_tokens": len(first.tokens),
        "unequal_first_ratios": unequal_bits(first.ratios, torch.ones_like(first.ratios)),
        "unequal_values": unequal_bits(first.new_values, forward.values[first.tokens]),
        "eval_return": item.eval_return,
        **{f"seconds_{phase}": seconds for phase, seconds in item.seconds.items()},
        "ended_at": moment(),
    }
    return {
        "iteration": _int32([item.index]),
        "sequences": _int32([len(rollout.lengths)]),
        "tokens": _int32([len(rollout.rewards)]),
        "episodes": _int32([len(ended)]),
        **{name: [value] for name, value in row.items()},
    }
