"""Compute the stages of a run again from its records, and compare every bit.

Each stage starts from the records of earlier stages and calls the same functions as the run, on the same micro-batches:
torch's own functions, which a user's objective may call, round an element by its place in a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import get_args

import pyarrow as pa
import torch

from ppo_repro import buffers
from ppo_repro.base.errors import PromiseBroken
from ppo_repro.base.ranks import Ranks
from ppo_repro.config.layout import RecordsConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.loop import policy_loss, value_loss
from ppo_repro.models.batches import MicroBatch
from ppo_repro.records import manifest
from ppo_repro.records.columns import arrow_tables
from ppo_repro.records.diff import Difference, first_table_difference
from ppo_repro.records.folder import FORKED_FROM, load_recorded_config
from ppo_repro.records.manifest import Manifest
from ppo_repro.records.notes import processes_by_iteration
from ppo_repro.records.schema import ITERATIONS, Stage
from ppo_repro.runs import checkpoint
from ppo_repro.runs.recorded_buffers import (
    Records,
    advantages_of,
    evaluation_of,
    forward_of,
    read_iteration,
    rewards_of,
    rollout_of,
)
from ppo_repro.sampling.faults.trainer import with_loss_mask
from ppo_repro.stages.advantages import compute_advantages
from ppo_repro.stages.coefficients import first_coefficients, next_coefficients
from ppo_repro.stages.forward import kl_terms_of
from ppo_repro.stages.minibatches import Minibatch, Schedule, micro_batches_of_rank, minibatch_of
from ppo_repro.stages.rewards import rewards_from
from ppo_repro.stages.training_batch import TrainingBatch, training_batch
from ppo_repro.stages.updates import PolicyColumns, joined, policy_update, value_update
from ppo_repro.tasks.rewards import Judgement, weighted_scores
from ppo_repro.user.functions import Functions, load_functions

STAGES: tuple[Stage, ...] = get_args(Stage)
SECONDS = tuple(c.name.removeprefix("seconds_") for c in ITERATIONS.columns if c.name.startswith("seconds_"))


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
    iterations = recorded.own_iterations
    if not manifest.has_responses(recorded) or not iterations:
        return None
    config = load_recorded_config(run_dir)
    # level `full` computes all columns that follow from the records, whatever level the run recorded
    at_full = config.model_copy(update={"records": RecordsConfig(level="full")})
    coefficients, functions = first_coefficients(config.kl, config.ppo.objective), load_functions(config.functions)
    if recorded.origin is not None:  # copied iterations have the origin's configuration
        coefficients = checkpoint.load_coefficients(run_dir / FORKED_FROM, recorded.files[FORKED_FROM])
    compared, left_out = dict[Stage, int](), dict[Stage, LeftOut]()
    threads = config.layout.threads if config.mismatch.sampler.stock or config.numerics.mode == "native" else 1
    torch.set_num_threads(threads)  # of the run; they divide long tensors
    processes = processes_by_iteration(run_dir, recorded)
    for iteration in iterations:
        records = read_iteration(run_dir, recorded, iteration)
        missing = _unrecorded(config, records)
        for stage, column in missing.items():
            before = left_out[stage].iterations if stage in left_out else 0
            left_out[stage] = LeftOut(column, before + 1)
        stages = [stage for stage in STAGES if stage not in missing]
        item = _recorded_iteration(config, records, processes[iteration], coefficients, functions)
        tables = arrow_tables(_again(config, item, stages, functions), at_full)
        for stage in stages:
            count, difference = _compare(config, recorded, records, tables, stage)
            compared[stage] = compared.get(stage, 0) + count
            if difference is not None:
                return Recomputed(iteration + 1 - iterations.start, compared, left_out, stage, difference)
        coefficients = next_coefficients(
            config, coefficients, item.forward, item.advantages, item.updates, len(item.rollout.lengths)
        )
    return Recomputed(len(iterations), compared, left_out, None, None)


def _unrecorded(config: RunConfig, records: Records) -> dict[Stage, str]:
    """Return the stages that need a column which the iteration did not record, with the column.

    The records decide, not `records.level`: a resumed run may change its level, and config.yaml has the first one.
    """
    needs = dict[Stage, str]()
    if config.kl.rewards_have_exact_reverse_kl and not records.has("tokens", "reverse_ref_kl"):
        needs["rewards"] = "tokens.reverse_ref_kl"
    if config.kl.loss_has_exact_kl and not records.has("updates", "kl_terms"):
        needs["losses"] = "updates.kl_terms"
    return needs


def _recorded_iteration(
    config: RunConfig, records: Records, processes: int, coefficients: buffers.Coefficients, functions: Functions
) -> buffers.Iteration:
    """Return an iteration that so many processes recorded, with the losses computed from its records."""
    rollout, forward = rollout_of(records, config.rollout.temperature), forward_of(records)
    advantages = advantages_of(records)
    digests = zip(records.values("steps", "policy_digest"), records.values("steps", "value_digest"), strict=True)
    received = with_loss_mask(config.mismatch.trainer, rollout)
    batch = training_batch(config, coefficients, received, forward, advantages, functions)
    return buffers.Iteration(
        index=records.iteration,
        evaluation=evaluation_of(records),
        coefficients=coefficients,
        rollout=rollout,
        forward=forward,
        rewards=rewards_of(records),
        advantages=advantages,
        updates=tuple(_updates(config, records, processes, batch)),
        digests=tuple(buffers.WeightDigests(policy, value) for policy, value in digests),
        seconds=dict.fromkeys(SECONDS, 0.0),
    )


def _again(
    config: RunConfig, item: buffers.Iteration, stages: Collection[Stage], functions: Functions
) -> buffers.Iteration:
    """Return the iteration with recomputed rewards and advantages, each from the records of the stage before."""
    rewards, advantages = item.rewards, item.advantages
    if "rewards" in stages:
        # the values of the reward terms come from the records, because only the task's verifier can compute them
        finished = [reason == "stop" for reason in item.rollout.finish_reason]
        scores = weighted_scores(config.reward, rewards.score_parts, finished)
        judged = Judgement(scores, [list(parts) for parts in rewards.score_parts], rewards.is_correct.tolist())
        coefficient = item.coefficients.kl_coef
        rewards = rewards_from(config, judged, item.rollout, item.forward, coefficient, functions)
    if "advantages" in stages:
        advantages = compute_advantages(config.advantages, item.rollout, item.forward, item.rewards, functions)
    return replace(item, rewards=rewards, advantages=advantages)


def _updates(
    config: RunConfig, records: Records, processes: int, batch: TrainingBatch
) -> Iterator[buffers.MinibatchUpdate]:
    """Yield the optimizer steps of the schedule, with the recorded results of the networks."""
    steps, count = records.tables["steps"].to_pylist(), records.tables["updates"].num_rows
    end = 0
    schedule = Schedule(config, records.iteration)
    for step, planned in zip_longest(steps, schedule.planned_steps(len(batch.rollout.lengths))):
        if step is None or planned is None:
            more = "fewer" if step is None else "more"
            raise PromiseBroken(
                f"table steps, iteration {records.iteration}: has {len(steps)} rows, {more} than epochs and KL give"
            )
        micro_batches = _micro_batches(config, batch, planned.sequences, processes)
        minibatch = minibatch_of(config.ppo.aggregation, batch, planned.sequences, micro_batches)
        start, end = end, end + len(minibatch.tokens)
        if end > count:
            raise PromiseBroken(
                f"table updates, iteration {records.iteration}: has {count} rows; "
                f"the minibatches of the recorded steps have at least {end} tokens"
            )
        rows = slice(start, end)
        policy = _policy(config, batch, minibatch, records, rows, step["grad_norm"]) if planned.of_policy else None
        if policy is not None:
            schedule.follow(policy)
        elif planned.of_policy:
            raise PromiseBroken(
                f"table updates, iteration {records.iteration}: new_logprobs or new_entropies is null in "
                f"minibatch {planned.minibatch} of epoch {planned.epoch}"
            )
        new_values, value = records.tensor_or_none("updates", "new_values", rows), None
        if batch.value_targets is not None and new_values is not None:
            columns = value_loss(batch.value_targets, minibatch.tokens, new_values)
            value = value_update(minibatch, columns, step["value_grad_norm"])
        yield buffers.MinibatchUpdate(
            epoch=planned.epoch,
            minibatch=planned.minibatch,
            tokens=minibatch.tokens,
            loss_weights=minibatch.loss_weights,
            policy=policy,
            value=value,
        )


def _micro_batches(
    config: RunConfig, batch: TrainingBatch, sequences: torch.Tensor, processes: int
) -> list[MicroBatch]:
    """Return the micro-batches of a minibatch, of all processes in rank order."""
    return [
        micro_batch
        for rank in range(processes)
        for micro_batch in micro_batches_of_rank(
            config.layout, config.ppo.replay_routes, batch.rollout, sequences, Ranks(rank, processes)
        )
    ]


def _policy(
    config: RunConfig, batch: TrainingBatch, minibatch: Minibatch, records: Records, rows: slice, grad_norm: float
) -> buffers.PolicyUpdate | None:
    """Return a step of the policy from the recorded outputs of its networks; None if they were not recorded."""
    logprobs, entropies = (records.tensor_or_none("updates", n, rows) for n in ("new_logprobs", "new_entropies"))
    if logprobs is None or entropies is None:
        return None
    # only the models can compute exact KL terms; if they were not recorded, `_unrecorded` leaves out the losses
    exact_terms = records.tensor_or_none("updates", "kl_terms", rows) if config.kl.loss_has_exact_kl else None
    columns: list[PolicyColumns] = []
    end = 0
    for micro_batch in minibatch.micro_batches:
        tokens = micro_batch.tokens
        start, end = end, end + len(tokens)
        new_logprobs = logprobs[start:end]
        if exact_terms is None:
            kl_terms = kl_terms_of(batch, tokens, new_logprobs, None)
        else:
            kl_terms = exact_terms[start:end]
        columns.append(policy_loss(batch, tokens, new_logprobs, entropies[start:end], kl_terms))
    return policy_update(batch, minibatch, joined(columns), grad_norm)


def _compare(
    config: RunConfig, recorded: Manifest, records: Records, computed: Mapping[str, pa.Table], stage: Stage
) -> tuple[int, Difference | None]:
    """Return the number of compared values of a stage, and the first difference."""
    skipped = {("updates", "kl_terms")} if config.kl.loss_has_exact_kl else set()
    if "evaluations" not in records.tables:
        skipped |= {("iterations", "eval_accuracy"), ("iterations", "eval_score")}
    count = 0
    for table in manifest.tables_of(recorded):
        # only columns that the run recorded: at level `lean` a column may be null in every row
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
