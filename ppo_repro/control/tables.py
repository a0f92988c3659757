"""From a control iteration's stages to the columns of its five tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ppo_repro.clock import moment
from ppo_repro.config.layout import Level
from ppo_repro.control.loop import ControlIteration
from ppo_repro.numerics.sums import mean_of, run_sums
from ppo_repro.ppo.advantages import explained_variance
from ppo_repro.ppo.objective import flag_names, removes_gradient
from ppo_repro.records import schema
from ppo_repro.records.arrow import to_arrow
from ppo_repro.records.columns import cells_of, fields_of, int32, of_minibatches, rows_of, unequal_bits

Columns = dict[str, Any]


def iteration_tables(item: ControlIteration, level: Level) -> dict[str, pa.Table]:
    """All five tables of one iteration."""
    columns = {
        "sequences": _sequences(item),
        "tokens": _tokens(item),
        "updates": _updates(item),
        "steps": _steps(item),
        "iterations": _iteration(item),
    }
    return {table.name: to_arrow(table, columns[table.name], level) for table in schema.CONTROL_TABLES}


def finished_returns(item: ControlIteration) -> list[float]:
    """Returns of the episodes that ended in this iteration, in the order in which they ended."""
    rollout = item.rollout
    ended = [i for i, reason in enumerate(rollout.end_reasons) if reason != "cut"]
    ended.sort(key=lambda i: (rollout.last_steps[i], rollout.environments[i]))
    return [rollout.episode_returns[i] for i in ended]


def _sequences(item: ControlIteration) -> Columns:
    rollout = item.rollout
    pairs = zip(rollout.end_reasons, rollout.episode_returns, strict=True)
    return {
        "iteration": np.full(len(rollout.lengths), item.index, np.int32),
        "sequence": np.arange(len(rollout.lengths), dtype=np.int32),
        "environment": int32(rollout.environments),
        "episode": int32(rollout.episodes),
        "seed": np.asarray(rollout.seeds, dtype=np.int64),
        "first_step": int32(rollout.first_steps),
        "last_step": int32(rollout.last_steps),
        "fragment_length": int32(rollout.lengths),
        "end_reason": list(rollout.end_reasons),
        "final_observations": list(rollout.final_observations.numpy()),
        "final_values": item.forward.final_values.numpy(),
        "reward_sum": run_sums(rollout.rewards, rollout.lengths).numpy(),
        "episode_return": [None if reason == "cut" else total for reason, total in pairs],
    }


def _tokens(item: ControlIteration) -> Columns:
    rollout = item.rollout
    sequence, position = cells_of(rollout.lengths)
    return {
        **fields_of(schema.CONTROL_TOKENS, rollout, item.forward, item.advantages),
        "iteration": np.full(len(sequence), item.index, np.int32),
        "sequence": sequence,
        "position": position,
        "observations": list(rollout.observations.numpy()),
        "actions": list(rollout.actions.numpy()),
    }


def _updates(item: ControlIteration) -> Columns:
    sequence, position = cells_of(item.rollout.lengths)
    tokens = torch.cat([u.tokens for u in item.updates]).numpy()
    by_step = rows_of(schema.CONTROL_UPDATES, item.updates)
    return {
        **{name: torch.cat(v).numpy() for name, v in by_step.items() if isinstance(v[0], Tensor)},
        "iteration": np.full(len(tokens), item.index, np.int32),
        **{name: of_minibatches(item.updates, name) for name in ("epoch", "minibatch")},
        "sequence": sequence[tokens],
        "position": position[tokens],
        "clip_flag": flag_names(torch.cat([u.clip_flags for u in item.updates])),
    }


def _steps(item: ControlIteration) -> Columns:
    return {
        **rows_of(schema.CONTROL_STEPS, item.updates),
        "iteration": np.full(len(item.updates), item.index, np.int32),
        "tokens": int32([len(u.tokens) for u in item.updates]),
        "entropy": [mean_of(u.new_entropies) for u in item.updates],
        "clip_fraction": [mean_of(removes_gradient(u.clip_flags)) for u in item.updates],
        "value_clip_fraction": [mean_of(u.value_clipped) for u in item.updates],
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
        "iteration": int32([item.index]),
        "sequences": int32([len(rollout.lengths)]),
        "tokens": int32([len(rollout.rewards)]),
        "episodes": int32([len(ended)]),
        **{name: [value] for name, value in row.items()},
    }
