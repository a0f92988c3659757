"""Sampler and trainer beside the right log-probs, each by the distribution that its log-probs are meant to be of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.distributions import RAW, TEMPERED, Definition
from ppo_repro.testing.audit.measure import Stored, rms, stored_as
from ppo_repro.testing.audit.numbers import Numbers, numbers_of
from ppo_repro.testing.audit.reference import Reference, logprobs_by
from ppo_repro.testing.audit.stack import StackSampling
from ppo_repro.testing.dumps import DumpedResponse

SideName = Literal["sampler", "trainer"]


@dataclass(frozen=True)
class RecordedSide:
    """Log-probs that one side recorded, beside the right ones by one definition."""

    name: SideName
    responses: Sequence[DumpedResponse]
    sampling: StackSampling
    definition: Definition
    reference: Reference
    has_own_order: bool = False  # of cuts, which the other side does not have

    @cached_property
    def numbers(self) -> list[Numbers]:
        """Return the recorded and right log-probs of each response."""
        recorded = (r.sampler if self.name == "sampler" else r.trainer for r in self.responses)
        triples = zip(recorded, self.responses, self.reference.logprobs, strict=True)
        return [numbers_of(torch.tensor(x).double(), torch.tensor(r.counts), right) for x, r, right in triples]

    @cached_property
    def errors(self) -> list[Tensor]:
        """Return recorded minus right log-probs of the usable tokens of each response, at most limits.CLAMP nats."""
        return [(x.recorded - x.reference)[x.usable].clamp(-limits.CLAMP, limits.CLAMP) for x in self.numbers]

    @property
    def rms(self) -> float:
        """Return the rms of the errors, nats."""
        return rms(torch.cat(self.errors))


@dataclass(frozen=True)
class WrongSide:
    """Side with a wrong log-prob in some responses, and the errors that are rounding in its numbers."""

    recorded: RecordedSide
    wrong_responses: Sequence[int]  # their indices

    @cached_property
    def _usable(self) -> tuple[Tensor, Tensor]:
        """Return the recorded and the right numbers of these responses."""
        wrong = [self.recorded.numbers[i] for i in self.wrong_responses]
        recorded = torch.cat([numbers.recorded[numbers.usable] for numbers in wrong])
        return recorded, torch.cat([numbers.reference[numbers.usable] for numbers in wrong])

    @cached_property
    def stored(self) -> Stored:
        """Return the format of the numbers."""
        return stored_as(self._usable[0])

    @cached_property
    def scale(self) -> float:
        """Return how many times as large as log-probs the numbers are, as sums are; they round as much more."""
        recorded, right = self._usable
        return max(1.0, rms(recorded) / max(rms(right), 1e-9))

    @cached_property
    def tolerance(self) -> float:
        """Return the rms of rounding, nats."""
        return limits.RIGHT * self.recorded.reference.floor * self.scale + limits.RECORDED * rms(self._usable[0])


def largest_error(model: PreTrainedModel, side: RecordedSide, some: Sequence[int]) -> float:
    """Return the largest distance (nats) of stock float32 over the first responses and `some` responses."""
    responses, reference, definition = side.responses, side.reference, side.definition
    far = [i for i in some if i >= reference.measured]
    stock = logprobs_by(model, [responses[i] for i in far], side.sampling, [definition])[definition] if far else []
    apart = [(x - reference.logprobs[i])[torch.tensor(responses[i].counts)] for i, x in zip(far, stock, strict=True)]
    return max([reference.largest, *(float(x[x.isfinite()].abs().amax(0)) for x in apart if len(x[x.isfinite()]))])


def recorded_sides(
    responses: Sequence[DumpedResponse], references: Mapping[Definition, Reference], sampling: StackSampling
) -> list[RecordedSide]:
    """Return sampler and trainer, each by the definition to judge it by. The first row that applies decides:

    | the definition of a side | applies if |
    |---|---|
    | the order of cuts that it is right for | each side is right for an order, but no order is right for both sides |
    | the nearest of the declared kind | the user declared which log-probs the side recorded |
    | the nearest to all undeclared sides, never `raw` | the user declared nothing about the side |

    Tokens were drawn at the temperature, so `raw` log-probs (temperature 1) are right only if the user declared them.
    """
    names: tuple[SideName, SideName] = "sampler", "trainer"
    sides = {
        name: {d: RecordedSide(name, responses, sampling, d, reference) for d, reference in references.items()}
        for name in names
    }
    orders = _different_orders(sides, sampling)
    definitions = orders or _definitions(sides, sampling)
    return [replace(sides[name][definition], has_own_order=bool(orders)) for name, definition in definitions.items()]


# of a side, by definition
ByDefinition = Mapping[Definition, RecordedSide]


def _different_orders(sides: Mapping[SideName, ByDefinition], sampling: StackSampling) -> dict[SideName, Definition]:
    """Return for each side the order of cuts that it is right for; {} if both sides share one, or one has none."""
    if {sampling.sampler_logprobs, sampling.trainer_logprobs} - {"auto", "processed"}:
        return {}
    right: dict[SideName, list[Definition]] = {}
    for name, by_definition in sides.items():
        possible = {
            d: side for d, side in by_definition.items() if d.kind == "processed" and not side.reference.dropped
        }
        far = {d: side.rms / side.reference.floor for d, side in possible.items()}
        right[name] = sorted((d for d, distance in far.items() if distance <= limits.RIGHT), key=lambda d: far[d])
    if not all(right.values()) or set(right["sampler"]) & set(right["trainer"]):
        return {}
    return {name: nearest_first[0] for name, nearest_first in right.items()}


def _definitions(sides: Mapping[SideName, ByDefinition], sampling: StackSampling) -> dict[SideName, Definition]:
    """Return the nearest definition of each side: of the declared kind, or shared by the undeclared sides."""
    declared: dict[SideName, str] = {"sampler": sampling.sampler_logprobs, "trainer": sampling.trainer_logprobs}
    undeclared = [sides[name] for name, kind in declared.items() if kind == "auto"]
    definitions = {}
    for name, kind in declared.items():
        if kind == "auto":
            definitions[name] = _nearest((d for d in sides[name] if d != RAW), undeclared)
        else:
            definitions[name] = _nearest((d for d in sides[name] if d.kind == kind), [sides[name]])
    return definitions


def _nearest(definitions: Iterable[Definition], sides: Sequence[ByDefinition]) -> Definition:
    """Return the definition with the smallest sum over sides of log(rms + tolerance), plus handicaps."""
    tolerance = limits.RIGHT * max(side.reference.floor for side in sides[0].values())

    def size(definition: Definition) -> float:
        handicap = limits.UNLIKE_TEMPERED if definition != TEMPERED else 0.0
        handicap += limits.DROPS_A_TOKEN if sides[0][definition].reference.dropped else 0.0
        return sum([math.log(side[definition].rms + tolerance) for side in sides], handicap)

    return min(definitions, key=size)
