"""From an iteration's stages to the columns of its five tables, at the level that the configuration asks for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ppo_repro.buffers import Iteration, Rollout
from ppo_repro.clock import moment
from ppo_repro.config.algorithm import NoValue
from ppo_repro.config.objectives import AdaptiveClipObjective, PenaltyObjective
from ppo_repro.config.run import RunConfig
from ppo_repro.numerics.sums import mean_of, run_sums
from ppo_repro.ppo.advantages import explained_variance
from ppo_repro.ppo.objective import flag_names
from ppo_repro.records import schema
from ppo_repro.records.arrow import to_arrow
from ppo_repro.runs import profiling
from ppo_repro.runs.profiling import Peak
from ppo_repro.side_tables.evaluation import episode_columns
from ppo_repro.stages.agreement import differing
from ppo_repro.stages.coefficients import learning_rates
from ppo_repro.stages.level_columns import Columns, columns_above_lean, of_step, or_null, per_token


def unequal_bits(a: Tensor, b: Tensor) -> int:
    """How many elements of two float32 tensors differ in any bit."""
    return int(differing(a, b).sum())


def iteration_tables(item: Iteration, config: RunConfig, peak: Peak | None = None) -> dict[str, pa.Table]:
    """All five tables of one iteration; without `peak` its fractions are null."""
    level = config.records.level
    columns = {
        "sequences": _sequences(item),
        "tokens": _tokens(item),
        "updates": _updates(item),
        "steps": _steps(item, config),
        "iterations": _iteration(item, config, peak),
    }
    for name, more in columns_above_lean(item, level).items():
        columns[name] |= more
    features = _features(config)
    return {t.name: to_arrow(schema.at_level(t, level, features), columns[t.name]) for t in schema.TABLES}


def _features(config: RunConfig) -> set[schema.Feature]:
    """What the run has that brings columns of its own."""
    has: dict[schema.Feature, bool] = {
        "turns": config.task.turns > 1,
        "lag": config.mismatch.sampler.lag is not None,
        "retokenized": config.mismatch.trainer.retokenize > 0,
    }
    return {feature for feature, there in has.items() if there}


def _int32(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def _of_faults(rollout: Rollout) -> Columns:
    """The columns of runs whose sampler is behind, or whose responses are encoded again."""
    columns: Columns = {}
    if rollout.policy_versions is not None:
        columns["rollout_policy_versions"] = rollout.policy_versions
    if rollout.sampled_ids is not None and rollout.is_as_sampled is not None:
        columns["sampled_ids"] = rollout.sampled_ids
        columns["is_as_sampled"] = [list(map(int, row)) for row in rollout.is_as_sampled]
    return columns


def _positions(lengths: Tensor) -> Tensor:
    starts = torch.cumsum(lengths, 0) - lengths
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)


def _sequences(item: Iteration) -> Columns:
    rollout, rewards = item.rollout, item.rewards
    prompts, lengths = rollout.prompts, rollout.lengths
    count = len(lengths)
    return {
        "iteration": np.full(count, item.index, np.int32),
        "sequence": np.arange(count, dtype=np.int32),
        "prompt_key": list(prompts.keys),
        "sample_index": _int32(prompts.sample_indices),
        "seed": np.asarray(prompts.seeds, dtype=np.int64),
        "prompt": list(prompts.texts),
        "response": list(rollout.responses),
        "answer": list(prompts.answers),
        "prompt_ids": [_int32(ids) for ids in prompts.prompt_ids],
        "response_ids": [_int32(ids) for ids in torch.split(rollout.response_ids, lengths.tolist())],
        "prompt_length": _int32([len(ids) for ids in prompts.prompt_ids]),
        "response_length": _int32(lengths),
        "finish_reason": list(rollout.finish_reasons),
        "scores": rewards.scores.numpy(),
        "score_parts": [np.array(parts) for parts in rewards.score_parts],
        "is_correct": rewards.is_correct.numpy(),
        "kl_penalty_sum": run_sums(rewards.kl_penalties, lengths).numpy(),
        "reward_sum": run_sums(rewards.rewards, lengths).numpy(),
        **episode_columns(rollout.episodes),
        **_of_faults(rollout),
    }


def _tokens(item: Iteration) -> Columns:
    rollout, forward, rewards, advantages = item.rollout, item.forward, item.rewards, item.advantages
    count = len(rollout.response_ids)
    text_columns = ("char_start", "char_end", "byte_start", "byte_end", "word_id", "sub_idx")
    columns: Columns = {
        "iteration": np.full(count, item.index, np.int32),
        "sequence": _int32(rollout.sequence_of_token()),
        "position": _int32(_positions(rollout.lengths)),
        "token_id": _int32(rollout.response_ids),
        "values": or_null(forward.values, count),
        "returns": or_null(advantages.returns, count),
    }
    for name in text_columns:
        columns[name] = _int32([value for spans in rollout.spans for value in getattr(spans, name)])
    for stage, names in (
        (rollout, ("rollout_logprobs", "log_kept_mass")),
        (forward, ("old_logprobs", "ref_logprobs", "ref_kl", "entropies", "prob_sq_sums")),
        (rewards, ("kl_penalties", "rewards")),
        (advantages, ("raw_advantages", "advantages")),
    ):
        for name in names:
            columns[name] = getattr(stage, name).numpy()
    return columns


def _updates(item: Iteration) -> Columns:
    sequence, position = item.rollout.sequence_of_token(), _positions(item.rollout.lengths)
    tokens = torch.cat([u.tokens for u in item.updates])

    def of_minibatch(name: str) -> np.ndarray:
        return np.concatenate([np.full(len(u.tokens), getattr(u, name), np.int32) for u in item.updates])

    flags: list[str | None] = []
    for u in item.updates:
        flags += [None] * len(u.tokens) if u.policy is None else flag_names(u.policy.clip_flags)
    clipped = [
        torch.zeros(len(u.tokens), dtype=torch.bool) if u.value is None else u.value.clipped for u in item.updates
    ]
    return {
        "iteration": np.full(len(tokens), item.index, np.int32),
        "epoch": of_minibatch("epoch"),
        "minibatch": of_minibatch("minibatch"),
        "sequence": _int32(sequence[tokens]),
        "position": _int32(position[tokens]),
        "new_logprobs": per_token(item, "policy", "new_logprobs"),
        "ratios": per_token(item, "policy", "ratios"),
        "clip_flag": flags,
        "new_values": per_token(item, "value", "new_values"),
        "value_clipped": torch.cat(clipped).numpy(),
        "new_entropies": per_token(item, "policy", "new_entropies"),
    }


def _steps(item: Iteration, config: RunConfig) -> Columns:
    def of(model: str, name: str) -> list[Any]:
        return [of_step(u, model, name) for u in item.updates]

    count = len(item.updates)
    learning_rate, value_learning_rate = learning_rates(config, item.index)
    return {
        "iteration": np.full(count, item.index, np.int32),
        "epoch": _int32([u.epoch for u in item.updates]),
        "minibatch": _int32([u.minibatch for u in item.updates]),
        "tokens": _int32([len(u.tokens) for u in item.updates]),
        "policy_loss": of("policy", "loss"),
        "value_loss": of("value", "loss"),
        **{name: of("policy", name) for name in ("entropy", "approx_kl", "clip_fraction", "grad_norm")},
        "value_clip_fraction": of("value", "clip_fraction"),
        "value_grad_norm": of("value", "grad_norm"),
        "learning_rate": [learning_rate] * count,
        "value_learning_rate": [value_learning_rate] * count,
        "policy_digest": [u.policy_digest for u in item.updates],
        "value_digest": [u.value_digest for u in item.updates],
    }


def _coefficients(item: Iteration, config: RunConfig) -> dict[str, Any]:
    """The coefficients in force; None where the configuration has none."""
    coefficients, objective = item.coefficients, config.ppo.objective
    normalised = not isinstance(config.value, NoValue) and config.value.normalize_returns
    returns = coefficients.returns
    return {
        "kl_coef": coefficients.kl_coef,
        "clip_range": coefficients.clip_range if isinstance(objective, AdaptiveClipObjective) else None,
        "penalty_coef": coefficients.penalty_coef if isinstance(objective, PenaltyObjective) else None,
        "return_mean": returns.mean if normalised else None,
        "return_scale": returns.scale if normalised else None,
    }


def _first_minibatch(item: Iteration) -> dict[str, Any]:
    """Counts from the minibatch before any optimizer step, where nothing may differ from the forward pass."""
    first = item.updates[0]
    assert first.policy is not None
    old_values = item.forward.values
    unequal = 0
    if old_values is not None and first.value is not None:
        unequal = unequal_bits(first.value.new_values, old_values[first.tokens])
    return {
        "first_minibatch_tokens": len(first.tokens),
        "unequal_first_ratios": unequal_bits(first.policy.ratios, torch.ones_like(first.policy.ratios)),
        "unequal_values": unequal,
    }


def _speed(item: Iteration, peak: Peak | None) -> dict[str, Any]:
    """The speed of this machine, which is no result."""
    fractions = dict.fromkeys(profiling.PHASES) if peak is None else profiling.fractions(item, peak)
    spent = math.fsum(item.seconds[phase] for phase in profiling.PHASES)
    return {
        "tokens_per_second": len(item.rollout.response_ids) / spent if spent else None,
        "memory_peak": float(profiling.memory_peak()),
        **{f"peak_fraction_{phase}": fraction for phase, fraction in fractions.items()},
    }


def _iteration(item: Iteration, config: RunConfig, peak: Peak | None) -> Columns:
    rollout, forward, rewards = item.rollout, item.forward, item.rewards
    evaluation, returns = item.evaluation, item.advantages.returns
    count, tokens = len(rollout.lengths), len(rollout.response_ids)
    total_reward = run_sums(rewards.rewards, rollout.lengths)
    ref_kl = mean_of(forward.ref_kl)
    explained = None
    if forward.values is not None and returns is not None:
        explained = explained_variance(forward.values, returns)
    row: dict[str, Any] = {
        "score_mean": mean_of(rewards.scores),
        "accuracy": mean_of(rewards.is_correct),
        "reward_mean": mean_of(total_reward),
        "response_length_mean": tokens / count,
        "truncated_fraction": rollout.finish_reasons.count("length") / count,
        "entropy": mean_of(forward.entropies),
        **_coefficients(item, config),
        "ref_kl_per_token": ref_kl,
        "ref_kl_per_sequence": ref_kl * tokens / count,
        "explained_variance": explained,
        "unequal_old_rollout_logprobs": unequal_bits(forward.old_logprobs, rollout.rollout_logprobs),
        "max_abs_old_rollout": float((forward.old_logprobs - rollout.rollout_logprobs).abs().max()),
        **_first_minibatch(item),
        "eval_accuracy": evaluation.accuracy if evaluation else None,
        "eval_score": evaluation.score if evaluation else None,
        **{f"seconds_{phase}": seconds for phase, seconds in item.seconds.items()},
        "ended_at": moment(),
        **_speed(item, peak),
    }
    return {
        "iteration": _int32([item.index]),
        "sequences": _int32([count]),
        "tokens": _int32([tokens]),
        "policy_steps": _int32([sum(u.policy is not None for u in item.updates)]),
        **{name: [value] for name, value in row.items()},
    }
