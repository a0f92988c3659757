"""Right log-probs of a dump by each distribution, the rounding of stock float32, and which distribution is meant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.stock import float64
from ppo_repro.statistics.draws import moved_by_rounding
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.distributions import RAW, TEMPERED, Chunk, Definition, definitions_of, target_logprobs
from ppo_repro.testing.audit.draws import Tally
from ppo_repro.testing.audit.forward import Progress, has_decoder_apart, pass_over, slices, states
from ppo_repro.testing.audit.measure import rms
from ppo_repro.testing.audit.numbers import Numbers
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
    """Log-probs that one side recorded, beside the right ones by one definition."""

    name: str  # sampler or trainer
    responses: Sequence[DumpedResponse]
    sampling: StackSampling
    definition: Definition
    reference: Reference

    @cached_property
    def numbers(self) -> list[Numbers]:
        """Return the recorded and right log-probs of each response; a 0 of a token that is not sure is unusable.

        The model in float64 may put a drawn token beyond the end of a cut, with probability 0. As many of these tokens
        as rounding may put there do not count.
        """
        every = [torch.tensor(r.counts) for r in self.responses]
        outside = [right.isneginf() & counts for right, counts in zip(self.reference.logprobs, every, strict=True)]
        count, tokens = (sum(int(of_response.sum()) for of_response in some) for some in (outside, every))
        found = []
        for k, (r, right) in enumerate(zip(self.responses, self.reference.logprobs, strict=True)):
            recorded, counts = torch.tensor(getattr(r, self.name)).double(), every[k]
            if count <= moved_by_rounding(tokens):
                counts = counts & ~outside[k]
            is_empty = ~recorded.isfinite() | ((recorded == 0) & (right < math.log(limits.SURE)))
            found.append(Numbers(recorded, counts & ~is_empty, counts, right))
        return found

    @cached_property
    def errors(self) -> list[Tensor]:
        """Return recorded minus right log-probs of the usable tokens of each response, at most limits.CLAMP nats."""
        return [(one.recorded - one.reference)[one.usable].clamp(-limits.CLAMP, limits.CLAMP) for one in self.numbers]

    @property
    def rms(self) -> float:
        """Return the rms of the errors, nats."""
        return rms(torch.cat(self.errors))


def references_of(
    model: PreTrainedModel,
    responses: Sequence[DumpedResponse],
    sampling: StackSampling,
    tallies: Mapping[Definition, Tally],
) -> dict[Definition, Reference]:
    """Return the reference by each definition of the settings.

    `tallies` receive what was drawn. Stock float32 computes only the first tokens, because these suffice to estimate
    its rounding error.
    """
    definitions = definitions_of(sampling)
    sizes = [len(r.response_ids) for r in responses]
    first = [i for i, size in enumerate(accumulate(sizes)) if i == 0 or size <= limits.FLOOR_TOKENS]
    with float64(model):
        wide = _logprobs(model, responses, sampling, definitions, tallies)
    stock = _logprobs(model, [responses[i] for i in first], sampling, definitions)
    references = {}
    for definition in definitions:
        pairs = zip(wide[definition], stock[definition], (responses[i].counts for i in first), strict=False)
        apart = torch.cat([(b - a)[torch.tensor(counts)] for a, b, counts in pairs])
        apart = apart[apart.isfinite()]
        largest = float(apart.abs().max()) if len(apart) else 0.0
        references[definition] = Reference(wide[definition], max(rms(apart), limits.LEAST_FLOOR), largest, len(first))
    return references


def largest_error(model: PreTrainedModel, side: RecordedSide, some: Sequence[int]) -> float:
    """Return the largest distance (nats) of stock float32 over the first responses and `some` responses."""
    responses, reference, definition = side.responses, side.reference, side.definition
    far = [i for i in some if i >= reference.measured]
    stock = _logprobs(model, [responses[i] for i in far], side.sampling, [definition])[definition] if far else []
    apart = [(x - reference.logprobs[i])[torch.tensor(responses[i].counts)] for i, x in zip(far, stock, strict=True)]
    return max([reference.largest, *(float(x[x.isfinite()].abs().amax(0)) for x in apart if len(x[x.isfinite()]))])


def chunks_of(
    model: PreTrainedModel, responses: Sequence[DumpedResponse], sampling: StackSampling, is_wide: bool
) -> Iterator[tuple[int, Chunk, Tensor]]:
    """Yield the tokens of each response in chunks: its index, the chunk, and which of its tokens count."""
    progress = Progress(f"responses in float{64 if is_wide else 32}", len(responses))
    passes = [pass_over(r.prompt_ids, r.response_ids) for r in responses]
    # padding changes the order of sums, which float64 hides, and float32 must not have
    for i, hidden in states(model, passes, has_decoder_apart(model), is_padded=is_wide):
        r, length = responses[i], len(responses[i].response_ids)
        ids, counts = (torch.tensor(values, device=model.device) for values in (r.response_ids, r.counts))
        for start in range(0, length, AT_ONCE):
            logits = hidden.logits(model, start, start + AT_ONCE)
            for at in slices(*logits.shape):
                here = slice(start + at.start, start + at.stop)
                before = r.response_ids[: here.start]
                yield i, Chunk(logits[at].double(), ids[here], r.prompt_ids, before, sampling), counts[here]
        progress.step()


def _logprobs(
    model: PreTrainedModel,
    responses: Sequence[DumpedResponse],
    sampling: StackSampling,
    definitions: Sequence[Definition],
    tallies: Mapping[Definition, Tally] | None = None,
) -> dict[Definition, list[Tensor]]:
    """Return the log-probs [n] float64 of each response by each definition; with `tallies` the model is in float64."""
    found: dict[Definition, list[list[Tensor]]] = {d: [[] for _ in responses] for d in definitions}
    for i, chunk, counts in chunks_of(model, responses, sampling, tallies is not None):
        for definition in definitions:
            logits = definition.logits(chunk)
            found[definition][i].append(target_logprobs(chunk.targets, logits).cpu())
            if tallies and definition in tallies:
                tallies[definition].add(i, logits, chunk.targets, counts)
    return {d: [torch.cat(parts) for parts in responses] for d, responses in found.items()}


# which distribution is meant


def recorded_sides(
    responses: Sequence[DumpedResponse], references: Mapping[Definition, Reference], sampling: StackSampling
) -> tuple[list[RecordedSide], bool]:
    """Return sampler and trainer, each by the definition to judge it by, and whether each has an order of its own."""
    sides = {
        name: {d: RecordedSide(name, responses, sampling, d, reference) for d, reference in references.items()}
        for name in ("sampler", "trainer")
    }
    orders = _different_orders(sides, sampling)
    definitions = orders or _definitions(sides, sampling)
    return [sides[name][definition] for name, definition in definitions.items()], bool(orders)


# of a side, by definition
ByDefinition = Mapping[Definition, RecordedSide]


def _definitions(sides: Mapping[str, ByDefinition], sampling: StackSampling) -> dict[str, Definition]:
    """Choose the definition of each side's log-probs: of the user's kind, or else the nearest one to both sides.

    Both sides must have the same definition. Tokens were sampled at the temperature, so log-probs at temperature 1 are
    right only if the user declared them.
    """
    asked = {"sampler": sampling.sampler_logprobs, "trainer": sampling.trainer_logprobs}
    free = [sides[name] for name, said in asked.items() if said == "auto"]
    rounding = limits.RIGHT * max(side.reference.floor for side in sides["sampler"].values())

    def nearest(definitions: Iterable[Definition], to: Sequence[ByDefinition]) -> Definition:
        def distance(definition: Definition) -> float:
            apart = limits.UNLIKE_TEMPERED if definition != TEMPERED else 0.0
            return sum([math.log(side[definition].rms + rounding) for side in to], apart)

        return min(definitions, key=distance)

    found = {}
    for name, said in asked.items():
        if said == "auto":
            found[name] = nearest((definition for definition in sides[name] if definition != RAW), free)
        else:
            found[name] = nearest((d for d in sides[name] if d.kind == said), [sides[name]])
    return found


def _different_orders(sides: Mapping[str, ByDefinition], sampling: StackSampling) -> dict[str, Definition]:
    """Return for each side the order of cuts that it is right for; nothing if one order is right for both sides."""
    if {sampling.sampler_logprobs, sampling.trainer_logprobs} - {"auto", "processed"}:
        return {}
    right: dict[str, list[Definition]] = {}
    for name, by_definition in sides.items():
        far = {d: side.rms / side.reference.floor for d, side in by_definition.items() if d.kind == "processed"}
        right[name] = sorted((d for d, distance in far.items() if distance <= limits.RIGHT), key=lambda d: far[d])
    if not all(right.values()) or set(right["sampler"]) & set(right["trainer"]):
        return {}
    return {name: found[0] for name, found in right.items()}
