"""Right log-probs of a dump by each distribution, and the rounding of stock float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.stock import float64
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.distributions import Chunk, Definition, definitions_of
from ppo_repro.testing.audit.draws import Tally
from ppo_repro.testing.audit.forward import Progress, has_decoder_apart, pass_over, slices, states
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
    measured: int  # how many responses stock float32 computed, from the first one
    dropped: int = 0  # drawn tokens that the cuts drop


def references_of(
    model: PreTrainedModel,
    responses: Sequence[DumpedResponse],
    sampling: StackSampling,
    tallies: Mapping[Definition, Tally],
) -> dict[Definition, Reference]:
    """Return the reference by each definition of the settings.

    `tallies` receive what was drawn. Stock float32 computes only the first responses, because these suffice to
    estimate its rounding error. A response is computed whole: its length may choose the rotary positions (longrope),
    and later tokens round more.
    """
    definitions = definitions_of(sampling)
    sizes = accumulate(len(r.response_ids) for r in responses)
    measured = sum(i == 0 or size <= limits.FLOOR_TOKENS for i, size in enumerate(sizes))
    with float64(model):
        wide = logprobs_by(model, responses, sampling, definitions, is_wide=True, tallies=tallies)
    stock = logprobs_by(model, responses[:measured], sampling, definitions)
    references = {}
    for definition in definitions:
        pairs = zip(responses, wide[definition], stock[definition], strict=False)
        apart = torch.cat([(b - a)[torch.tensor(r.counts)] for r, a, b in pairs])
        apart = apart[apart.isfinite()]
        largest = float(apart.abs().max()) if len(apart) else 0.0
        references[definition] = Reference(
            logprobs=wide[definition],
            floor=max(rms(apart), limits.LEAST_FLOOR),
            largest=largest,
            measured=measured,
            dropped=tallies[definition].draws().impossible if definition in tallies else 0,
        )
    return references


def chunks_of(
    model: PreTrainedModel, responses: Sequence[DumpedResponse], sampling: StackSampling, is_wide: bool
) -> Iterator[tuple[int, Chunk]]:
    """Yield the tokens of each response in chunks, each with the index of the response."""
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
                yield i, Chunk(logits[at].double(), ids[here], r.prompt_ids, before, sampling, counts)
        progress.step()


def logprobs_by(
    model: PreTrainedModel,
    responses: Sequence[DumpedResponse],
    sampling: StackSampling,
    definitions: Sequence[Definition],
    is_wide: bool = False,
    tallies: Mapping[Definition, Tally] | None = None,
) -> dict[Definition, list[Tensor]]:
    """Return the log-probs [n] float64 of each response by each definition, and add its tokens to the tallies.

    `is_wide` says whether the model is in float64.
    """
    logprobs: dict[Definition, list[list[Tensor]]] = {d: [[] for _ in responses] for d in definitions}
    for i, chunk in chunks_of(model, responses, sampling, is_wide):
        for definition in definitions:
            logprobs[definition][i].append(definition.target_logprobs(chunk).cpu())
            if tallies and definition in tallies:
                tallies[definition].add(i, definition.logits(chunk), chunk.targets, chunk.counts[chunk.here])
    return {d: [torch.cat(parts) for parts in responses] for d, responses in logprobs.items()}
