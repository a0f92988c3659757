"""Convert a language run's stages to the columns of its tables, at the configured level.

No other module of records/ knows tensors and stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_repro.base.clock import moment
from ppo_repro.base.errors import UserError
from ppo_repro.buffers import Episode, Evaluation, Iteration, WarmStartStep
from ppo_repro.config.algorithm import AdaptiveClipObjective, PenaltyObjective, PredictedValue
from ppo_repro.config.layout import RecordLevel
from ppo_repro.config.run import RunConfig
from ppo_repro.numerics.sums import mean_of, run_sums
from ppo_repro.ppo.advantages import explained_variance
from ppo_repro.ppo.corrections import correction_names
from ppo_repro.ppo.objectives import flag_names
from ppo_repro.preferences.preference_pairs import Preference
from ppo_repro.preferences.training import PreferenceStep, RewardTraining
from ppo_repro.records import schema
from ppo_repro.records.arrow import to_arrow
from ppo_repro.stages.coefficients import learning_rates
from ppo_repro.statistics.bits import iteration_agreement
from ppo_repro.tasks.tokenizer import decode

Columns = dict[str, Any]
Stages = Mapping[schema.Source, Any]
_MOST_IN_LISTS = 2**31 - 1  # elements of an Arrow column of lists
_ROWS_AT_ONCE = 1024  # of kept tokens, which are whole vocabularies while they are unpacked
# columns of codes, which are recorded as words
_WORDS: Mapping[str, Callable[[Tensor], list[str]]] = {"clip_flag": flag_names, "correction": correction_names}


def arrow_tables(item: Iteration, config: RunConfig) -> dict[str, pa.Table]:
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


def fields_of(table: schema.Table, stages: Stages) -> Columns:
    """Return the table's columns whose sources are these stages. The rows of a matrix become lists."""
    found = {c.name: getattr(stages[c.source], c.field or c.name) for c in table.columns if c.source in stages}
    for name, value in found.items():
        if isinstance(value, Tensor):
            found[name] = list(value.numpy()) if value.dim() == 2 else value.numpy()
    return found


def rows_of(table: schema.Table, source: schema.Source, items: Sequence[Any]) -> Columns:
    """Return the table's columns with this source. Each item is a row, of nulls if the item is None."""
    fields = {c.name: c.field or c.name for c in table.columns if c.source == source}
    return {name: [None if i is None else getattr(i, field) for i in items] for name, field in fields.items()}


def tokens_of(table: schema.Table, source: schema.Source, steps: Sequence[Any], sizes: Sequence[int]) -> Columns:
    """Return the table's columns with this source: a row for each token of optimizer steps with `sizes` tokens.

    A number of a step is repeated for its tokens. The tokens of a step that is None have nulls.
    """
    return {name: _joined(name, values, sizes) for name, values in rows_of(table, source, steps).items()}


def _joined(name: str, values: Sequence[Any], sizes: Sequence[int]) -> np.ndarray | pa.Array | list[str | None]:
    if name in _WORDS:
        steps = zip(values, sizes, strict=True)
        return [word for codes, size in steps for word in ([None] * size if codes is None else _WORDS[name](codes))]
    if isinstance(values[0], int):
        return np.repeat(int32(values), sizes)
    tensors = [torch.zeros(size) if value is None else value for value, size in zip(values, sizes, strict=True)]
    return pa.array(torch.cat(tensors).numpy(), mask=np.repeat([value is None for value in values], sizes))


