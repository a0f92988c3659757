"""Plan the memory of a run as one table by purpose and phase, without loading a weight.

Weights, moments and gradients are exact. The other numbers are estimates for prompts and responses of the longest
allowed length. The plan assumes that native numerics need as much memory as the kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import torch

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import size
from ppo_repro.base.processes import SLOTS
from ppo_repro.config.algorithm import LoraConfig, SeparateValue, ValueHead
from ppo_repro.config.run import RunConfig
from ppo_repro.numerics.shards import MESSAGE
from ppo_repro.runs.kept_checkpoints import FLOAT, MOMENTS
from ppo_repro.runs.model_sizes import Model, Shape, Sizes, sizes_of
from ppo_repro.stages.forward import LOGITS_AT_ONCE

PHASES = ("loading", "rollout", "scoring", "update")
SAVING = "saving"  # a checkpoint, in the first of several processes: it joins the moments of all
SMALLER: tuple[tuple[str, int], ...] = (  # fields of `layout` and values that may lower the peak
    ("update_micro_batch", 1),
    ("update_micro_batch", 0),  # one micro-batch, whose gradients need no partial sums
    ("gradient_checkpointing", True),
    ("forward_micro_batch", 1),
    ("rollout_slots", 8),
)
ADAPTER = "{rank: 16, alpha: 32}"
LEAST_SAVED = 0.9  # a change of a field is named if it lowers the peak to less than this share
EXACT_ROWS = ("weights", "moments", "older policies", "gradients")  # no estimates
# bytes of the interpreter with torch, transformers and kernels; 0.2 GB of it are pages of files, which the system frees
# when memory is short
PROCESS = 700_000_000
CARD_SCRATCH = 600_000_000  # the memory that kernels of a GPU allocate: scores of attention, parts of products


@dataclass(frozen=True)
class Plan:
    """Memory of one of the processes of a run, in bytes: rows[purpose][phase]."""

    models: tuple[Model, ...]
    rows: dict[str, dict[str, int]]
    processes: int
    sent: int  # bytes that a process sends in an optimizer step of every model, on average

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES if self.processes == 1 else (*PHASES, SAVING)

    def total(self, phase: str, rows: tuple[str, ...] | None = None) -> int:
        """Return the bytes of a phase, summed over some or all rows, without the process itself."""
        return sum(row.get(phase, 0) for name, row in self.rows.items() if rows is None or name in rows)

    @property
    def certain(self) -> int:
        """Return the bytes that the run certainly needs at one time."""
        return max(self.total(phase, EXACT_ROWS) for phase in self.phases)

    @property
    def largest_phase(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        return PROCESS + self.total(self.largest_phase)


Rows = dict[str, dict[str, int]]  # bytes by purpose and phase


def plan_run(config: RunConfig, processes: int = 1) -> Plan:
    """Return the memory plan for each of `processes` of a run, on the CPU or on its GPU.

    Raises UserError for an unknown model.
    """
    return _planned(config, sizes_of(config), processes)


def _planned(config: RunConfig, sizes: Sizes, processes: int) -> Plan:
    models = sizes.models
    device, deterministic = config.layout.device, config.numerics.mode == "deterministic"
    if device != "cpu" and not deterministic:
        raise UserError(f"layout.device = {device}: plan needs numerics.mode = deterministic there")
    rows = {**_of_weights(config, sizes.policy, models, processes), **_of_passes(config, sizes, processes)}
    rows = {name: row for name, row in rows.items() if any(row.values())}
    if processes == 1:
        rows = {name: {phase: row[phase] for phase in row if phase != SAVING} for name, row in rows.items()}
    updated, collected = (sum(getattr(m, name) for m in models if m.trained) for name in ("trained", "collected"))
    exchanged = (collected + updated) * (processes - 1) if deterministic else 2 * collected * (processes - 1)
    return Plan(models, rows, processes, FLOAT * exchanged // processes)


def _micro_batch(size: int, sequences: int, processes: int) -> int:
    """Return the sequences of a pass in one of the processes, which divide the sequences. `size` 0 takes all."""
    mine = ceil(sequences / processes)
    return min(size or mine, mine)


def _of_weights(config: RunConfig, policy: Shape, models: tuple[Model, ...], processes: int) -> Rows:
    """Return the rows of what a process holds of the models: weights, copies, moments, gradients."""
    trained = [model for model in models if model.trained]
    weights = FLOAT * sum(model.weights for model in models)
    # the model as read, and a copy of it until adapted models share its weights
    read = FLOAT * policy.parameters * (2 if any(model.frozen for model in trained) else 1)
    moments = MOMENTS * sum(model.trained for model in trained)
    divided_by = processes if config.numerics.mode == "deterministic" else 1  # processes divide the moments
    moments_of_process = MOMENTS * ceil(sum(model.trained for model in trained) / divided_by)
    is_on_card = config.layout.device != "cpu"
    message = min(MESSAGE, max(model.collected for model in trained)) // 2 if processes > 1 else 0
    return {
        "weights": {"loading": weights + read, **dict.fromkeys((*PHASES[1:], SAVING), weights)},
        "moments": dict.fromkeys((*PHASES, SAVING), moments_of_process),
        "all moments": {SAVING: moments if divided_by > 1 and not is_on_card else 0},  # on the CPU
        "older policies": _older_policies(config, models[0]),
        "copies": _copies_that_sample(config, policy, models[0]),
        "packed weights": _packed_weights(config, policy, models),
        "kernels": dict.fromkeys(PHASES[1:], CARD_SCRATCH if is_on_card else 0),
        "gradients": {"update": _gradients(config, trained, processes)},
        "messages": {"update": 2 * FLOAT * message},
    }


def _older_policies(config: RunConfig, policy: Model) -> dict[str, int]:
    """Return the bytes of the policies that sample instead of the present one, by phase."""
    version, lag = FLOAT * policy.trained, min(config.mismatch.sampler.lag, config.ppo.iterations - 1)
    older = dict.fromkeys(PHASES[1:], lag * version)
    older["rollout"] += version if lag else 0  # while an older policy samples, a copy of the present weights waits
    return older


def _copies_that_sample(config: RunConfig, shape: Shape, policy: Model) -> dict[str, int]:
    """Return the bytes of the policy's copies in other precision, with which a deliberate fault samples, by phase."""
    sampler = config.mismatch.sampler
    stock = 0 if sampler.stock is None else getattr(torch, sampler.stock).itemsize * shape.parameters
    rounded = FLOAT * policy.packed if sampler.precision.weights != "float32" else 0
    return {phase: stock + (rounded if phase == "rollout" else 0) for phase in PHASES}


