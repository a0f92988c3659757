"""How much memory a run needs, as one table: what for, and in which phase. Arithmetic alone: no torch, no weights.

Weights, moments and gradients are counted exactly. The rest is an estimate for prompts and responses of the longest
allowed length.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

PHASES = ("loading", "rollout", "scoring", "update")
EXACT_ROWS = ("weights", "moments", "older policies", "gradients")  # no estimates
# the interpreter with torch and transformers, and compiled kernels; 0.2 GB of it are files that the system takes back
# when memory is short
PROCESS = 700_000_000
FLOAT = 4
MOMENTS = 2 * FLOAT
LOGITS_AT_ONCE = 1 << 24  # numbers; the constant of stages.pieces, which imports torch; a test compares them
# mixed-precision Adam: weight and gradient in 16 bits, master weight and two moments in 32; a frozen model has its
# weights in 16 bits. Rajbhandari et al., 2020, section 3.1
MIXED_TRAINED, MIXED_FROZEN = 16, 2

_LARGE_MODEL = "set lora, or take a smaller model"
_ADVICE = {
    "weights": "take a smaller model",
    "moments": _LARGE_MODEL,
    "older policies": "lower mismatch.sampler.lag, or set lora",
    "copies": "take float32 weights in mismatch, or a smaller model",
    "packed weights": "take a smaller model",
    "gradients": _LARGE_MODEL,
    "KV cache": "lower layout.rollout_slots or numerics.max_context",
}
_SMALLER_PASSES = {
    "loading": "take a smaller model",
    "rollout": "lower layout.rollout_slots",
    "scoring": "lower layout.forward_micro_batch (0 takes all sequences)",
    "update": "lower layout.update_micro_batch (0 takes the minibatch), or set layout.gradient_checkpointing = true",
}


@dataclass(frozen=True)
class Sizes:
    """What of a causal model decides its memory; numbers, not bytes."""

    parameters: int  # a tied matrix counts once
    linears: int  # of the linear layers, experts included, without the head
    head: int  # of the matrix to the vocabulary
    own_head: int  # the same; 0 for a head that is the embedding
    adapted: int  # of the linear layers that have an adapter
    factors: int  # of an adapter of rank 1
    layers: int
    hidden: int
    keys: int  # width of all key heads
    inner: int  # width of an MLP, or of all experts of a token
    vocab_size: int
    kept: int  # for a backward pass, of each token, in all layers
    kept_in_layer: int  # in the layer that keeps the most
    kept_in_row: int  # for each token of the row too, in each layer


@dataclass(frozen=True)
class Model:
    """One model of a run; numbers, not bytes."""

    name: str
    weights: int  # beside the weights that it shares
    trained: int
    frozen: int
    collected: int  # numbers that have a gradient: with an adapter those of the merged weights
    packed: int  # numbers of matrices that no other model packs


@dataclass(frozen=True)
class Work:
    """How one process of a run computes."""

    deterministic: bool
    slots: int  # sequences that are sampled side by side
    max_context: int
    max_response_tokens: int
    forward_sequences: int  # of a scoring pass
    update_sequences: int  # of a backward pass
    gradient_arrays: int  # partial sums of gradients between two backward passes of a step
    packed: bool  # all sequences in one row
    recompute: bool  # gradient checkpointing
    older_policies: int  # versions that a sampler which is behind needs
    sampler_stock: int  # bytes of a number of a sampler's copy that computes as torch does; 0: there is none
    sampler_rounds: bool  # whether the sampler has rounded weights
    reference_in_steps: bool  # whether the policy's loss needs the reference's logits
    processes: int


@dataclass(frozen=True)
class Plan:
    """Memory of one process of a run, in bytes: rows[purpose][phase]."""

    models: tuple[Model, ...]
    rows: dict[str, dict[str, int]]
    processes: int

    def total(self, phase: str, rows: tuple[str, ...] | None = None) -> int:
        """What a phase needs, of some rows or of all, without the process itself."""
        return sum(row.get(phase, 0) for name, row in self.rows.items() if rows is None or name in rows)

    @property
    def certain(self) -> int:
        """What is needed at once in any case."""
        return max(self.total(phase, EXACT_ROWS) for phase in PHASES)

    @property
    def largest_phase(self) -> str:
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        return PROCESS + self.total(self.largest_phase)

    @property
    def mixed_precision(self) -> int:
        """The same models' weights, gradients and moments in mixed-precision Adam."""
        return sum(MIXED_TRAINED * m.trained + MIXED_FROZEN * m.frozen for m in self.models)


