"""Convert a language run's stages to the columns of its tables, at the configured level.

No other module of records/ knows tensors and stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_repro.base.clock import moment
from ppo_repro.base.errors import UserError
from ppo_repro.buffers import Episode, Evaluation, Iteration, PolicyUpdate, Spans, ValueUpdate, WarmStartStep
from ppo_repro.config.algorithm import AdaptiveClipObjective, PenaltyObjective, PredictedValue
from ppo_repro.config.layout import RecordLevel
from ppo_repro.config.run import RunConfig
from ppo_repro.numerics.sums import mean_of, run_sums
from ppo_repro.ppo.advantages import explained_variance
from ppo_repro.ppo.corrections import correction_names
from ppo_repro.ppo.objectives import flag_names
from ppo_repro.preferences.pairs import Preference
from ppo_repro.preferences.training import PreferenceStep, RewardTraining
from ppo_repro.records import schema
from ppo_repro.records.arrow import to_arrow
from ppo_repro.stages.coefficients import learning_rates
from ppo_repro.statistics.bits import disagreement
from ppo_repro.tasks.tokenizer import decode

Columns = dict[str, Any]
_MOST_IN_LISTS = 2**31 - 1  # elements of an Arrow column of lists
_ROWS_AT_ONCE = 1024  # of kept tokens, which are whole vocabularies while they are unpacked
SPANS = tuple(field.name for field in fields(Spans))


def iteration_tables(item: Iteration, config: RunConfig) -> dict[str, pa.Table]:
    """Make the five tables of one iteration, and a sixth with the held-out responses if the iteration has some."""
    level = config.records.level
    columns = {
        "sequences": _sequences(item),
        "tokens": _tokens(item, level),
        "updates": _updates(item),
        "steps": _steps(item, config),
        "iterations": _iteration(item, config),
    }
    tables = tables_at(item.index, schema.TABLES, columns, level)
    return tables if item.evaluation is None else tables | evaluation_table(item.evaluation, item.index, level)


def tables_at(
    index: int, tables: Sequence[schema.Table], columns: Mapping[str, Columns], level: RecordLevel = "deep"
) -> dict[str, pa.Table]:
    """Make the tables of an iteration, by name.

    Args:
        index: of the iteration, in every row.
        columns: by table and name.
        level: the level of the records; tables and columns above it are not made.
    """
    made = {}
    for table in tables:
        if not schema.includes(level, table.level):
            continue
        rows = len(next(iter(columns[table.name].values())))
        made[table.name] = to_arrow(table, {"iteration": np.full(rows, index), **columns[table.name]}, level)
    return made


def int32(values: Any) -> np.ndarray:
    """Return the values as an int32 array."""
    return np.asarray(values, dtype=np.int32)


def fields_of(table: schema.Table, *stages: Any) -> Columns:
    """Return the table's columns that are fields of one of the stages; the rows of a matrix become lists."""
    found = {c.name: getattr(stage, c.name) for stage in stages for c in table.columns if hasattr(stage, c.name)}
    for name, value in found.items():
        if isinstance(value, Tensor):
            found[name] = list(value.numpy()) if value.dim() == 2 else value.numpy()
    return found


def rows_of(table: schema.Table, items: Sequence[Any]) -> Columns:
    """Return the table's columns that are fields of the items; each item is a row."""
    return {c.name: [getattr(i, c.name) for i in items] for c in table.columns if hasattr(items[0], c.name)}


def _model_columns(table: schema.Table) -> dict[str, tuple[str, str]]:
    """Return model and field of each column of a table that is a field of a model's optimizer step, or null without it.

    The column `policy_losses` is the policy's field `losses`, as both models have one.
    """
    found = {}
    for model, step in (("value", ValueUpdate), ("policy", PolicyUpdate)):  # a name that both have is the policy's
        names = {field.name for field in fields(step)}
        for column in table.columns:
            name = column.name.removeprefix(f"{model}_")
            if name in names and column.nullable:
                found[column.name] = model, name
    return found


