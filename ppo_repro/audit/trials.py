"""Every combination of conditions, computed on some tokens, and what it leaves of a side's distance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.audit.conditions import (
    AS_DUMPED,
    HALF,
    Conditions,
    Inputs,
    Subject,
    all_inputs,
    logits_of,
    logprobs,
    shifted,
)
from ppo_repro.audit.dump import Response
from ppo_repro.rollout.engine import Sampling
from ppo_repro.rollout.sampler import cut

STEPS, FITTED_TOKENS = 12, 128  # of Gauss and Newton, from 1


@dataclass(frozen=True)
class Settings:
    """What the stack says it sampled with."""

    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True)
class Entries:
    """The log-probs of one side, float64 [n] for each response, and which of them count and are numbers, bool [n]."""

    values: Sequence[Tensor]
    usable: Sequence[Tensor]


@dataclass(frozen=True)
class Tried:
    """One combination of conditions, and the rms of what it leaves, nats."""

    conditions: Conditions
    left: float


@dataclass(frozen=True)
class Trials:
    """What was tried for each side by name, and how far 16-bit weights alone are from the exact model, rms in nats."""

    by_side: Mapping[str, Sequence[Tried]]
    halves: Mapping[str, float]


def rms(x: Tensor) -> float:
    """Root of the mean square; 0 of nothing."""
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def first(responses: Sequence[Response], tokens: int) -> list[Response]:
    """The first responses until they have `tokens` tokens."""
    found: list[Response] = []
    while len(found) < len(responses) and sum(len(r.response_ids) for r in found) < tokens:
        found.append(responses[len(found)])
    return found


def run_trials(
    subject: Subject,
    responses: Sequence[Response],
    exact: Sequence[Tensor],
    sides: Mapping[str, Entries],
    settings: Settings,
) -> Trials:
    """Every combination for every side. Logits, the most of the memory, are there for one set of inputs at a time."""
    found: dict[str, list[Tried]] = {name: [] for name in sides}
    halves: dict[str, float] = {}
    for inputs in all_inputs(subject, responses) if sides else []:
        compute = logits_of(subject, inputs)
        logits = [compute(response) for response in responses]
        for name, entries in sides.items():
            found[name] += _combinations(inputs, logits, responses, entries, settings)
        if inputs.weights in HALF and inputs.prompt == AS_DUMPED:
            own = [
                logprobs(x, r.response_ids, settings.temperature, None) for x, r in zip(logits, responses, strict=True)
            ]
            halves[inputs.weights] = rms(torch.cat(own) - torch.cat(list(exact)))
    return Trials(found, halves)


def _combinations(
    inputs: Inputs,
    logits: Sequence[Tensor],
    responses: Sequence[Response],
    entries: Entries,
    settings: Settings,
) -> Iterator[Tried]:
    ids = [r.response_ids for r in responses]
    cuts = [False, True] if settings.top_p < 1.0 or settings.top_k else [False]
    for shift in (0, 1, -1):
        wanted = [shifted(v, -shift) for v in entries.values]  # by token, wherever the entry lies
        there = [_moved(u, -shift) & w.isfinite() for u, w in zip(entries.usable, wanted, strict=True)]
        fitted = _fitted(logits, ids, wanted, there)
        for temperature in dict.fromkeys((settings.temperature, 1.0, fitted)):
            for is_cut in cuts:
                predicted = [
                    logprobs(x, i, temperature, _eligible(x, temperature, settings) if is_cut else None)
                    for x, i in zip(logits, ids, strict=True)
                ]
                kept = [t & p.isfinite() for t, p in zip(there, predicted, strict=True)]
                if sum(int(k.sum()) for k in kept) < 0.99 * sum(int(t.sum()) for t in there):
                    continue  # tokens were sampled that it says cannot be
                left = torch.cat([(w - p)[k] for w, p, k in zip(wanted, predicted, kept, strict=True)])
                if left.numel():
                    yield Tried(Conditions(inputs, temperature, is_cut, shift), rms(left))


def _moved(usable: Tensor, by: int) -> Tensor:
    return shifted(usable.double(), by) == 1.0


def _eligible(logits: Tensor, temperature: float, settings: Settings) -> Tensor:
    scaled = (logits.double() / temperature).float()
    return cut(scaled, Sampling(temperature, settings.top_k, settings.top_p, 1))[0]


def _fitted(
    logits: Sequence[Tensor], ids: Sequence[Sequence[int]], wanted: Sequence[Tensor], there: Sequence[Tensor]
) -> float:
    """The temperature that brings log-probs nearest to `wanted`: beta = 1 / T by least squares, Gauss and Newton."""
    rows = torch.cat([x[t] for x, t in zip(logits, there, strict=True)])[:FITTED_TOKENS].double()
    targets = torch.cat([torch.tensor(i)[t] for i, t in zip(ids, there, strict=True)])[:FITTED_TOKENS]
    aim = torch.cat([w[t] for w, t in zip(wanted, there, strict=True)])[:FITTED_TOKENS]
    beta = 1.0
    for _ in range(STEPS if len(rows) else 0):
        logp = (beta * rows).log_softmax(-1)
        slope = rows.gather(-1, targets[:, None])[:, 0] - (logp.exp() * rows).sum(-1)
        step = slope @ (aim - logp.gather(-1, targets[:, None])[:, 0]) / slope.square().sum().clamp_min(1e-30)
        beta = min(max(beta + float(step), beta / 2, 0.1), beta * 2, 20.0)
    return 1.0 / beta