def cells_of(lengths: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return (sequence, position in the sequence), int32 [N] each, of every token of sequences of these lengths."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    return int32(sequence), int32(torch.arange(len(sequence)) - starts[sequence])


def _sequences(item: Iteration) -> Columns:
    rollout, rewards = item.rollout, item.rewards
    prompts, lengths = rollout.prompts, rollout.lengths
    count = len(lengths)
    return {
        **fields_of(schema.SEQUENCES, {"prompts": prompts, "rollout": rollout, "rewards": rewards}),
        "sequence": np.arange(count, dtype=np.int32),
        "response_ids": [int32(ids) for ids in torch.split(rollout.response_ids, lengths.tolist())],
        "prompt_length": int32([len(ids) for ids in prompts.prompt_ids]),
        "response_length": int32(lengths),
        "kl_penalty_sum": run_sums(rewards.kl_penalties, lengths).numpy(),
        "reward_sum": run_sums(rewards.rewards, lengths).numpy(),
        **_episode_columns(rollout.episodes),
        "is_as_sampled": None if rollout.is_as_sampled is None else _as_numbers(rollout.is_as_sampled),
    }


def _as_numbers(flags: Iterable[Sequence[bool]]) -> list[list[int]]:
    return [list(map(int, row)) for row in flags]


def _episode_columns(episodes: Sequence[Episode] | None) -> Columns:
    """Return the columns of episodes of several turns. They are None if there are none."""
    if episodes is None:
        return {"episode_ids": None, "is_forced": None}
    return {"episode_ids": [e.ids for e in episodes], "is_forced": _as_numbers(e.is_forced for e in episodes)}


def _tokens(item: Iteration, level: RecordLevel) -> Columns:
    rollout, forward = item.rollout, item.forward
    sequence, position = cells_of(rollout.lengths)
    spans = rows_of(schema.TOKENS, "spans", rollout.spans)
    stages: Stages = {
        "rollout": rollout, "forward": forward, "rewards": item.rewards, "advantages": item.advantages
    }  # fmt: skip
    return {
        **fields_of(schema.TOKENS, stages),
        "sequence": sequence,
        "position": position,
        "token_id": int32(rollout.response_ids),
        **{name: int32([value for response in responses for value in response]) for name, responses in spans.items()},
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
    updates, value = item.updates, [u.value for u in item.updates]
    sizes, tokens = [len(u.tokens) for u in updates], torch.cat([u.tokens for u in updates]).numpy()
    sequence, position = cells_of(item.rollout.lengths)
    clipped = [torch.zeros(n).bool() if v is None else v.clipped for v, n in zip(value, sizes, strict=True)]
    return {
        **tokens_of(schema.UPDATES, "step", updates, sizes),
        **tokens_of(schema.UPDATES, "policy", [u.policy for u in updates], sizes),
        **tokens_of(schema.UPDATES, "value", value, sizes),
        "sequence": sequence[tokens],
        "position": position[tokens],
        "value_clipped": torch.cat(clipped).numpy(),
    }


def _steps(item: Iteration, config: RunConfig) -> Columns:
    learning_rate, value_learning_rate = learning_rates(config.ppo, config.value, item.index)
    return {
        **rows_of(schema.STEPS, "step", item.updates),
        **rows_of(schema.STEPS, "policy", [u.policy for u in item.updates]),
        **rows_of(schema.STEPS, "value", [u.value for u in item.updates]),
        **rows_of(schema.STEPS, "digests", item.digests),
        "tokens": int32([len(u.tokens) for u in item.updates]),
        "learning_rate": [learning_rate] * len(item.updates),
        "value_learning_rate": [value_learning_rate] * len(item.updates),
    }


def count_agreement(
    rollout_logprobs: Tensor, old_logprobs: Tensor, ratios: Tensor, old_values: Tensor, new_values: Tensor
) -> Columns:
    """Count the unequal bits between sampler and trainer log-probs, first-minibatch ratios and 1, old and new values.

    Args:
        rollout_logprobs: [N] float32, nats.
        old_logprobs: [N] float32, nats.
        ratios: [M] float32, of the first minibatch, before any optimizer step.
        old_values: [M] float32, before the update; empty without a value model.
        new_values: [M] float32, before any optimizer step; empty without a value model.
    """
    compared = (rollout_logprobs, old_logprobs, ratios, old_values, new_values)
    counts = iteration_agreement(*(tensor.numpy() for tensor in compared))
    return {"first_minibatch_tokens": len(ratios), **counts._asdict()}


def _iteration(item: Iteration, config: RunConfig) -> Columns:
    rollout, forward, rewards = item.rollout, item.forward, item.rewards
    evaluation, returns, objective = item.evaluation, item.advantages.returns, config.ppo.objective
    is_normalised = isinstance(config.value, PredictedValue) and config.value.normalize_returns
    count, tokens = len(rollout.lengths), len(rollout.response_ids)
    first, ref_kl, explained = item.updates[0], mean_of(forward.ref_kl), None
    assert first.policy is not None
    old_values = new_values = torch.zeros(0)
    if forward.values is not None and first.value is not None:
        old_values, new_values = forward.values[first.tokens], first.value.new_values
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
        **count_agreement(rollout.rollout_logprobs, forward.old_logprobs, first.policy.ratios, old_values, new_values),
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
        **fields_of(schema.EVALUATIONS, {"evaluation": evaluation}),
        **_episode_columns(evaluation.episodes),
    }
    return tables_at(iteration, [schema.EVALUATIONS], {schema.EVALUATIONS.name: columns}, level)


def preparation_tables(
    warm_start: Sequence[WarmStartStep],
    training: RewardTraining | None,
    tokenizer: PreTrainedTokenizerBase,
    level: RecordLevel,
) -> dict[str, pa.Table]:
    """Return the tables of the training before PPO, by name. A training that did not take place has no table."""
    columns: dict[str, Columns] = {}
    if warm_start:
        steps = rows_of(schema.WARM_START_STEPS, "step", warm_start)
        columns["warm_start_steps"] = {"step": range(len(warm_start)), **steps}
    if training is not None:
        trained, none = len(training.pairs), [None] * len(training.pairs)
        columns["pairs"] = {
            **pair_columns([*training.pairs, *training.eval_pairs], trained, tokenizer),
            "margin_before": pa.array([*none, *training.margins_before], pa.float32()),
            "margin_after": pa.array([*none, *training.margins_after], pa.float32()),
        }
        columns["pair_updates"] = _pair_updates(training.steps)
        columns["pair_steps"] = rows_of(schema.PAIR_STEPS, "step", training.steps)
    tables = [t for t in schema.PREPARATION if t.name in columns and schema.includes(level, t.level)]
    return {table.name: to_arrow(table, columns[table.name]) for table in tables}


def pair_columns(pairs: Sequence[Preference], trained: int, tokenizer: PreTrainedTokenizerBase) -> Columns:
    """Return the columns of preference pairs. The first `trained` pairs are the training pairs."""
    return {
        **rows_of(schema.PAIRS, "pair", pairs),
        "pair": np.arange(len(pairs), dtype=np.int32),
        "held_out": np.arange(len(pairs)) >= trained,
        "chosen": [decode(tokenizer, pair.chosen_ids) for pair in pairs],
        "rejected": [decode(tokenizer, pair.rejected_ids) for pair in pairs],
    }


def _pair_updates(steps: Sequence[PreferenceStep]) -> Columns:
    return {
        **tokens_of(schema.PAIR_UPDATES, "step", steps, [step.pairs for step in steps]),
        "pair": [index for step in steps for index in step.indices],
        "margins": np.array([margin for step in steps for margin in step.margins], dtype=np.float32),
        "losses": np.array([loss for step in steps for loss in step.losses], dtype=np.float32),
    }
