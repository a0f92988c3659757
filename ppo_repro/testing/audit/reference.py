"""Right log-probs of a dump by each distribution, the rounding of stock float32, and which distribution is meant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.stock import float64
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Numbers
from ppo_repro.testing.audit.distributions import DEFINITIONS, PROCESSED, Chunk, sampled_from, target_logprobs
from ppo_repro.testing.audit.draws import Tally
from ppo_repro.testing.audit.forward import Progress, pass_over, slices, states
from ppo_repro.testing.audit.measure import rms
from ppo_repro.testing.audit.stack import StackSampling
from ppo_repro.testing.dumps import DumpedResponse

AT_ONCE = 128  # response tokens whose logits are in memory


@dataclass(frozen=True)
class Reference:
    """Right log-probs float64 [n] of each response, and the rms and largest error of stock float32, nats."""

    logprobs: list[Tensor]
    floor: float
    largest: float
    measured: int  # the first responses, in which stock float32 was computed


@dataclass(frozen=True)
class RecordedSide:
    """Log-probs that one side recorded, beside the right ones by the definition that it is judged by."""

    name: str  # sampler or trainer
    responses: Sequence[DumpedResponse]
    sampling: StackSampling
    definition: str  # a name in DEFINITIONS
    reference: Reference
    numbers: Sequence[Numbers]  # of each response


def references_of(
    model: PreTrainedModel,
    responses: Sequence[DumpedResponse],
    sampling: StackSampling,
    tallies: Mapping[str, Tally],
) -> dict[str, Reference]:
    """Return the reference of each definition that the settings distinguish, or that the user asked for.

    `tallies` receive what was drawn. Stock float32 computes only the first tokens, because these suffice to estimate
    its rounding error.
    """
    asked = {sampling.sampler_logprobs, sampling.trainer_logprobs} - {"auto"}
    names = list(dict.fromkeys(["tempered", *sampled_from(sampling), *sorted(asked)]))
    sizes = [len(r.response_ids) for r in responses]
    first = [i for i, size in enumerate(accumulate(sizes)) if i == 0 or size <= limits.FLOOR_TOKENS]
    with float64(model):
        wide = _logprobs(model, responses, sampling, names, tallies)
    stock = _logprobs(model, [responses[i] for i in first], sampling, names)
    references = {}
    for name in names:
        pairs = zip(wide[name], stock[name], (responses[i].counts for i in first), strict=False)
        apart = torch.cat([(b - a)[torch.tensor(counts)] for a, b, counts in pairs])
        apart = apart[apart.isfinite()]
        largest = float(apart.abs().max()) if len(apart) else 0.0
        references[name] = Reference(wide[name], max(rms(apart), 2.0**-24), largest, len(first))
    return references


def largest_error(model: PreTrainedModel, side: RecordedSide, some: Sequence[int]) -> float:
    """Return the largest distance (nats) of stock float32 over the first responses and `some` responses."""
    responses, reference, name = side.responses, side.reference, side.definition
    far = [i for i in some if i >= reference.measured]
    stock = _logprobs(model, [responses[i] for i in far], side.sampling, [name])[name] if far else []
    apart = [(x - reference.logprobs[i])[torch.tensor(responses[i].counts)] for i, x in zip(far, stock, strict=True)]
    return max([reference.largest, *(float(x[x.isfinite()].abs().amax(0)) for x in apart if len(x[x.isfinite()]))])


def chunks_of(
    model: PreTrainedModel, responses: Sequence[DumpedResponse], is_wide: bool
) -> Iterator[tuple[int, Chunk, Tensor]]:
    """Yield the tokens of each response in chunks: its index, the chunk, and which of its tokens count."""
    progress = Progress(f"responses in float{64 if is_wide else 32}", len(responses))
    passes = [pass_over(r.prompt_ids, r.response_ids) for r in responses]
    for i, of_tokens in states(model, passes, is_wide):
        r, length = responses[i], len(responses[i].response_ids)
        ids, counts = (torch.tensor(values, device=model.device) for values in (r.response_ids, r.counts))
        for start in range(0, length, AT_ONCE):
            logits = of_tokens.logits(model, start, start + AT_ONCE)
            for at in slices(*logits.shape):
                here = slice(start + at.start, start + at.stop)
                before = r.response_ids[: here.start]
                yield i, Chunk(logits[at].double(), ids[here], r.prompt_ids, before), counts[here]
        progress.step()


def _logprobs(
    model: PreTrainedModel,
    responses: Sequence[DumpedResponse],
    sampling: StackSampling,
    names: Sequence[str],
    tallies: Mapping[str, Tally] | None = None,
) -> dict[str, list[Tensor]]:
    """Return the log-probs [n] float64 of each response by each definition; with `tallies` the model is in float64."""
    found: dict[str, list[list[Tensor]]] = {name: [[] for _ in responses] for name in names}
    for i, chunk, counts in chunks_of(model, responses, tallies is not None):
        for name in names:
            logits = DEFINITIONS[name](chunk, sampling, chunk.logits, 0.0)
            found[name][i].append(target_logprobs(chunk.targets, logits).cpu())
            if tallies and name in tallies:
                tallies[name].add(i, logits, chunk.targets, counts)
    return {name: [torch.cat(parts) for parts in of] for name, of in found.items()}


def numbers_of(name: str, responses: Sequence[DumpedResponse], reference: Reference) -> list[Numbers]:
    """Return the recorded log-probs of a side beside the right ones; a 0 of a token that is not sure is unusable."""
    found = []
    for r, right in zip(responses, reference.logprobs, strict=True):
        recorded, counts = torch.tensor(getattr(r, name)).double(), torch.tensor(r.counts)
        is_empty = ~recorded.isfinite() | ((recorded == 0) & (right < math.log(limits.SURE)))
        found.append(Numbers(recorded, counts & ~is_empty, counts, right))
    return found


def distances(numbers: Sequence[Numbers]) -> list[Tensor]:
    """Return recorded minus right log-probs of the usable tokens of each response, at most limits.MOST nats."""
    return [(of.recorded - of.reference)[of.usable].clamp(-limits.MOST, limits.MOST) for of in numbers]


def _rms(name: str, responses: Sequence[DumpedResponse], reference: Reference) -> float:
    return rms(torch.cat(distances(numbers_of(name, responses, reference))))


# which distribution is meant


def definitions_of(
    responses: Sequence[DumpedResponse], references: Mapping[str, Reference], sampling: StackSampling
) -> dict[str, str]:
    """Choose the definition of each side's log-probs: the user's, or else the nearest one to both sides.

    Both sides must have the same definition. Tokens were sampled at the temperature, so log-probs at temperature 1 are
    right only if the user declared them.
    """
    asked = {"sampler": sampling.sampler_logprobs, "trainer": sampling.trainer_logprobs}
    free = [name for name, said in asked.items() if said == "auto"]
    rounding = limits.RIGHT * max(reference.floor for reference in references.values())  # the same for all: no reason

    def distance(definition: str, sides: Sequence[str]) -> float:
        reference, total = references[definition], 1.0 * (definition != "tempered")
        for name in sides:
            total += math.log(_rms(name, responses, reference) + rounding)
        return total

    def nearest(names: Sequence[str], sides: Sequence[str]) -> str:
        return min(names, key=lambda definition: distance(definition, sides))

    found = {}
    for name, said in asked.items():
        if said == "auto":
            found[name] = nearest([definition for definition in references if definition != "raw"], free)
        elif said == PROCESSED:
            found[name] = nearest(_of_engines(references), [name])
        else:
            found[name] = said
    return found


def different_orders(
    responses: Sequence[DumpedResponse], references: Mapping[str, Reference], sampling: StackSampling
) -> dict[str, str]:
    """Return the order of cuts that each side is right for if no order serves both sides, else nothing."""
    if {sampling.sampler_logprobs, sampling.trainer_logprobs} - {"auto", PROCESSED}:
        return {}
    right: dict[str, list[str]] = {}
    for name in ("sampler", "trainer"):
        of_orders = {definition: references[definition] for definition in _of_engines(references)}
        far = {definition: _rms(name, responses, of) / of.floor for definition, of in of_orders.items()}
        right[name] = sorted((d for d, distance in far.items() if distance <= limits.RIGHT), key=lambda d: far[d])
    if not all(right.values()) or set(right["sampler"]) & set(right["trainer"]):
        return {}
    return {name: found[0] for name, found in right.items()}


def _of_engines(references: Mapping[str, Reference]) -> list[str]:
    """Return the definitions of what engines sample from, in different orders of cuts."""
    return [name for name in references if name.startswith(PROCESSED)]
