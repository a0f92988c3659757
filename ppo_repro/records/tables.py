"""From an iteration's stages to the columns of its five tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ppo_repro.buffers import MinibatchUpdate
from ppo_repro.config import RunConfig
from ppo_repro.loop import Iteration
from ppo_repro.numerics.grid import exact_mean
from ppo_repro.ppo.advantages import explained_variance
from ppo_repro.ppo.losses import CLIP_FLAGS
from ppo_repro.records import schema
from ppo_repro.records.writer import to_arrow
from ppo_repro.stages import Task
from ppo_repro.tasks.tokenizer import spans

Columns = dict[str, Any]


def unequal_bits(a: Tensor, b: Tensor) -> int:
    """How many elements of two float32 tensors differ in any bit."""
    return int((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).sum())


def iteration_tables(item: Iteration, task: Task, config: RunConfig) -> dict[str, pa.Table]:
    """All five tables of one iteration."""
    columns = {
        "sequences": _sequences(item),
        "tokens": _tokens(item, task),
        "updates": _updates(item),
        "steps": _steps(item, config),
        "iterations": _iteration(item, config),
    }
    return {table.name: to_arrow(table, columns[table.name]) for table in schema.TABLES}


def _int32(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def _positions(lengths: Tensor) -> Tensor:
    return torch.cat([torch.arange(int(n)) for n in lengths])


def _per_sequence(values: Tensor, lengths: Tensor) -> list[float]:
    return [exact_mean(part) * len(part) for part in torch.split(values, lengths.tolist())]


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
        "response_ids": [_int32(part) for part in torch.split(rollout.response_ids, lengths.tolist())],
        "prompt_length": _int32([len(ids) for ids in prompts.prompt_ids]),
        "response_length": _int32(lengths),
        "finish_reason": list(rollout.finish_reasons),
        "scores": rewards.scores.numpy(),
        "is_correct": rewards.is_correct.numpy(),
        "kl_penalty_sum": _per_sequence(rewards.kl_penalties, lengths),
        "reward_sum": _per_sequence(rewards.rewards, lengths),
    }


def _tokens(item: Iteration, task: Task) -> Columns:
    rollout, forward, rewards, advantages = item.rollout, item.forward, item.rewards, item.advantages
    ids = torch.split(rollout.response_ids, rollout.lengths.tolist())
    places = [spans(task.tokenizer, part.tolist(), text) for part, text in zip(ids, rollout.responses, strict=True)]
    text_columns = ("char_start", "char_end", "byte_start", "byte_end", "word_id", "sub_idx")
    columns: Columns = {
        "iteration": np.full(len(rollout.response_ids), item.index, np.int32),
        "sequence": _int32(rollout.sequence_of_token()),
        "position": _int32(_positions(rollout.lengths)),
        "token_id": _int32(rollout.response_ids),
        "is_forced": rollout.is_forced.numpy(),
    }
    for name in text_columns:
        columns[name] = _int32([value for place in places for value in getattr(place, name)])
    for stage, names in (
        (rollout, ("rollout_logprobs", "log_kept_mass")),
        (forward, ("old_logprobs", "ref_logprobs", "ref_kl", "values", "entropies", "prob_sq_sums")),
        (rewards, ("kl_penalties", "rewards")),
        (advantages, ("raw_advantages", "advantages", "returns")),
    ):
        for name in names:
            columns[name] = getattr(stage, name).numpy()
    return columns


def _updates(item: Iteration) -> Columns:
    sequence, position = item.rollout.sequence_of_token(), _positions(item.rollout.lengths)

    def cat(column: Any) -> Tensor:
        return torch.cat([column(u) for u in item.updates])

    def constant(name: str) -> np.ndarray:
        return np.concatenate([np.full(len(u.tokens), getattr(u, name), np.int32) for u in item.updates])

    tokens = cat(lambda u: u.tokens)
    return {
        "iteration": np.full(len(tokens), item.index, np.int32),
        "epoch": constant("epoch"),
        "minibatch": constant("minibatch"),
        "sequence": _int32(sequence[tokens]),
        "position": _int32(position[tokens]),
        "new_logprobs": cat(lambda u: u.new_logprobs).numpy(),
        "ratios": cat(lambda u: u.ratios).numpy(),
        "clip_flag": [CLIP_FLAGS[i] for i in cat(lambda u: u.clip_flags).tolist()],
        "new_values": cat(lambda u: u.new_values).numpy(),
        "value_clipped": cat(lambda u: u.value_clipped).numpy(),
        "new_entropies": cat(lambda u: u.new_entropies).numpy(),
    }


def _steps(item: Iteration, config: RunConfig) -> Columns:
    def column(name: str) -> list[Any]:
        return [getattr(u, name) for u in item.updates]

    means = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "value_clip_fraction")
    copied = (*means, "grad_norm", "value_grad_norm", "policy_digest", "value_digest")
    count = len(item.updates)
    return {
        "iteration": np.full(count, item.index, np.int32),
        "tokens": _int32([len(u.tokens) for u in item.updates]),
        "learning_rate": [config.ppo.learning_rate] * count,
        "value_learning_rate": [config.ppo.value_learning_rate] * count,
        **{name: column(name) for name in copied},
        **{name: _int32(column(name)) for name in ("epoch", "minibatch", "gradient_redos", "value_gradient_redos")},
    }


def first_minibatch(item: Iteration) -> MinibatchUpdate:
    """The minibatch that is seen before any optimizer step of the iteration."""
    return item.updates[0]


def _iteration(item: Iteration, config: RunConfig) -> Columns:
    rollout, forward, rewards = item.rollout, item.forward, item.rewards
    first, evaluation = first_minibatch(item), item.evaluation
    ones = torch.ones_like(first.ratios)
    count, tokens = len(rollout.lengths), len(rollout.response_ids)
    total_reward = _per_sequence(rewards.rewards, rollout.lengths)
    ref_kl = exact_mean(forward.ref_kl)
    row: dict[str, Any] = {
        "score_mean": exact_mean(rewards.scores),
        "accuracy": exact_mean(rewards.is_correct),
        "reward_mean": exact_mean(torch.tensor(total_reward, dtype=torch.float64)),
        "response_length_mean": tokens / count,
        "truncated_fraction": rollout.finish_reasons.count("length") / count,
        "entropy": exact_mean(forward.entropies),
        "kl_coef": config.ppo.kl_coef,
        "ref_kl_per_token": ref_kl,
        "ref_kl_per_sequence": ref_kl * tokens / count,
        "explained_variance": explained_variance(forward.values, item.advantages.returns),
        "unequal_old_rollout_logprobs": unequal_bits(forward.old_logprobs, rollout.rollout_logprobs),
        "max_abs_old_rollout": float((forward.old_logprobs - rollout.rollout_logprobs).abs().max()),
        "first_minibatch_tokens": len(first.tokens),
        "unequal_first_ratios": unequal_bits(first.ratios, ones),
        "unequal_values": unequal_bits(first.new_values, forward.values[first.tokens]),
        "eval_accuracy": evaluation.accuracy if evaluation else None,
        "eval_score": evaluation.score if evaluation else None,
        **{f"seconds_{phase}": seconds for phase, seconds in item.seconds.items()},
    }
    return {
        "iteration": _int32([item.index]),
        "sequences": _int32([count]),
        "tokens": _int32([tokens]),
        **{name: [value] for name, value in row.items()},
    }
