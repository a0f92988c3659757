"""Plan the memory of a run as one table by purpose and phase, without loading a weight.

Weights, moments and gradients are exact. The other numbers are estimates for prompts and responses of the longest
allowed length. The plan assumes that native numerics need as much memory as the kernels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import say, size
from ppo_repro.config.algorithm import LoraConfig, SeparateValue, ValueHead
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.run import ModelFolder, NumericsConfig, RunConfig
from ppo_repro.config.tasks import RewardModelFolder
from ppo_repro.models.load import read_model_config
from ppo_repro.models.lora import choose_layers, shape_of
from ppo_repro.models.tiny import tiny_config
from ppo_repro.numerics.description import check_config, plain
from ppo_repro.numerics.devices import Card, device_count, kernels_of, torch_device
from ppo_repro.numerics.families import CAUSAL_MODELS, CLASSIFIERS, check_visibility, head_of, trunk_of
from ppo_repro.numerics.lowering import Lowered
from ppo_repro.numerics.network import KEEP_ALL, KEEP_INPUTS, KEEP_NOTHING
from ppo_repro.numerics.optimizer import SLOTS
from ppo_repro.numerics.packed_model import PackedModel
from ppo_repro.numerics.shards import MESSAGE
from ppo_repro.runs.checkpoint import FLOAT, MOMENTS
from ppo_repro.stages.forward import LOGITS_AT_ONCE

PHASES = ("loading", "rollout", "scoring", "update")
SAVING = "saving"  # a checkpoint, in the first of several processes: it joins the moments of all
SMALLER: tuple[tuple[str, int], ...] = (  # fields of `layout` and values that may lower the peak
    ("update_micro_batch", 1),
    ("update_micro_batch", 0),  # its gradients need no partial sums
    ("gradient_checkpointing", True),
    ("forward_micro_batch", 1),
    ("rollout_slots", 8),
)
ADAPTER = "{rank: 16, alpha: 32}"
LEAST_SAVED = 0.9  # of the peak, which a change of a field must come below to be named
EXACT_ROWS = ("weights", "moments", "older policies", "gradients")  # no estimates
# the interpreter with torch and transformers, and compiled kernels; 0.2 GB of it are files that the system takes back
# when memory is short
PROCESS = 700_000_000
CARD_SCRATCH = 600_000_000  # the memory that kernels of a GPU allocate: scores of attention, parts of products

ADVICE = (
    "set lora or layout.gradient_checkpointing, lower layout.rollout_slots, forward_micro_batch or update_micro_batch "
    "(0 takes all), or take a smaller model; see `ppo-repro plan`"
)


@dataclass(frozen=True)
class Model:
    """Sizes of one model of a run, in numbers of floats."""

    name: str
    weights: int  # without the weights that it shares
    trained: int
    frozen: int
    collected: int  # floats with a gradient; with an adapter, of the merged weights
    packed: int  # floats of the packed weights, which the kernels read


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


class Shape:
    """Causal model without allocated weights, and the kernels' description of its shape."""

    def __init__(self, config: PretrainedConfig, numerics: NumericsConfig) -> None:
        with torch.device("meta"):  # every shape, no memory
            self.model = AutoModelForCausalLM.from_config(plain(config), dtype=torch.float32, trust_remote_code=False)
        self.kernels = PackedModel(trunk_of(self.model), Lowered(numerics.max_context, precision=numerics.precision))
        self.struct = self.kernels.struct
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.head = head_of(self.model).get_parameter("weight").numel()
        self.own_head = 0 if config.tie_word_embeddings else sum(p.numel() for p in head_of(self.model).parameters())

    def packed(self, outputs: int) -> int:
        """Return the floats of the packed weights with a head of `outputs` outputs."""
        return self.kernels.packed_floats(outputs)

    def trained(self, name: str, lora: LoraConfig | None, section: str, is_value: bool = False) -> Model:
        """Return the sizes of a policy, or of a value model, whose head is a score with a bias.

        Args:
            name: name of the row in the plan.
            lora: the adapter, with which the trunk stays shared; None for no adapter.
            section: section of the configuration, for errors.
            is_value: whether to count a value model.
        """
        head = self.struct.hidden + 1 if is_value else self.own_head
        packed = self.packed(1 if is_value else self.struct.vocabulary)
        if lora is None:
            parameters = self.parameters - self.own_head + head
            twice = self.head if head == 0 else 0  # a tied head and embedding have a sum each
            return Model(name, parameters, parameters, 0, parameters + twice, packed)
        shapes = [shape_of(layer) for layer in choose_layers(self.model, lora.target_modules, section).values()]
        own_head, adapted = (head if is_value else 0), sum(n * k for n, k in shapes)
        trained = lora.rank * sum(n + k for n, k in shapes) + own_head
        frozen = self.parameters - self.own_head
        return Model(name, adapted + trained, trained, frozen, adapted + own_head, packed)

    def frozen(self, name: str, labels: int | None = None) -> Model:
        """Return the sizes of a reference model, or of a classifier with `labels` labels."""
        parameters, outputs = self.parameters, self.struct.vocabulary
        if labels is not None:
            parameters, outputs = parameters - self.own_head + labels * self.struct.hidden, labels
        return Model(name, parameters, 0, parameters, 0, self.packed(outputs))

    def cache(self, tokens: int) -> int:
        """Return the bytes of the keys and values of `tokens` tokens, a multiple of 16."""
        return 2 * FLOAT * self.struct.layers * self.struct.kv_heads * self.struct.head_dim * tokens

    def forward(self, tokens: int) -> int:
        """Return the bytes of a pass without gradients over `tokens` tokens."""
        return FLOAT * (self.kernels.kept_floats(tokens, KEEP_NOTHING) + 2 * tokens * self.struct.hidden)

    def step(self, tokens: int, recompute: bool) -> int:
        """Return the bytes of a pass with gradients over `tokens` tokens."""
        widest = max(matrix.struct.n for matrix in self.kernels.matrices)
        kept = self.kernels.kept_floats(tokens, KEEP_INPUTS if recompute else KEEP_ALL)
        backward = tokens * (6 * self.struct.hidden + 3 * widest)
        return FLOAT * (kept + backward) + self.cache(tokens)


