"""Compute the right log-probs of a dump by each definition, and the rounding of stock float32 around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.stock import float64
from ppo_repro.testing.audit.causes.variant import Numbers, Piece
from ppo_repro.testing.audit.distributions import DEFINITIONS, distinct, target_logprobs
from ppo_repro.testing.audit.draws import Tally
from ppo_repro.testing.audit.forward import Progress, pass_over, pieces, states
from ppo_repro.testing.audit.rounding import MOST, rms
from ppo_repro.testing.audit.subject import StackSampling, Subject
from ppo_repro.testing.dumps import DumpedResponse

SURE = 0.99  # a token of this probability may have a log-prob that rounds to 0
FLOOR_TOKENS = 2048  # response tokens on which stock float32 is measured
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
    subject: Subject, responses: Sequence[DumpedResponse], sampling: StackSampling, tallies: Mapping[str, Tally]
) -> dict[str, Reference]:
    """Return the reference of each definition that the settings distinguish, or that the user asked for.

    `tallies` receive what was drawn. Stock float32 computes only the first tokens, because these suffice to estimate
    its rounding error.
    """
    asked = {sampling.sampler_logprobs, sampling.trainer_logprobs} - {"auto"}
    names = list(dict.fromkeys([*distinct(sampling), *sorted(asked)]))
    sizes = [len(r.response_ids) for r in responses]
    first = [i for i, size in enumerate(accumulate(sizes)) if i == 0 or size <= FLOOR_TOKENS]
    with float64(subject.model):
        wide = _logprobs(subject.model, responses, sampling, names, tallies)
    stock = _logprobs(subject.model, [responses[i] for i in first], sampling, names)
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


def pieces_of(
    model: PreTrainedModel, responses: Sequence[DumpedResponse], is_wide: bool
) -> Iterator[tuple[int, Piece, Tensor]]:
    """Yield the tokens of each response in pieces: its index, the piece, and which of its tokens count."""
    progress = Progress(f"responses in float{64 if is_wide else 32}", len(responses))
    passes = [pass_over(r.prompt_ids, r.response_ids) for r in responses]
    for i, of_tokens in states(model, passes, is_wide):
        r, length = responses[i], len(responses[i].response_ids)
        ids, counts = (torch.tensor(values, device=model.device) for values in (r.response_ids, r.counts))
        for start in range(0, length, AT_ONCE):
            logits = of_tokens.logits(model, start, start + AT_ONCE)
            for at in pieces(*logits.shape):
                here = slice(start + at.start, start + at.stop)
                before = r.response_ids[: here.start]
                yield i, Piece(logits[at].double(), ids[here], r.prompt_ids, before), counts[here]
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
    for i, piece, counts in pieces_of(model, responses, tallies is not None):
        for name in names:
            logits = DEFINITIONS[name].change(piece, sampling, piece.logits, 0.0)
            found[name][i].append(target_logprobs(piece.targets, logits).cpu())
            if tallies and name in tallies:
                tallies[name].add(i, logits, piece.targets, counts)
    return {name: [torch.cat(parts) for parts in of] for name, of in found.items()}


def numbers_of(name: str, responses: Sequence[DumpedResponse], reference: Reference) -> list[Numbers]:
    """Return the recorded log-probs of a side beside the right ones; a 0 of a token that is not sure is unusable."""
    found = []
    for r, right in zip(responses, reference.logprobs, strict=True):
        recorded, counts = torch.tensor(getattr(r, name)).double(), torch.tensor(r.counts)
        is_empty = ~recorded.isfinite() | ((recorded == 0) & (right < math.log(SURE)))
        found.append(Numbers(recorded, counts & ~is_empty, counts, right))
    return found


def distances(numbers: Sequence[Numbers]) -> list[Tensor]:
    """Return recorded minus right log-probs of the usable tokens of each response, at most MOST nats."""
    return [(of.recorded - of.reference)[of.usable].clamp(-MOST, MOST) for of in numbers]
