"""Every combination of conditions, computed on some tokens, and what it leaves of a side's distance.

Of two combinations the one with the lower cost is better:

    cost = log(mean square of what it leaves + floor^2) + log 4 x (number of deviations),

so one more deviation has to halve what is left. Likely inputs come first, and what cannot cost less than the best
found is not computed, which changes no result:

* no combination costs less than log(floor^2) + log 4 x (deviations of its inputs);
* the mean square over all n tokens is at least k/n times that over the first k, so inputs are given up when the first
  1, 2, 4, ... responses leave too much under every combination (16-bit weights alone are not: they are measured).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

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
SMALL_STEP = 1e-5  # relative; where one temperature explains everything, the step after it is about its square
SHIFTS = (0, 1, -1)
IMPOSSIBLE = 0.01  # share of the sampled tokens that a cut may say cannot be


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
    tokens: int  # that it was computed for


@dataclass(frozen=True)
class Material:
    """What every trial is of. `reference`: log-probs of the model in float64, [n] of each response."""

    responses: Sequence[Response]
    ways: Mapping[str, Sequence[Fed]]
    reference: Sequence[Tensor]
    floor: float
    settings: Settings


@dataclass(frozen=True)
class Trials:
    """What was tried for each side by name, and how far 16-bit weights alone are from float64, rms in nats."""

    by_side: Mapping[str, Sequence[Tried]]
    given_up: Mapping[str, int]  # inputs of which the first responses left too much
    halves: Mapping[str, float]


def rms(x: Tensor) -> float:
    """Root of the mean square; 0 of nothing."""
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def all_inputs(subject: Subject, ways: Mapping[str, Sequence[Fed]]) -> list[Inputs]:
    """Every combination of weights and ways: those with fewer deviations first, of these the tokens as dumped."""
    found = [Inputs(weights, way) for weights in (FLOAT32, *HALF, *subject.others) for way in ways]
    return sorted(found, key=lambda inputs: (len(inputs.deviations()), inputs.way != AS_DUMPED))


def run_trials(subject: Subject, material: Material, sides: Mapping[str, Entries]) -> Trials:
    """Every combination for every side. Logits, the most of the memory, are there for one set of inputs at a time."""
    found: dict[str, list[Tried]] = {name: [] for name in sides}
    given_up = dict.fromkeys(sides, 0)
    halves: dict[str, float] = {}
    models: dict[str, PreTrainedModel] = {}
    for inputs in all_inputs(subject, material.ways):
        bound = math.log(material.floor**2) + PER_DEVIATION * len(inputs.deviations())
        best = {side: min((t.cost for t in tried), default=math.inf) for side, tried in found.items()}
        begun = {side: sides[side] for side in sides if bound < best[side]}
        if not begun:
            continue
        if inputs.weights not in models:
            models[inputs.weights] = weights_of(subject, inputs.weights)
        is_half = inputs.weights in HALF and inputs.way == AS_DUMPED  # whose distance is that of 16-bit rounding
        limits = dict.fromkeys(begun, math.inf) if is_half else best
        logits, kept = _computed(models[inputs.weights], inputs, material, begun, limits)
        for side in begun:
            if side in kept:
                found[side] += _combinations(inputs, logits, material, sides[side], _count(sides[side]))
            else:
                given_up[side] += 1
        if is_half:
            predicted = _predicted(logits, material, material.settings.temperature, WHOLE)
            halves[inputs.weights] = rms(torch.cat(predicted) - torch.cat(list(material.reference)))
    return Trials({side: sorted(tried, key=lambda t: t.cost) for side, tried in found.items()}, given_up, halves)


def _computed(
    model: PreTrainedModel, inputs: Inputs, material: Material, sides: Mapping[str, Entries], best: Mapping[str, float]
) -> tuple[list[Tensor], set[str]]:
    """Logits of each response, and the sides that may cost less than `best`; fewer logits where there is none."""
    logits: list[Tensor] = []
    kept = set(sides)
    for fed, response in zip(material.ways[inputs.way], material.responses, strict=True):
        logits.append(logits_of(model, fed, response))
        count = len(logits)
        if count < len(material.responses) and count.bit_count() == 1:
            kept = {
                side
                for side in kept
                if math.isinf(best[side]) or _least(inputs, logits, material, sides[side]) < best[side]
            }
            if not kept:
                break
    return logits, kept


def _least(inputs: Inputs, logits: Sequence[Tensor], material: Material, entries: Entries) -> float:
    """What these inputs cost at least, from the logits of the first responses."""
    count, tokens = len(logits), _count(entries)
    first = replace(material, responses=material.responses[:count], reference=material.reference[:count])
    own = Entries(entries.values[:count], entries.usable[:count])
    if not _count(own):
        return -math.inf
    return min((_cost(t.left, t.tokens / tokens, t.conditions, material) for t in
                _combinations(inputs, logits, first, own, tokens)), default=math.inf)  # fmt: skip


def _count(entries: Entries) -> int:
    return sum(int(usable.sum()) for usable in entries.usable)


def _cost(left: float, share: float, conditions: Conditions, material: Material) -> float:
    """The cost of what is left of this share of the tokens, if nothing is of the others."""
    given = material.settings.temperature
    deviations = len(conditions.deviations(given)) + FITTED * (conditions.temperature not in (given, 1.0))
    return math.log(share * left**2 + material.floor**2) + PER_DEVIATION * deviations


def _predicted(logits: Sequence[Tensor], material: Material, temperature: float, kept: str) -> list[Tensor]:
    return [
        logprobs(x, r.response_ids, temperature, eligible_of(x, temperature, kept, material.settings))
        for x, r in zip(logits, material.responses, strict=True)
    ]


def _combinations(
    inputs: Inputs, logits: Sequence[Tensor], material: Material, entries: Entries, tokens: int
) -> Iterator[Tried]:
    """Every combination with these inputs. tokens: how many the side has, of which these may be the first."""
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
                    yield from _tried(conditions, predicted, wanted[s], there[s], material, tokens)


def _tried(
    conditions: Conditions,
    predicted: Sequence[Tensor],
    wanted: Sequence[Tensor],
    there: Sequence[Tensor],
    material: Material,
    tokens: int,
) -> Iterator[Tried]:
    impossible = sum(int((t & ~p.isfinite()).sum()) for t, p in zip(there, predicted, strict=True))
    if impossible > IMPOSSIBLE * tokens:
        return
    kept = [t & p.isfinite() for t, p in zip(there, predicted, strict=True)]
    left = torch.cat([(w - p)[k] for w, p, k in zip(wanted, predicted, kept, strict=True)])
    if left.numel():
        yield Tried(conditions, rms(left), _cost(rms(left), 1.0, conditions, material), left.numel())


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
    beta, chosen, scaled = 1.0, rows.gather(-1, targets)[:, 0], torch.empty_like(rows)
    for _ in range(STEPS if len(rows) else 0):
        normal = torch.mul(rows, beta, out=scaled).logsumexp(-1)
        distance = aim - (beta * chosen - normal).double()
        slope = (chosen - torch.linalg.vecdot(scaled.sub_(normal[:, None]).exp_(), rows)).double()
        step = float(slope @ distance / slope.square().sum().clamp_min(1e-30))
        if not math.isfinite(step):
            break
        beta = min(max(beta + step, beta / 2, 0.1), beta * 2, 20.0)
        if abs(step) < SMALL_STEP * beta:
            break
    return 1.0 / beta
