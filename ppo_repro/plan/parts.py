"""Which part of a memory plan is the largest, and which setting makes it smaller. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ppo_repro.plan.memory import Plan
from ppo_repro.plan.report import size

_MODEL = "take a smaller model"
_LORA = "set lora, or take a smaller model"
_AT_WORK = ("rollout", "scoring", "update")
_ADVICE = {
    "weights": _MODEL,
    "optimizer moments": _LORA,
    "model as it is read of the loading": _MODEL,
    "copies before sharing of the loading": _MODEL,
    "copies before rounding of the loading": _MODEL,
    "operands of the rollout": _MODEL,
    "operands of the scoring": _MODEL,
    "operands of the update": _MODEL,
    **{f"operands of experts of the {phase}": _MODEL for phase in _AT_WORK},
    "gradient sums of the update": _LORA,
    "gradients of the update": _LORA,
    "merging of the update": _MODEL,
    **{f"older policies of the {phase}": "lower mismatch.sampler.lag, or set lora" for phase in _AT_WORK},
    "key/value cache of the rollout": "lower layout.rollout_slots or numerics.max_context",
    "one layer of the rollout": "lower layout.rollout_slots",
    "logits of the rollout": "lower layout.rollout_slots",
    "hidden states of the scoring": "lower layout.forward_micro_batch (0 takes all sequences)",
    "one layer of the scoring": "lower layout.forward_micro_batch (0 takes all sequences)",
    "logits of the scoring": "lower layout.forward_micro_batch (0 takes all sequences)",
    "activations of the update": "lower layout.update_micro_batch (0 takes the minibatch), "
    "or set layout.gradient_checkpointing = true",
    "logits of the update": "lower layout.update_micro_batch (0 takes the minibatch)",
    "one layer of the update": "lower layout.update_micro_batch (0 takes the minibatch)",
}


@dataclass(frozen=True)
class Part:
    """Memory for one purpose, in all models together."""

    name: str
    bytes: int
    advice: str


class _Settings(Protocol):
    """What of a value model decides whether it could be left out."""

    @property
    def kind(self) -> str: ...


def parts(plan: Plan, value: _Settings | None = None) -> list[Part]:
    """All parts that are there at the peak, the largest first. `value`: that section of the configuration."""
    residents = {
        "weights": sum(r.weights for r in plan.residents),
        "optimizer moments": sum(r.moments for r in plan.residents),
    }
    phase = max(plan.phases, key=lambda name: sum(plan.phases[name].values()))
    found = [Part(name, amount, _advice(name, value)) for name, amount in residents.items()]
    for purpose, amount in plan.phases[phase].items():
        name = f"{purpose} of the {phase}"
        found.append(Part(name, amount, _ADVICE[name]))
    return sorted(found, key=lambda part: -part.bytes)


def _advice(name: str, value: _Settings | None) -> str:
    separate = value is not None and value.kind == "separate"
    return _ADVICE[name] + (", or value.kind = head" if separate else "")


def in_words(plan: Plan, value: _Settings | None = None) -> str:
    """The largest part with its size and what to change."""
    largest = parts(plan, value)[0]
    return (
        f"the plan needs up to about {size(plan.peak)}, most of it for {largest.name}: {size(largest.bytes)}; "
        f"{largest.advice}; see `ppo-repro plan`"
    )