def trained_model(name: str, of: Sizes, lora_rank: int, is_value: bool = False) -> Model:
    """A policy, or a value model: the trunk with a score and its bias. With an adapter the other weights are shared."""
    head = of.hidden + 1 if is_value else of.own_head
    matrices = of.linears + (of.hidden if is_value else of.head)
    own_head = head if is_value else 0
    if not lora_rank:
        parameters = of.parameters - of.own_head + head
        twice = of.head if head == 0 else 0  # a tied head and embedding have a sum each
        return Model(name, parameters, parameters, 0, parameters + twice, matrices)
    trained, collected = lora_rank * of.factors + own_head, of.adapted + own_head
    return Model(name, of.adapted + trained, trained, of.parameters - of.own_head, collected, collected)


def frozen_model(name: str, of: Sizes, labels: int | None = None) -> Model:
    """A reference, or with `labels` a classifier."""
    parameters = of.parameters if labels is None else of.parameters - of.own_head + labels * of.hidden
    return Model(name, parameters, 0, parameters, 0, of.linears + (of.head if labels is None else labels * of.hidden))


def make_plan(policy: Sizes, models: tuple[Model, ...], value: Sizes | None, work: Work) -> Plan:
    """The memory of policy, value model where there is one, reference, and reward model where there is one."""
    trained = [model for model in models if model.trained]
    others = [model for model in models if model is not models[0]]
    lora = any(model.frozen for model in trained)
    version = FLOAT * models[0].trained
    # while older policies sample, the present one waits beside them
    older = {phase: work.older_policies * version for phase in PHASES[1:]}
    older["rollout"] += version if work.older_policies else 0
    stays = FLOAT * sum(model.weights for model in models)
    # the model as it is read, and a copy before adapted models share
    read = stays + FLOAT * policy.parameters * (2 if lora else 1)
    positions = ceil(work.max_context / 16) * 16 if work.deterministic else work.max_context
    rows = {
        "weights": {"loading": read, **dict.fromkeys(PHASES[1:], stays)},
        "moments": dict.fromkeys(PHASES, MOMENTS * sum(model.trained for model in trained)),
        "older policies": older,
        "copies": _copies(policy, work),
        "packed weights": _packed(models[0], others, trained, lora, work) if work.deterministic else {},
        "gradients": {"update": FLOAT * work.gradient_arrays * sum(model.collected for model in trained)},
        "activations": _activations(policy, value, work),
        "KV cache": {"rollout": 2 * FLOAT * policy.layers * work.slots * positions * policy.keys},
        "logits": _logits(policy, work),
    }
    return Plan(models, {name: row for name, row in rows.items() if any(row.values())}, work.processes)


def _copies(policy: Sizes, work: Work) -> dict[str, int]:
    """A sampler's copy that computes as torch does, or its rounded weights in float32."""
    rounded = FLOAT * (policy.linears + policy.head) if work.sampler_rounds else 0
    stock = dict.fromkeys(PHASES, work.sampler_stock * policy.parameters)
    return {**stock, "rollout": stock["rollout"] + rounded}


def _packed(policy: Model, others: list[Model], trained: list[Model], lora: bool, work: Work) -> dict[str, int]:
    """Weights as the kernels read them, of the models at work; of frozen weights that models share one copy, always."""
    reference = next(model for model in others if model.name == "reference")
    shared = reference.packed - min(model.packed for model in trained) if lora else 0
    scoring = max(model.packed - (shared if model is reference else 0) for model in others)
    update = max(model.packed for model in trained)
    update += reference.packed - shared if work.reference_in_steps else 0
    phases = {"rollout": policy.packed, "scoring": policy.packed + scoring, "update": update}
    return {phase: FLOAT * (shared + count) for phase, count in phases.items()}