Shapes = tuple[Shape, Shape | None, tuple[Model, ...]]
Rows = dict[str, dict[str, int]]  # bytes by purpose and phase


def _shapes(config: RunConfig) -> Shapes:
    """Return the policy, the separate value model if there is one, and all models.

    Raises UserError for an unknown model.
    """
    max_context = config.numerics.max_context
    if isinstance(config.model, ModelFolder):
        path = config.model.path
        source = read_model_config(Path(path), CAUSAL_MODELS, f"model.path = {path}")
    else:  # its tokenizer may have as many tokens as the configuration allows
        source = tiny_config(config.model, config.model.vocab_size, max_context, None)
    (check_config if config.numerics.mode == "deterministic" else check_visibility)(source, max_context)
    policy = Shape(source, config.numerics)
    models = [policy.trained("policy", config.lora, "lora")]
    classifier, term, value = source, config.reward.model, None
    if isinstance(term, RewardModelFolder):
        classifier = read_model_config(Path(term.path), CLASSIFIERS, f"reward model {term.path}")
    if isinstance(config.value, SeparateValue):
        value = Shape(classifier if config.value.init == "reward_model" else source, config.numerics)
        models.append(value.trained("value model", config.value.lora, "value.lora", is_value=True))
    models.append(policy.frozen("reference"))
    if term is not None:
        labels = classifier.num_labels if isinstance(term, RewardModelFolder) else 1
        models.append(Shape(classifier, config.numerics).frozen("reward model", labels))
    return policy, value, tuple(models)


def plan_run(config: RunConfig, processes: int = 1) -> Plan:
    """Return the memory plan for each of `processes` of a run, on the CPU or on its GPU.

    Raises UserError for an unknown model.
    """
    return _planned(config, _shapes(config), processes)