def _by_step(item: Iteration, model: str, name: str) -> list[Any]:
    """Return field `name` of the `model`'s step in each minibatch; None if this model took no step."""
    steps = [getattr(u, model) for u in item.updates]
    return [None if step is None else getattr(step, name) for step in steps]


def _by_token(item: Iteration, model: str, name: str) -> pa.Array:
    """Return per-token field `name` of the `model`'s steps; null for minibatches without a step of this model."""
    columns, sizes = _by_step(item, model, name), [len(u.tokens) for u in item.updates]
    values = torch.cat([torch.zeros(n) if c is None else c for n, c in zip(sizes, columns, strict=True)])
    return pa.array(values.numpy(), mask=np.repeat([column is None for column in columns], sizes))


def _in_words(item: Iteration, name: str, words: Callable[[Tensor], list[str]]) -> list[str | None]:
    """Return a per-token column of codes of the policy's steps as words; None for minibatches without a policy step."""
    columns = zip(item.updates, _by_step(item, "policy", name), strict=True)
    return [word for u, codes in columns for word in ([None] * len(u.tokens) if codes is None else words(codes))]


def of_minibatches(updates: Sequence[Any], name: str) -> np.ndarray:
    """Return field `name` of each minibatch, repeated for each of its tokens."""
    return np.repeat(int32([getattr(u, name) for u in updates]), [len(u.tokens) for u in updates])