def _activations(policy: Sizes, value: Sizes | None, work: Work) -> dict[str, int]:
    prompts = work.slots * (work.max_context - work.max_response_tokens)
    row = work.max_context - 1
    scored, stepped = work.forward_sequences * row, work.update_sequences * row
    stepping = [_kept(s, stepped, stepped if work.packed else row, work) for s in (policy, value) if s is not None]
    return {
        "rollout": _one_layer(policy, prompts) + 2 * FLOAT * prompts * policy.hidden,
        "scoring": _one_layer(policy, scored) + 2 * FLOAT * scored * policy.hidden,
        "update": max(stepping),
    }


def _kept(of: Sizes, tokens: int, row: int, work: Work) -> int:
    """What a backward pass over `tokens` needs; with recomputation the inputs of all layers, and one layer."""
    kept = of.layers * of.hidden + of.kept_in_layer if work.recompute else of.kept + of.layers * of.kept_in_row * row
    gradients = FLOAT * tokens * 3 * (of.hidden + of.inner)
    return FLOAT * tokens * (kept + of.hidden) + gradients


def _one_layer(of: Sizes, tokens: int) -> int:
    """What a forward pass needs that keeps nothing."""
    return FLOAT * tokens * (of.kept_in_layer + 2 * of.hidden)


def _logits(of: Sizes, work: Work) -> dict[str, int]:
    at_once = max(1, LOGITS_AT_ONCE // of.vocab_size)
    scored, stepped = (
        min(sequences * work.max_response_tokens, at_once) * of.vocab_size
        for sequences in (work.forward_sequences, work.update_sequences)
    )
    return {
        "rollout": 4 * FLOAT * work.slots * of.vocab_size,  # a masked copy, and noise in float64
        "scoring": 2 * FLOAT * scored * (1 if work.deterministic else 5),  # of policy and reference
        "update": stepped * FLOAT * (2 if work.deterministic else 5),  # with gradients
    }


def size(count: int) -> str:
    """A number of bytes in decimal units."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def in_words(plan: Plan, has_value_model: bool) -> str:
    """The largest part with its size and what to change."""
    phase = plan.largest_phase
    name = max(plan.rows, key=lambda row: plan.rows[row].get(phase, 0))
    advice = _ADVICE.get(name, _SMALLER_PASSES[phase])
    if name in ("weights", "moments") and has_value_model:
        advice += ", or value.kind = head"
    return (
        f"the plan needs up to about {size(plan.peak)}, most of it for {name} in {phase}: "
        f"{size(plan.rows[name][phase])}; {advice}; see `ppo-repro plan`"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan in bytes, with totals."""
    totals = {"process": PROCESS, "peak": plan.peak, "certain": plan.certain, "mixed_precision": plan.mixed_precision}
    return {**asdict(plan), **totals}


def lines(plan: Plan) -> list[str]:
    """The plan as a table."""
    out = [f"{m.name:<16}{m.trained:>16,} parameters trained{m.frozen:>16,} frozen" for m in plan.models]
    out += ["", _line("", PHASES)]
    for name, row in plan.rows.items():
        out.append(_line(name, [size(row[phase]) if row.get(phase) else "" for phase in PHASES]))
    out.append(_line("together", [size(plan.total(phase)) for phase in PHASES]))
    out.append(f"peak, up to about {size(plan.peak)}: the largest phase, and {size(PROCESS)} of the process itself")
    if plan.processes > 1:
        out.append(f"This is the memory of each of the {plan.processes} processes.")
    out.append(
        f"Mixed-precision Adam on a GPU would take {size(plan.mixed_precision)}: 16 bytes per trained parameter, "
        "2 per frozen one; activations and caches come on top."
    )
    return out


def _line(label: str, cells: tuple[str, ...] | list[str]) -> str:
    return f"{label:<16}" + "".join(f"{cell:>12}" for cell in cells)