def _planned(config: RunConfig, shapes: Shapes, processes: int) -> Plan:
    policy, value, models = shapes
    device, deterministic = config.layout.device, config.numerics.mode == "deterministic"
    if device != "cpu" and not deterministic:
        raise UserError(f"layout.device = {device}: plan needs numerics.mode = deterministic there")
    rows = {**_of_weights(config, policy, models, processes), **_of_passes(config, policy, value, processes)}
    rows = {name: row for name, row in rows.items() if any(row.values())}
    if processes == 1:
        rows = {name: {phase: row[phase] for phase in row if phase != SAVING} for name, row in rows.items()}
    updated, collected = (sum(getattr(m, name) for m in models if m.trained) for name in ("trained", "collected"))
    exchanged = (collected + updated) * (processes - 1) if deterministic else 2 * collected * (processes - 1)
    return Plan(models, rows, processes, FLOAT * exchanged // processes)


def _micro_batch(size: int, sequences: int, processes: int) -> int:
    """Return the sequences of a pass in one of the processes, which divide the sequences; `size` 0 takes all."""
    mine = ceil(sequences / processes)
    return min(size or mine, mine)


def _of_weights(config: RunConfig, policy: Shape, models: tuple[Model, ...], processes: int) -> Rows:
    """Return the rows of what a process holds of the models: weights, copies, moments, gradients."""
    layout, sampler, minibatch = config.layout, config.mismatch.sampler, config.ppo.minibatch_size
    deterministic, on_card = config.numerics.mode == "deterministic", layout.device != "cpu"
    held_by = processes if deterministic else 1  # ranks divide the moments
    is_split = _micro_batch(layout.update_micro_batch, minibatch, processes) < ceil(minibatch / processes)
    arrays = (SLOTS // processes).bit_length() if deterministic and is_split else 1
    trained = [model for model in models if model.trained]
    updated, collected = (sum(getattr(m, name) for m in trained) for name in ("trained", "collected"))
    stays = FLOAT * sum(model.weights for model in models)
    # the model is read, and copied until adapted models share its weights
    read = stays + FLOAT * policy.parameters * (2 if any(model.frozen for model in trained) else 1)
    version, lag = FLOAT * models[0].trained, min(sampler.lag, config.ppo.iterations - 1)
    older = dict.fromkeys(PHASES[1:], lag * version)
    older["rollout"] += version if lag else 0  # while an older policy samples, the present weights wait
    stock = 0 if sampler.stock is None else getattr(torch, sampler.stock).itemsize * policy.parameters
    rounded = FLOAT * models[0].packed if sampler.precision.weights != "float32" else 0
    # a frozen model frees its packed weights after its pass; a value model is packed after the reference
    working = sum(model.packed for model in trained)
    packed = {
        "rollout": working,
        "scoring": models[0].packed + max(model.packed for model in models[1:]),
        "update": working + policy.packed(policy.struct.vocabulary) * config.kl.differentiates_exactly,
        SAVING: working,
    }
    # in precision highest the kernels of a GPU read weights as they lie
    is_packed = deterministic and not (on_card and config.numerics.precision == "highest")
    message = min(MESSAGE, max(model.collected for model in trained)) // 2 if processes > 1 else 0
    return {
        "weights": {"loading": read, **dict.fromkeys((*PHASES[1:], SAVING), stays)},
        "moments": dict.fromkeys((*PHASES, SAVING), MOMENTS * ceil(updated / held_by)),
        "all moments": {SAVING: MOMENTS * updated if held_by > 1 and not on_card else 0},  # on the CPU
        "older policies": older,
        "copies": {phase: stock + (rounded if phase == "rollout" else 0) for phase in PHASES},
        "packed weights": {phase: FLOAT * count for phase, count in packed.items()} if is_packed else {},
        "kernels": dict.fromkeys(PHASES[1:], CARD_SCRATCH if on_card else 0),
        "gradients": {"update": FLOAT * arrays * collected},
        "messages": {"update": 2 * FLOAT * message},
    }


def _of_passes(config: RunConfig, policy: Shape, value: Shape | None, processes: int) -> Rows:
    """Return the rows of what a process holds while it samples, scores and trains the longest sequences."""
    layout, context, responses = config.layout, config.numerics.max_context, config.rollout.max_response_tokens
    sequences, row, vocabulary = config.sequences_per_iteration, context - 1, policy.struct.vocabulary
    forward = _micro_batch(layout.forward_micro_batch, sequences, processes)
    update = _micro_batch(layout.update_micro_batch, config.ppo.minibatch_size, processes)
    seats = _micro_batch(layout.rollout_slots, max(sequences, config.task.num_eval_prompts), processes)
    of_logits = [
        FLOAT * vocabulary * min(count * responses, max(1, LOGITS_AT_ONCE // vocabulary)) for count in (forward, update)
    ]
    several = 2 if config.numerics.mode == "deterministic" else 5
    # top-k and top-p: which of the vocabulary each token was drawn from, a bit each, of all responses in each process
    cuts = config.rollout.top_k > 0 or config.rollout.top_p < 1.0
    kept_sets = sequences * responses * ceil(vocabulary / 8) * cuts
    return {
        "activations": {
            "rollout": policy.forward(seats * (context - responses)),
            "scoring": policy.forward(forward * row) + policy.cache(forward * row),
            "update": max(s.step(update * row, layout.gradient_checkpointing) for s in (policy, value) if s),
        },
        "kept tokens": dict.fromkeys(PHASES[1:], kept_sets),
        "KV cache": {"rollout": policy.cache(seats * ceil(context / 16) * 16)},
        "logits": {
            "rollout": 4 * FLOAT * seats * vocabulary,  # a masked copy, and bounds of the noise
            "scoring": of_logits[0] * several,  # of policy and reference
            "update": of_logits[1] * several,  # with gradients
        },
    }


def savings(config: RunConfig, processes: int = 1) -> list[tuple[str, int]]:
    """Return changes of fields, `FIELD=VALUE`, that lower the peak most, each with the peak after it and those before.

    Fields of `layout` come first, because they change no result; adapters follow. A change that lowers the peak by less
    than a tenth is left out.
    """
    shapes, found = _shapes(config), list[tuple[str, int]]()
    peak, untried = _planned(config, shapes, processes).peak, list(SMALLER)
    while untried:
        changed = [_changed(config, "layout", name, value) for name, value in untried]
        peaks = [_planned(one, shapes, processes).peak for one in changed]
        best = peaks.index(min(peaks))
        if peaks[best] > LEAST_SAVED * peak:
            break
        config, peak, (name, value) = changed[best], peaks[best], untried[best]
        found.append((f"layout.{name}={json.dumps(value)}", peak))
        untried = [pair for pair in untried if pair[0] != name]
    for field, adapted in _with_adapters(config):
        lower = plan_run(adapted, processes).peak
        if lower <= LEAST_SAVED * peak:
            peak = lower
            found.append((f"{field}={ADAPTER}", peak))
    return found


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


def room(config: RunConfig, plan: Plan, memory: int) -> str:
    """Return `memory`, bytes of a machine or GPU, and whether the processes of the plan have room.

    They share a machine and, with `layout.device: cuda`, its GPUs.
    """
    fit = min(memory // plan.peak * device_count(config.layout.device), plan.processes)
    of = f" for {fit or 'one'} of {plan.processes} processes" if plan.processes > 1 else ""
    return f"{size(memory)}, {'enough' if fit else 'not enough'}{of}"


def step_seconds(config: RunConfig, plan: Plan, tokens: float, bandwidth: float) -> float:
    """Return the seconds of a step: a process's tokens of a minibatch / `tokens`, and its sent bytes / `bandwidth`.

    Args:
        config: the run; its sequences have the longest allowed length.
        plan: of the run.
        tokens: that one process trains a second, as a run prints after `update`.
        bandwidth: bytes that one process sends a second.
    """
    trained = ceil(config.ppo.minibatch_size / plan.processes) * (config.numerics.max_context - 1)
    return trained / tokens + plan.sent / bandwidth


def memory_limit() -> int | None:
    """Return the memory in bytes of this machine, or of its control group if that has less; None if unknown."""
    limits = []
    with suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in _limit_files():
        with suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return min(limits, default=None)


def memory_of(config: RunConfig, rank: int = 0) -> int | None:
    """Return the bytes of the machine, or of the GPU, that a process of a run computes on; None if unknown.

    Raises UserError if the GPU cannot be used.
    """
    if config.layout.device == "cpu":
        return memory_limit()
    if config.numerics.mode != "deterministic":
        return None
    kernels = kernels_of(torch_device(config.layout.device, rank))  # opens the GPU: a process can have one
    return kernels.free_bytes()[1] if isinstance(kernels, Card) else None


def _limit_files() -> list[Path]:
    """Return where Linux has the memory limits of this process's control group and of those above it."""
    root, files = Path("/sys/fs/cgroup"), list[Path]()
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            top, name = (root, "memory.max") if not kinds else (root / "memory", "memory.limit_in_bytes")
            if not kinds or "memory" in kinds.split(","):
                group = top / path.lstrip("/")
                files += [above / name for above in (group, *group.parents) if above.is_relative_to(top)]
    return [*files, root / "memory.max", root / "memory" / "memory.limit_in_bytes"]


def require_memory(config: RunConfig | ControlConfig | DPOConfig, processes: int, rank: int) -> None:
    """Raise UserError if a language run certainly needs more memory than the machine, or the GPU of `rank`, has.

    Print a warning if only the estimate exceeds the memory.
    """
    if not isinstance(config, RunConfig):
        return
    limit = memory_of(config, rank)
    if limit is None:
        return
    plan = plan_run(config, processes)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))  # torchrun's processes on this machine
    here = ceil(here / device_count(config.layout.device))  # on one GPU
    phase = plan.largest_phase
    name = max(plan.rows, key=lambda row: plan.rows[row].get(phase, 0))
    largest = f"most of it for {name} in {phase}: {size(plan.rows[name][phase])}"
    each = f" in each of {here} processes here" if here > 1 else ""
    words = f"{size(limit)} at most, and the plan needs up to about {size(plan.peak)}{each}, {largest}; {ADVICE}"
    if here * plan.certain > limit:
        raise UserError(f"not enough memory: {words}")
    if here * plan.peak > limit:
        say(f"memory may run out: {words}")