def _packed_weights(config: RunConfig, shape: Shape, models: tuple[Model, ...]) -> dict[str, int]:
    """Return the bytes of the weights as the kernels read them, by phase; empty if the kernels read them as they lie.

    A frozen model frees its packed weights after its pass. A value model is packed after the reference.
    """
    numerics = config.numerics
    if numerics.mode != "deterministic" or (config.layout.device != "cpu" and numerics.precision == "highest"):
        return {}
    trained = sum(model.packed for model in models if model.trained)
    floats = {
        "rollout": trained,
        "scoring": models[0].packed + max(model.packed for model in models[1:]),
        "update": trained + shape.packed(shape.struct.vocabulary) * config.kl.loss_has_exact_kl,
        SAVING: trained,
    }
    return {phase: FLOAT * count for phase, count in floats.items()}


def _gradients(config: RunConfig, trained: list[Model], processes: int) -> int:
    """Return the bytes of the gradients, of which partial sums are kept if a process has several micro-batches."""
    minibatch = config.ppo.minibatch_size
    is_split = _micro_batch(config.layout.update_micro_batch, minibatch, processes) < ceil(minibatch / processes)
    is_deterministic = config.numerics.mode == "deterministic"
    arrays = (SLOTS // processes).bit_length() if is_deterministic and is_split else 1
    return FLOAT * arrays * sum(model.collected for model in trained)


def _of_passes(config: RunConfig, sizes: Sizes, processes: int) -> Rows:
    """Return the rows of what a process holds while it samples, scores and trains the longest sequences."""
    policy = sizes.policy
    layout, context, responses = config.layout, config.numerics.max_context, config.rollout.max_response_tokens
    sequences, row, vocabulary = config.sequences_per_iteration, context - 1, policy.struct.vocabulary
    forward = _micro_batch(layout.forward_micro_batch, sequences, processes)
    update = _micro_batch(layout.update_micro_batch, config.ppo.minibatch_size, processes)
    seats = _micro_batch(layout.rollout_slots, max(sequences, config.task.num_eval_prompts), processes)
    rows_at_once = max(1, LOGITS_AT_ONCE // vocabulary)
    tensors = 2 if config.numerics.mode == "deterministic" else 5  # as large as the logits
    # with top-k or top-p each process has, for each token of all responses, one bit for each token of the vocabulary
    kept_sets = sequences * responses * ceil(vocabulary / 8) * config.rollout.cuts
    return {
        "activations": {
            "rollout": policy.forward(seats * (context - responses)),
            "scoring": policy.forward(forward * row) + policy.cache(forward * row),
            "update": max(s.step(update * row, layout.gradient_checkpointing) for s in (policy, sizes.value) if s),
        },
        "kept tokens": dict.fromkeys(PHASES[1:], kept_sets),
        "KV cache": {"rollout": policy.cache(seats * ceil(context / 16) * 16)},
        "logits": {
            "rollout": 4 * FLOAT * seats * vocabulary,  # a masked copy, and bounds of the noise
            # of policy and reference
            "scoring": tensors * FLOAT * vocabulary * min(forward * responses, rows_at_once),
            # with gradients
            "update": tensors * FLOAT * vocabulary * min(update * responses, rows_at_once),
        },
    }


def savings(config: RunConfig, processes: int = 1) -> list[tuple[str, int]]:
    """Return changes of fields, `FIELD=VALUE`, that lower the peak most, each with the peak after it and those before.

    Fields of `layout` come first, because they change no result; adapters follow. A change that lowers the peak by less
    than a tenth is left out.
    """
    sizes, lower_peaks = sizes_of(config), list[tuple[str, int]]()
    peak, untried = _planned(config, sizes, processes).peak, list(SMALLER)
    while untried:
        changed = [_changed(config, "layout", name, value) for name, value in untried]
        peaks = [_planned(candidate, sizes, processes).peak for candidate in changed]
        best = peaks.index(min(peaks))
        if peaks[best] > LEAST_SAVED * peak:
            break
        config, peak = changed[best], peaks[best]
        name, value = untried[best]
        lower_peaks.append((f"layout.{name}={json.dumps(value)}", peak))
        untried = [pair for pair in untried if pair[0] != name]
    for field, adapted in _with_adapters(config):
        lower = plan_run(adapted, processes).peak
        if lower <= LEAST_SAVED * peak:
            peak = lower
            lower_peaks.append((f"{field}={ADAPTER}", peak))
    return lower_peaks


def _changed(config: RunConfig, section: str, name: str, value: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})


def _with_adapters(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield fields of adapters and the configuration with them: the policy's, then the value model's too."""
    adapter = LoraConfig(rank=16, alpha=32)
    if config.lora is None and not isinstance(config.value, ValueHead):
        config = config.model_copy(update={"lora": adapter})
        yield "lora", config
    if isinstance(config.value, SeparateValue) and config.value.lora is None:
        yield "value.lora", _changed(config, "value", "lora", adapter)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan in bytes, with totals."""
    return {**asdict(plan), "process": PROCESS, "peak": plan.peak, "certain": plan.certain}


def lines(plan: Plan) -> list[str]:
    """Return the plan as a table."""
    out = [f"{m.name:<16}{m.trained:>16,} parameters trained{m.frozen:>16,} frozen" for m in plan.models]
    table = {"": plan.phases} | {
        name: tuple(size(row[phase]) if row.get(phase) else "" for phase in plan.phases)
        for name, row in plan.rows.items()
    }
    table["together"] = tuple(size(plan.total(phase)) for phase in plan.phases)
    out += ["", *(f"{label:<16}" + "".join(f"{cell:>12}" for cell in cells) for label, cells in table.items())]
    each = f" in each of {plan.processes} processes" if plan.processes > 1 else ""
    about = f"the largest phase, and {size(PROCESS)} of the process itself"
    out.append(f"peak{each}, up to about {size(plan.peak)}: {about}")
    if plan.processes > 1:
        out.append(f"sent        {size(plan.sent)} by each process in an optimizer step of every model")
    return out