def cells_of(lengths: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return (sequence, position in the sequence), int32 [N] each, of every token of sequences of these lengths."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    return int32(sequence), int32(torch.arange(len(sequence)) - starts[sequence])


def _sequences(item: Iteration) -> Columns:
    rollout, rewards = item.rollout, item.rewards
    prompts, lengths = rollout.prompts, rollout.lengths
    count = len(lengths)
    columns: Columns = {
        **fields_of(schema.SEQUENCES, prompts, rollout, rewards),
        "sequence": np.arange(count, dtype=np.int32),
        "response_ids": [int32(ids) for ids in torch.split(rollout.response_ids, lengths.tolist())],
        "prompt_length": int32([len(ids) for ids in prompts.prompt_ids]),
        "response_length": int32(lengths),
        "kl_penalty_sum": run_sums(rewards.kl_penalties, lengths).numpy(),
        "reward_sum": run_sums(rewards.rewards, lengths).numpy(),
        **_episode_columns(rollout.episodes),
    }
    if rollout.is_as_sampled is not None:
        columns["is_as_sampled"] = [list(map(int, row)) for row in rollout.is_as_sampled]
    return {name: values for name, values in columns.items() if values is not None}


def _episode_columns(episodes: Sequence[Episode] | None) -> Columns:
    """Return the columns of episodes of several turns; no columns if there are none."""
    if episodes is None:
        return {}
    forced = [[int(put_in) for put_in in episode.is_forced] for episode in episodes]
    return {"episode_ids": [episode.ids for episode in episodes], "is_forced": forced}


def _tokens(item: Iteration, level: RecordLevel) -> Columns:
    rollout, forward = item.rollout, item.forward
    sequence, position = cells_of(rollout.lengths)
    return {
        **fields_of(schema.TOKENS, rollout, forward, item.rewards, item.advantages),
        "sequence": sequence,
        "position": position,
        "token_id": int32(rollout.response_ids),
        **{name: int32([value for s in rollout.spans for value in getattr(s, name)]) for name in SPANS},
        "kept_tokens": _kept(rollout.kept_tokens.numpy()) if schema.includes(level, "full") else None,
        "rollout_routes": _lists(rollout.token_routes()),
        "policy_routes": _lists(forward.routes),
    }


def _kept(bits: np.ndarray) -> pa.Array | None:
    """Return bit sets [N, W] uint8 as lists of token ids; None if W is 0."""
    if bits.shape[1] == 0:
        return None
    ids, counts = [], []
    for start in range(0, len(bits), _ROWS_AT_ONCE):
        kept = np.unpackbits(bits[start : start + _ROWS_AT_ONCE], axis=1)
        ids.append(np.nonzero(kept)[1].astype(np.int32))
        counts.append(kept.sum(1))
    return pa.ListArray.from_arrays(offsets_of(np.concatenate(counts)), np.concatenate(ids))


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Return the start of each list and the end of the last one, [N + 1] int32.

    Raises UserError beyond 2^31 - 1, Arrow's limit.
    """
    offsets = np.cumsum(np.concatenate([[0], counts]), dtype=np.int64)
    if offsets[-1] > _MOST_IN_LISTS:
        raise UserError(
            f"kept_tokens: an iteration has {offsets[-1]} kept tokens, a column holds at most {_MOST_IN_LISTS}; record "
            "at records.level = lean, or lower rollout.top_k or rollout.top_p"
        )
    return offsets.astype(np.int32)


def _lists(rows: Tensor) -> list[np.ndarray] | None:
    """Return the rows [N, K] as lists of K numbers; None if K is 0."""
    return list(rows.numpy()) if rows.shape[1] else None


def _updates(item: Iteration) -> Columns:
    tokens = torch.cat([u.tokens for u in item.updates]).numpy()
    sequence, position = cells_of(item.rollout.lengths)
    clipped = [torch.zeros(len(u.tokens)).bool() if u.value is None else u.value.clipped for u in item.updates]
    return {
        "epoch": of_minibatches(item.updates, "epoch"),
        "minibatch": of_minibatches(item.updates, "minibatch"),
        "sequence": sequence[tokens],
        "position": position[tokens],
        **{name: _by_token(item, *field) for name, field in _model_columns(schema.UPDATES).items()},
        "clip_flag": _in_words(item, "clip_flags", flag_names),
        "correction": _in_words(item, "corrections", correction_names),
        "value_clipped": torch.cat(clipped).numpy(),
        "loss_weights": torch.cat([u.loss_weights for u in item.updates]).numpy(),
    }


def _steps(item: Iteration, config: RunConfig) -> Columns:
    count = len(item.updates)
    learning_rate, value_learning_rate = learning_rates(config.ppo, config.value, item.index)
    return {
        **rows_of(schema.STEPS, item.updates),
        **rows_of(schema.STEPS, item.digests),
        "tokens": int32([len(u.tokens) for u in item.updates]),
        **{name: _by_step(item, *field) for name, field in _model_columns(schema.STEPS).items()},
        "learning_rate": [learning_rate] * count,
        "value_learning_rate": [value_learning_rate] * count,
    }


def count_disagreement(
    rollout: Any, forward: Any, tokens: Tensor, ratios: Tensor, new_values: Tensor | None
) -> Columns:
    """Count the unequal bits between sampler and trainer log-probs, first-minibatch ratios and 1, old and new values.

    Args:
        tokens: [M] int64, the tokens of the first minibatch.
        ratios: [M] float32, before any optimizer step.
        new_values: [M] float32, before any optimizer step; None without a value model.
    """
    values, again = np.zeros((2, 0), np.float32)
    if forward.values is not None and new_values is not None:
        values, again = forward.values[tokens].numpy(), new_values.numpy()
    both = rollout.rollout_logprobs.numpy(), forward.old_logprobs.numpy()
    return {"first_minibatch_tokens": len(tokens), **disagreement(*both, ratios.numpy(), values, again)._asdict()}


def _iteration(item: Iteration, config: RunConfig) -> Columns:
    rollout, forward, rewards = item.rollout, item.forward, item.rewards
    evaluation, returns, objective = item.evaluation, item.advantages.returns, config.ppo.objective
    is_normalised = isinstance(config.value, PredictedValue) and config.value.normalize_returns
    count, tokens = len(rollout.lengths), len(rollout.response_ids)
    first, ref_kl, explained = item.updates[0], mean_of(forward.ref_kl), None
    assert first.policy is not None
    again = None if first.value is None else first.value.new_values
    if forward.values is not None and returns is not None:
        explained = explained_variance(forward.values, returns)
    row: Columns = {
        "sequences": count,
        "tokens": tokens,
        "score_mean": mean_of(rewards.scores),
        "accuracy": mean_of(rewards.is_correct),
        "reward_mean": mean_of(run_sums(rewards.rewards, rollout.lengths)),
        "response_length_mean": tokens / count,
        "truncated_fraction": rollout.finish_reason.count("length") / count,
        "entropy": mean_of(forward.entropies),
        "kl_coef": item.coefficients.kl_coef,
        "clip_range": item.coefficients.clip_range if isinstance(objective, AdaptiveClipObjective) else None,
        "penalty_coef": item.coefficients.penalty_coef if isinstance(objective, PenaltyObjective) else None,
        "return_mean": item.coefficients.returns.mean if is_normalised else None,
        "return_scale": item.coefficients.returns.scale if is_normalised else None,
        "policy_steps": sum(u.policy is not None for u in item.updates),
        "ref_kl_per_token": ref_kl,
        "ref_kl_per_sequence": ref_kl * tokens / count,
        "explained_variance": explained,
        **count_disagreement(rollout, forward, first.tokens, first.policy.ratios, again),
        "eval_accuracy": evaluation.accuracy if evaluation else None,
        "eval_score": evaluation.score if evaluation else None,
        **{f"seconds_{phase}": seconds for phase, seconds in item.seconds.items()},
        "ended_at": moment(),
    }
    return {name: [value] for name, value in row.items()}


def evaluation_table(evaluation: Evaluation, iteration: int, level: RecordLevel) -> dict[str, pa.Table]:
    """Return the table `evaluations`, by name, of the evaluation before `iteration`; no table if `level` has none."""
    columns: Columns = {
        "sequence": range(len(evaluation.prompt_key)),
        "response_length": [len(ids) for ids in evaluation.response_ids],
        **fields_of(schema.EVALUATIONS, evaluation),
        **_episode_columns(evaluation.episodes),
    }
    return tables_at(iteration, [schema.EVALUATIONS], {schema.EVALUATIONS.name: columns}, level)


def preparation_tables(
    warm_start: Sequence[WarmStartStep],
    training: RewardTraining | None,
    tokenizer: PreTrainedTokenizerBase,
    level: RecordLevel,
) -> dict[str, pa.Table]:
    """Return the tables of the training before PPO, by name; a training that did not take place has no table."""
    columns: dict[str, Columns] = {}
    if warm_start:
        steps = rows_of(schema.WARM_START_STEPS, warm_start)
        columns["warm_start_steps"] = {"step": list(range(len(warm_start))), **steps}
    if training is not None:
        trained, none = len(training.pairs), [None] * len(training.pairs)
        columns["pairs"] = {
            **pair_columns([*training.pairs, *training.eval_pairs], trained, tokenizer),
            "margin_before": pa.array([*none, *training.margins_before], pa.float32()),
            "margin_after": pa.array([*none, *training.margins_after], pa.float32()),
        }
        columns["pair_updates"] = _pair_updates(training.steps)
        digests = [step.digest for step in training.steps]
        columns["pair_steps"] = {**rows_of(schema.PAIR_STEPS, training.steps), "reward_digest": digests}
    tables = [t for t in schema.PREPARATION if t.name in columns and schema.includes(level, t.level)]
    return {table.name: to_arrow(table, columns[table.name]) for table in tables}


def pair_columns(pairs: Sequence[Preference], trained: int, tokenizer: PreTrainedTokenizerBase) -> Columns:
    """Return the columns of preference pairs; the first `trained` pairs are the training pairs."""
    return {
        **rows_of(schema.PAIRS, pairs),
        "pair": np.arange(len(pairs), dtype=np.int32),
        "held_out": np.arange(len(pairs)) >= trained,
        "chosen": [decode(tokenizer, pair.chosen_ids) for pair in pairs],
        "rejected": [decode(tokenizer, pair.rejected_ids) for pair in pairs],
    }


def _pair_updates(steps: Sequence[PreferenceStep]) -> Columns:
    sizes = [step.pairs for step in steps]
    return {
        "epoch": np.repeat(int32([step.epoch for step in steps]), sizes),
        "minibatch": np.repeat(int32([step.minibatch for step in steps]), sizes),
        "pair": [index for step in steps for index in step.indices],
        "margins": np.array([margin for step in steps for margin in step.margins], dtype=np.float32),
        "losses": np.array([loss for step in steps for loss in step.losses], dtype=np.float32),
    }
