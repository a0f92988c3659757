"""Choose the distribution that the log-probs of each side are judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ppo_repro.testing.audit.distributions import DEFINITIONS, PROCESSED
from ppo_repro.testing.audit.reference import Reference, distances, numbers_of
from ppo_repro.testing.audit.rounding import RIGHT, rms
from ppo_repro.testing.audit.subject import StackSampling
from ppo_repro.testing.dumps import DumpedResponse


def definitions_of(
    responses: Sequence[DumpedResponse], references: Mapping[str, Reference], sampling: StackSampling
) -> dict[str, str]:
    """Choose the definition of each side's log-probs: the user's, or else the nearest one to both sides.

    Both sides must have the same definition. Tokens were sampled at the temperature, so log-probs at temperature 1 are
    right only if the user declared them.
    """
    asked = {"sampler": sampling.sampler_logprobs, "trainer": sampling.trainer_logprobs}
    rounding = RIGHT * max(reference.floor for reference in references.values())  # the same for all: it is no reason

    def distance(definition: str, sides: Sequence[str]) -> float:
        reference, total = references[definition], 1.0 * (definition != "tempered")
        for name in sides:
            total += math.log(_rms(name, responses, reference) + rounding)
        return total

    def nearest(names: Sequence[str], sides: Sequence[str]) -> str:
        return min(names, key=lambda definition: distance(definition, sides))

    free = [name for name, said in asked.items() if said == "auto"]
    best = nearest([name for name in references if name != "raw"], free)
    of_engines = [name for name in references if DEFINITIONS[name].order is not None]  # in different orders of cuts
    of_said = {"auto": lambda name: best, PROCESSED: lambda name: nearest(of_engines, [name])}
    return {name: of_said.get(said, lambda name, said=said: said)(name) for name, said in asked.items()}


def different_orders(
    responses: Sequence[DumpedResponse], references: Mapping[str, Reference], sampling: StackSampling
) -> dict[str, str]:
    """Return the order of cuts that each side is right for if no order serves both sides, else nothing."""
    if {sampling.sampler_logprobs, sampling.trainer_logprobs} - {"auto", PROCESSED}:
        return {}
    right: dict[str, list[str]] = {}
    for name in ("sampler", "trainer"):
        far = {
            definition: _rms(name, responses, reference) / reference.floor
            for definition, reference in references.items()
            if DEFINITIONS[definition].order is not None
        }
        right[name] = sorted((d for d, distance in far.items() if distance <= RIGHT), key=lambda d: far[d])
    if not all(right.values()) or set(right["sampler"]) & set(right["trainer"]):
        return {}
    return {name: found[0] for name, found in right.items()}


def order_of(definition: str) -> str:
    """Say in which order a definition cuts."""
    return f"{PROCESSED}, each cut of all tokens" if definition == PROCESSED else definition


def _rms(name: str, responses: Sequence[DumpedResponse], reference: Reference) -> float:
    return rms(torch.cat(distances(numbers_of(name, responses, reference))))
