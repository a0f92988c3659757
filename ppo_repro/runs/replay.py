"""Compute the stages of a run again from its records and compare every bit, which proves that the records suffice.

Each stage starts from the records of earlier stages and calls the same functions as the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ppo_repro import buffers
from ppo_repro.base.errors import PromiseBroken, UserError
from ppo_repro.config.layout import RecordsConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.loop import policy_loss, value_loss
from ppo_repro.records import manifest, reader
from ppo_repro.records.columns import SPANS, iteration_tables
from ppo_repro.records.diff import Difference, first_table_difference
from ppo_repro.records.folder import FORKED_FROM, load_recorded_config
from ppo_repro.records.manifest import Manifest
from ppo_repro.records.schema import Stage
from ppo_repro.runs import checkpoint
from ppo_repro.sampling.faults.trainer import with_loss_mask
from ppo_repro.stages.coefficients import first_coefficients, next_coefficients
from ppo_repro.stages.forward import kl_terms_of
from ppo_repro.stages.rewards import compute_advantages, rewards_from
from ppo_repro.stages.training_batch import (
    Minibatch,
    Schedule,
    TrainingBatch,
    minibatch_of,
    training_batch,
)
from ppo_repro.stages.updates import policy_update, value_update
from ppo_repro.tasks.rewards import Judgement, weighted_scores
from ppo_repro.user.functions import Functions, load_functions

STAGES: tuple[Stage, ...] = get_args(Stage)
SECONDS = ("rollout", "forward", "update", "evaluation", "digests", "other")

@dataclass(frozen=True)
class Records:
    """Recorded tables of one iteration, by name."""

    iteration: int
    tables: Mapping[str, pa.Table]

    def has(self, table: str, column: str) -> bool:
        """Return whether a column was recorded; otherwise it is null in every row."""
        values = self.tables[table].column(column)
        return bool(values.null_count < len(values))

    def tensor(self, table: str, column: str, rows: slice = slice(None)) -> Tensor:
        """Return some rows of a column as a tensor; the column has no nulls."""
        return torch.from_numpy(np.array(self.tables[table].column(column).to_numpy()[rows]))

    def tensor_or_none(self, table: str, column: str, rows: slice = slice(None)) -> Tensor | None:
        """Return some rows of a column as a tensor; None if one of these rows is null."""
        is_there = self.tables[table].column(column).is_valid().to_numpy()[rows].all()
        return self.tensor(table, column, rows) if is_there else None

    def values(self, table: str, column: str) -> tuple[Any, ...]:
        """Return a column as Python values; lists become tuples."""
        values = self.tables[table].column(column).to_pylist()
        return tuple(tuple(value) if isinstance(value, list) else value for value in values)

    def values_or_none(self, table: str, column: str) -> tuple[Any, ...] | None:
        return self.values(table, column) if self.has(table, column) else None


def _read(run_dir: Path, recorded: Manifest, iteration: int) -> Records:
    """Read the tables of an iteration, side tables included, without comparing digests.

    Raises UserError if they cannot be read or do not fit together.
    """
    tables = reader.read_moment(run_dir, recorded, iteration, verify=False)
    records = Records(iteration, tables)
    lengths = records.tensor("sequences", "response_length")
    tokens = tables["tokens"].num_rows
    if len(lengths) == 0 or lengths.min() < 1 or int(lengths.sum()) != tokens:
        path = manifest.table_path(run_dir, "tokens", iteration)
        raise UserError(f"{path}: has {tokens} rows; the responses have {int(lengths.sum())} tokens; restore the file")
    return records


def _rollout(records: Records) -> buffers.Rollout:
    """Return the sampled responses; the sets of kept tokens are absent, because no later stage reads them."""
    count = records.tables["tokens"].num_rows

    def of(column: str) -> tuple[Any, ...]:
        return records.values("sequences", column)

    lengths = records.tensor("sequences", "response_length").to(torch.int64)
    columns = [records.tensor("tokens", name).split(lengths.tolist()) for name in SPANS]
    as_sampled = records.values_or_none("sequences", "is_as_sampled")
    return buffers.Rollout(
        prompts=buffers.Prompts(**{field.name: of(field.name) for field in fields(buffers.Prompts)}),
        response_ids=records.tensor("tokens", "token_id").to(torch.int64),
        lengths=lengths,
        temperature=1.0,
        rollout_logprobs=records.tensor("tokens", "rollout_logprobs"),
        log_kept_mass=records.tensor("tokens", "log_kept_mass"),
        kept_tokens=torch.empty(count, 0, dtype=torch.uint8),
        finish_reason=of("finish_reason"),
        response=of("response"),
        server=(None,) * len(lengths),
        latency=(None,) * len(lengths),
        spans=tuple(buffers.Spans(*(part.tolist() for part in parts)) for parts in zip(*columns, strict=True)),
        episodes=_episodes(records, "sequences"),
        rollout_policy_versions=records.values_or_none("sequences", "rollout_policy_versions"),
        sampled_ids=records.values_or_none("sequences", "sampled_ids"),
        is_as_sampled=None if as_sampled is None else tuple(tuple(map(bool, row)) for row in as_sampled),
    )


def _episodes(records: Records, table: str) -> tuple[buffers.Episode, ...] | None:
    """Return the episodes, without the unrecorded texts of turns; None if the run has no environment."""
    if not records.has(table, "episode_ids"):
        return None
    rows = zip(records.values(table, "episode_ids"), records.values(table, "is_forced"), strict=True)
    return tuple(buffers.Episode(ids, tuple(map(bool, forced)), ()) for ids, forced in rows)


def _forward(records: Records) -> buffers.ForwardPass:
    """Return the outputs of the networks before the update."""
    names = ("old_logprobs", "ref_logprobs", "ref_kl", "entropies", "prob_sq_sums")
    return buffers.ForwardPass(
        **{name: records.tensor("tokens", name) for name in names},
        cumulative_probs=records.tensor_or_none("tokens", "cumulative_probs"),
        reverse_ref_kl=records.tensor_or_none("tokens", "reverse_ref_kl"),
        routes=torch.empty(records.tables["tokens"].num_rows, 0, dtype=torch.int32),
        values=records.tensor_or_none("tokens", "values"),
    )


def _rewards(records: Records) -> buffers.Rewards:
    """Return scores and rewards; a column without records is 0, and is not compared."""
    zeros = torch.zeros(records.tables["tokens"].num_rows)
    placed, raw = (records.tensor_or_none("tokens", name) for name in ("placed_scores", "raw_rewards"))
    return buffers.Rewards(
        scores=records.tensor("sequences", "scores"),
        score_parts=records.values("sequences", "score_parts"),
        is_correct=torch.tensor(records.values("sequences", "is_correct")),
        kl_penalties=records.tensor("tokens", "kl_penalties"),
        placed_scores=zeros.to(torch.float64) if placed is None else placed,
        raw_rewards=zeros if raw is None else raw,
        rewards=records.tensor("tokens", "rewards"),
    )


def _evaluation(records: Records) -> buffers.Evaluation | None:
    """Return the held-out responses; None if the run has no evaluation, or did not record its responses."""
    if "evaluations" not in records.tables:
        return None
    names = [field.name for field in fields(buffers.Evaluation) if field.name != "episodes"]
    columns: dict[str, Any] = {name: records.values("evaluations", name) for name in names}
    return buffers.Evaluation(**columns, episodes=_episodes(records, "evaluations"))


@dataclass(frozen=True)
class LeftOut:
    """A stage that was not computed in some iterations, because they did not record a column that it needs."""

    column: str
    iterations: int


def _counted(iterations: int) -> str:
    return f"{iterations} iteration{'s' if iterations != 1 else ''}"


@dataclass(frozen=True)
class Recomputed:
    """Stages of a run that were computed again."""

    iterations: int  # computed again, including the iteration with the difference
    compared: Mapping[Stage, int]  # values by stage, up to the difference
    left_out: Mapping[Stage, LeftOut]  # stages that were not computed in each iteration
    stage: Stage | None  # the stage that differs; None if no stage does
    difference: Difference | None  # left: the record; right: computed again

    def lines(self) -> list[str]:
        """Describe each stage in one line, and the difference if there is one."""
        described = list[str]()
        for stage in STAGES:
            if stage == self.stage:
                assert self.difference is not None
                return [*described, f"{stage}: different: {self.difference.describe()}; the left is recorded"]
            if stage in self.compared:
                iterations = self.iterations - (self.left_out[stage].iterations if stage in self.left_out else 0)
                described.append(f"{stage}: {self.compared[stage]:,} values identical in {_counted(iterations)}")
        for stage, left in self.left_out.items():
            because = f"because column {left.column} is not recorded"
            described.append(f"{stage}: not computed in {_counted(left.iterations)}, {because}")
        return described


def recompute(run_dir: Path, recorded: Manifest) -> Recomputed | None:
    """Compute the stages of a recorded language run again, from its records and config.yaml alone, without a model.

    A fork is computed from its first own iteration on. Digests are not verified, because a changed value is found here.

    Returns:
        The result; None for a run of another kind, and without an iteration of its own.

    Raises:
        UserError: a table cannot be read, or a function of the user's fails.
    """
    own = recorded.own_iterations
    if not manifest.has_responses(recorded) or not own:
        return None
    config = load_recorded_config(run_dir)
    # compute all columns that follow from records, at whatever level the run recorded
    at_full = config.model_copy(update={"records": RecordsConfig(level="full")})
    coefficients, functions = first_coefficients(config.kl, config.ppo.objective), load_functions(config.functions)
    if recorded.origin is not None:  # the iterations before have another configuration
        coefficients = checkpoint.load_coefficients(run_dir / FORKED_FROM, recorded.files[FORKED_FROM])
    compared, left_out = dict[Stage, int](), dict[Stage, LeftOut]()
    for iteration in own:
        records = _read(run_dir, recorded, iteration)
        missing = _unrecorded(config, records)
        for stage, column in missing.items():
            before = left_out[stage].iterations if stage in left_out else 0
            left_out[stage] = LeftOut(column, before + 1)
        stages = [stage for stage in STAGES if stage not in missing]
        item = _recorded_iteration(config, records, coefficients, functions)
        tables = iteration_tables(_again(config, item, stages, functions), at_full)
        for stage in stages:
            count, difference = _compare(config, recorded, records, tables, stage)
            compared[stage] = compared.get(stage, 0) + count
            if difference is not None:
                return Recomputed(iteration + 1 - own.start, compared, left_out, stage, difference)
        coefficients = next_coefficients(
            config, coefficients, item.forward, item.advantages, item.updates, len(item.rollout.lengths)
        )
    return Recomputed(len(own), compared, left_out, None, None)


def _unrecorded(config: RunConfig, records: Records) -> dict[Stage, str]:
    """Return the stages that need a column which the iteration did not record, with the column.

    The records decide, not `records.level`: a resumed run may change its level, and config.yaml has the first one.
    """
    needs = dict[Stage, str]()
    if config.kl.reverses_exactly and not records.has("tokens", "reverse_ref_kl"):
        needs["rewards"] = "tokens.reverse_ref_kl"
    if config.kl.differentiates_exactly and not records.has("updates", "kl_terms"):
        needs["losses"] = "updates.kl_terms"
    return needs


def _recorded_iteration(
    config: RunConfig, records: Records, coefficients: buffers.Coefficients, functions: Functions
) -> buffers.Iteration:
    """Return a recorded iteration, with the losses computed from its records.

    Args:
        config: the run.
        records: the tables of the iteration.
        coefficients: the coefficients in force.
        functions: the user's functions.
    """
    rollout, forward = _rollout(records), _forward(records)
    advantages = buffers.Advantages(
        raw_advantages=records.tensor("tokens", "raw_advantages"),
        advantages=records.tensor("tokens", "advantages"),
        returns=records.tensor_or_none("tokens", "returns"),
    )
    digests = zip(records.values("steps", "policy_digest"), records.values("steps", "value_digest"), strict=True)
    received = with_loss_mask(config.mismatch.trainer, rollout)
    batch = training_batch(config, coefficients, received, forward, advantages, functions)
    return buffers.Iteration(
        index=records.iteration,
        evaluation=_evaluation(records),
        coefficients=coefficients,
        rollout=rollout,
        forward=forward,
        rewards=_rewards(records),
        advantages=advantages,
        updates=tuple(_updates(config, records, batch)),
        digests=tuple(buffers.WeightDigests(policy, value) for policy, value in digests),
        seconds=dict.fromkeys(SECONDS, 0.0),
    )


def _again(
    config: RunConfig, item: buffers.Iteration, stages: Collection[Stage], functions: Functions
) -> buffers.Iteration:
    """Return the iteration with recomputed rewards and advantages, each from the records of the stage before."""
    rewards, advantages = item.rewards, item.advantages
    if "rewards" in stages:
        # the values of the reward terms, which the task's verifier gave, are recorded
        finished = [reason == "stop" for reason in item.rollout.finish_reason]
        scores = weighted_scores(config.reward, rewards.score_parts, finished)
        judged = Judgement(scores, [list(parts) for parts in rewards.score_parts], rewards.is_correct.tolist())
        coefficient = item.coefficients.kl_coef
        rewards = rewards_from(config, judged, item.rollout, item.forward, coefficient, functions)
    if "advantages" in stages:
        advantages = compute_advantages(config.advantages, item.rollout, item.forward, item.rewards, functions)
    return replace(item, rewards=rewards, advantages=advantages)


def _updates(config: RunConfig, records: Records, batch: TrainingBatch) -> Iterator[buffers.MinibatchUpdate]:
    """Yield the optimizer steps of the schedule, with the recorded results of the networks."""
    steps, count, end = records.tables["steps"].to_pylist(), records.tables["updates"].num_rows, 0
    schedule = Schedule(config, records.iteration)
    for step, turn in zip_longest(steps, schedule.turns(len(batch.rollout.lengths))):
        if step is None or turn is None:
            more = "fewer" if step is None else "more"
            raise PromiseBroken(
                f"table steps, iteration {records.iteration}: has {len(steps)} rows, {more} than epochs and KL give"
            )
        minibatch = minibatch_of(config.ppo.aggregation, batch, turn.sequences)
        start, end = end, end + len(minibatch.tokens)
        if end > count:
            raise PromiseBroken(
                f"table updates, iteration {records.iteration}: has {count} rows; "
                f"the minibatches of the recorded steps have at least {end} tokens"
            )
        rows, policy = slice(start, end), None
        if turn.of_policy:
            policy = _policy(config, batch, minibatch, records, rows, step["grad_norm"])
        if policy is not None:
            schedule.follow(policy)
        value = None
        new_values = records.tensor_or_none("updates", "new_values", rows)
        if batch.value_targets is not None and new_values is not None:
            columns = value_loss(batch.value_targets, minibatch.tokens, new_values)
            value = value_update(minibatch, columns, step["value_grad_norm"])
        yield buffers.MinibatchUpdate(
            epoch=turn.epoch,
            minibatch=turn.minibatch,
            tokens=minibatch.tokens,
            loss_weights=minibatch.loss_weights,
            policy=policy,
            value=value,
        )


def _policy(
    config: RunConfig, batch: TrainingBatch, minibatch: Minibatch, records: Records, rows: slice, grad_norm: float
) -> buffers.PolicyUpdate | None:
    tokens = minibatch.tokens
    logprobs, entropies = (records.tensor_or_none("updates", n, rows) for n in ("new_logprobs", "new_entropies"))
    if logprobs is None or entropies is None:
        return None
    if not config.kl.differentiates_exactly:
        kl_terms = kl_terms_of(batch, tokens, logprobs, None)
    else:
        kl_terms = records.tensor_or_none("updates", "kl_terms", rows)
        if kl_terms is None:  # then `_unrecorded` leaves out the losses of this iteration
            kl_terms = torch.zeros_like(logprobs)
    columns = policy_loss(batch, tokens, logprobs, entropies, kl_terms)
    return policy_update(batch, minibatch, columns, grad_norm)


def _compare(
    config: RunConfig, recorded: Manifest, records: Records, computed: Mapping[str, pa.Table], stage: Stage
) -> tuple[int, Difference | None]:
    """Return the number of compared values of a stage, and the first difference."""
    skipped = {("updates", "kl_terms")} if config.kl.differentiates_exactly else set()
    if "evaluations" not in records.tables:
        skipped |= {("iterations", "eval_accuracy"), ("iterations", "eval_score")}
    count = 0
    for table in manifest.tables_of(recorded):
        # the recorded columns; at level lean a column may be null in every row
        compared = tuple(
            column
            for column in table.columns
            if column.stage == stage
            and (table.name, column.name) not in skipped
            and (column.in_fingerprint or records.has(table.name, column.name))
        )
        left, right = records.tables[table.name], computed[table.name]
        difference = first_table_difference(replace(table, columns=compared), left, right, records.iteration)
        if difference is not None:
            return count, difference
        count += sum(len(left) - left.column(column.name).null_count for column in compared)
    return count, None
