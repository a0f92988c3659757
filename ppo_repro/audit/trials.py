"""Every combination of conditions, computed on some tokens, and what it leaves of a side's distance.

Of two combinations the one with the lower cost is better:

    cost = log(mean square of what it leaves + floor^2) + log 4 x (number of deviations),

so one more deviation has to halve what is left. No combination costs less than log(floor^2) + log 4 x (deviations of
its inputs), so inputs whose bound is above the best cost found are left out: that changes no result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.audit.conditions import (
    FLOAT32,
    HALF,
    WHOLE,
    Conditions,
    Inputs,
    Settings,
    Subject,
    eligible_of,
    logits_of,
    logprobs,
    shifted,
    weights_of,
)
from ppo_repro.audit.dump import Response
from ppo_repro.audit.ways import AS_DUMPED, Fed

PER_DEVIATION = math.log(4.0)
FITTED = 0.5  # deviations more for a temperature that is fitted: it fits noise, too
STEPS, FITTED_TOKENS = 12, 128  # of Gauss and Newton, from 1
SHIFTS = (0, 1, -1)


@dataclass(frozen=True)
class Entries:
    """The log-probs of one side, float64 [n] for each response, and which of them count and are numbers, bool [n]."""

    values: Sequence[Tensor]
    usable: Sequence[Tensor]


@dataclass(frozen=True)
class Tried:
    """One combination of conditions, the rms of what it leaves in nats, and its cost."""

    conditions: Conditions
    left: float
    cost: float


@dataclass(frozen=True)
class Material:
    """What every trial is of. `exact`: the exact log-probs, float64 [n] of each response."""

    responses: Sequence[Response]
    ways: Mapping[str, Sequence[Fed]]
    exact: Sequence[Tensor]
    floor: float
    settings: Settings


@dataclass(frozen=True)
class Trials:
    """What was tried for each side by name, and how far 16-bit weights alone are from the exact model, rms in nats."""

    by_side: Mapping[str, Sequence[Tried]]
    halves: Mapping[str, float]


def rms(x: Tensor) -> float:
    """Root of the mean square; 0 of nothing."""
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def all_inputs(subject: Subject, ways: Mapping[str, Sequence[Fed]]) -> list[Inputs]:
    """Every combination of weights and ways, those with fewer deviations first."""
    found = [Inputs(weights, way) for weights in (FLOAT32, *HALF, *subject.others) for way in ways]
    return sorted(found, key=lambda inputs: len(inputs.deviations()))


def run_trials(subject: Subject, material: Material, sides: Mapping[str, Entries]) -> Trials:
    """Every combination for every side. Logits, the most of the memory, are there for one set of inputs at a time."""
    found: dict[str, list[Tried]] = {name: [] for name in sides}
    halves: dict[str, float] = {}
    name, model = FLOAT32, subject.model
    for inputs in all_inputs(subject, material.ways):
        bound = math.log(material.floor**2) + PER_DEVIATION * len(inputs.deviations())
        open_sides = [side for side in sides if bound < min((t.cost for t in found[side]), default=math.inf)]
        if not open_sides:
            continue
        if inputs.weights != name:
            name, model = inputs.weights, weights_of(subject, inputs.weights)
        pairs = zip(material.ways[inputs.way], material.responses, strict=True)
        logits = [logits_of(model, fed, response) for fed, response in pairs]
        for side in open_sides:
            found[side] += _combinations(inputs, logits, material, sides[side])
        if inputs.weights in HALF and inputs.way == AS_DUMPED:
            halves[inputs.weights] = rms(torch.cat(_predicted(logits, material, material.settings.temperature, WHOLE))
                                         - torch.cat(list(material.exact)))  # fmt: skip
    return Trials({side: sorted(tried, key=lambda t: t.cost) for side, tried in found.items()}, halves)


def _predicted(logits: Sequence[Tensor], material: Material, temperature: float, kept: str) -> list[Tensor]:
    return [
        logprobs(x, r.response_ids, temperature, eligible_of(x, temperature, kept, material.settings))
        for x, r in zip(logits, material.responses, strict=True)
    ]


def _combinations(inputs: Inputs, logits: Sequence[Tensor], material: Material, entries: Entries) -> Iterator[Tried]:
    given = material.settings.temperature
    wanted = {s: [shifted(v, -s) for v in entries.values] for s in SHIFTS}  # by token, wherever the entry lies
    there = {s: [_moved(u, -s) & w.isfinite() for u, w in zip(entries.usable, wanted[s], strict=True)] for s in SHIFTS}
    fitted = {s: _fitted(logits, material.responses, wanted[s], there[s]) for s in SHIFTS}
    for temperature in dict.fromkeys((given, 1.0, *fitted.values())):
        for kept in material.settings.cuts():
            predicted = _predicted(logits, material, temperature, kept)
            for s in SHIFTS:
                if temperature in (given, 1.0, fitted[s]):
                    conditions = Conditions(inputs, temperature, kept, s)
                    yield from _tried(conditions, predicted, wanted[s], there[s], material)


def _tried(
    conditions: Conditions,
    predicted: Sequence[Tensor],
    wanted: Sequence[Tensor],
    there: Sequence[Tensor],
    material: Material,
) -> Iterator[Tried]:
    kept = [t & p.isfinite() for t, p in zip(there, predicted, strict=True)]
    if sum(int(k.sum()) for k in kept) < 0.99 * sum(int(t.sum()) for t in there):
        return  # tokens were sampled that it says cannot be
    left = torch.cat([(w - p)[k] for w, p, k in zip(wanted, predicted, kept, strict=True)])
    if left.numel():
        given = material.settings.temperature
        deviations = len(conditions.deviations(given)) + FITTED * (conditions.temperature not in (given, 1.0))
        yield Tried(conditions, rms(left), math.log(rms(left) ** 2 + material.floor**2) + PER_DEVIATION * deviations)


def _moved(usable: Tensor, by: int) -> Tensor:
    return shifted(usable.double(), by) == 1.0


def _fitted(
    logits: Sequence[Tensor], responses: Sequence[Response], wanted: Sequence[Tensor], there: Sequence[Tensor]
) -> float:
    """The temperature that brings log-probs nearest to `wanted`: beta = 1 / T by least squares, Gauss and Newton."""
    rows = torch.cat([x[t] for x, t in zip(logits, there, strict=True)])[:FITTED_TOKENS]
    targets = torch.cat([torch.tensor(r.response_ids)[t] for r, t in zip(responses, there, strict=True)])
    targets = targets[:FITTED_TOKENS, None]
    aim = torch.cat([w[t] for w, t in zip(wanted, there, strict=True)])[:FITTED_TOKENS]
    beta = 1.0
    for _ in range(STEPS if len(rows) else 0):
        logp = (beta * rows).log_softmax(-1)
        slope = (rows.gather(-1, targets)[:, 0] - (logp.exp() * rows).sum(-1)).double()
        step = slope @ (aim - logp.gather(-1, targets)[:, 0].double()) / slope.square().sum().clamp_min(1e-30)
        if not math.isfinite(float(step)):
            break
        beta = min(max(beta + float(step), beta / 2, 0.1), beta * 2, 20.0)
        if abs(float(step)) < 1e-9 * beta:
            break
    return 1.0 / beta
