"""Say which side of a dump, sampler or trainer, is wrong, and why. `audit` is the algorithm:

1. Compute the right log-probs of the dumped tokens in float64, and the rounding of stock float32 (`reference`).
2. Choose the distribution that the log-probs of each side are of: of all tokens, or after penalties and cuts (`sides`).
3. Measure how far each side is from the right log-probs (`judge`). A side is right if it is about as near as float32.
4. Search the causes of a wrong side (`search/`): each cause predicts numbers, and explains the side if the errors that
   it leaves are rounding (`measure.is_rounding`).
5. Name the causes if at most three hypotheses explain the side equally well (`judged_side`). Else the cause is
   `unknown`, and `facts` describes the errors.
6. If the sampler's log-probs are right, if only for its own order of cuts, judge whether the tokens were drawn from
   them (`draws`).

`limits` has every number that decides, `report` the sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import say
from ppo_repro.models.stock import float64
from ppo_repro.statistics.draws import Draws
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.distributions import Definition, sampled_from
from ppo_repro.testing.audit.draws import DrawCause, Tally, absent_ends, draw_causes, drawn_from, other_order
from ppo_repro.testing.audit.judge import judged
from ppo_repro.testing.audit.judged_side import JudgedSide
from ppo_repro.testing.audit.measure import rms
from ppo_repro.testing.audit.reference import Reference, chunks_of, references_of
from ppo_repro.testing.audit.sides import RecordedSide, recorded_sides
from ppo_repro.testing.audit.stack import StackModel, StackSampling, positions, vocabulary
from ppo_repro.testing.dumps import DumpedResponse

TOKENS = ("row", "turn", "position", "token_id", "reference", "trainer_reference", "sampler", "trainer")


@dataclass(frozen=True)
class Audit:
    """Verdicts about sampler and trainer, and the tokens that count.

    `tokens` has one row per token, with the columns TOKENS. The last four are log-probs in nats: the right ones of the
    sampler and of the trainer, which differ if the sides have other definitions, and the recorded ones.
    """

    responses: int
    floor: float  # rms distance of stock float32, nats
    sampler: JudgedSide
    trainer: JudgedSide
    tokens: pd.DataFrame
    draws: Draws  # judged only if the sampler's log-probs are right, at least for its own order of cuts
    are_drawn: bool = True  # from the model's distribution
    draw_causes: Sequence[DrawCause] = ()  # that explain other draws

    @property
    def is_right(self) -> bool:
        """Return whether both sides are right, and tokens were drawn from what the sampler reports."""
        return self.sampler.is_right and self.trainer.is_right and self.are_drawn

    @property
    def drawn_by(self) -> str:
        """Return the words of the causes that explain other draws; "" for none."""
        return " or ".join(cause.words for cause in self.draw_causes)


@torch.no_grad()
def audit(stack: StackModel, responses: Sequence[DumpedResponse], sampling: StackSampling) -> Audit:
    """Judge both sides of a dump. Raises UserError if the dump cannot come from this model."""
    _check_model(stack, responses)
    tallies = {definition: Tally(absent_ends(stack, responses)) for definition in sampled_from(sampling)}
    references = references_of(stack.model, responses, sampling, tallies)
    recorded = recorded_sides(responses, references, sampling)
    sampler, trainer = judged(stack, recorded)
    reference = recorded[0].reference
    _require_temperature(sampling, (sampler, trainer))
    _check_weights(sampler, trainer, recorded, reference.floor)
    # log-probs of all tokens name no order of cuts
    reported = sampler.definition if sampler.definition in tallies else drawn_from(tallies)
    tally = tallies[reported] if sampler.state in ("right", "of its own order") else Tally()
    is_wrong = tally.is_wrong()
    return Audit(
        responses=len(responses),
        floor=reference.floor,
        sampler=sampler,
        trainer=trainer,
        tokens=_tokens(responses, *(side.reference for side in recorded)),
        draws=tally.draws(),
        are_drawn=not is_wrong,
        draw_causes=_draw_causes(stack.model, responses, sampling, reported, tallies) if is_wrong else (),
    )


# were the tokens drawn from the log-probs


def _draw_causes(
    model: PreTrainedModel,
    responses: Sequence[DumpedResponse],
    sampling: StackSampling,
    definition: Definition,
    tallies: Mapping[Definition, Tally],
) -> Sequence[DrawCause]:
    """Return the causes that explain tokens that were not drawn from the distribution of a definition."""
    say("audit: tokens were not drawn from the log-probs; the audit looks for the cause")
    likeliest = drawn_from(tallies)
    if not tallies[likeliest].is_wrong():
        return [other_order(likeliest)]
    if not tallies[definition].draws().tokens:
        return []  # no drawn token is possible at all
    with float64(model):
        chunks = (chunk for _, chunk in chunks_of(model, responses, sampling, is_wide=True))
        return draw_causes(tallies[definition], definition, sampling, chunks)


def _tokens(responses: Sequence[DumpedResponse], sampler: Reference, trainer: Reference) -> pd.DataFrame:
    frames = []
    for r, *right in zip(responses, sampler.logprobs, trainer.logprobs, strict=True):
        both = (logprobs.numpy() for logprobs in right)
        columns = r.row, r.turns, range(len(r.response_ids)), r.response_ids, *both, r.sampler, r.trainer
        frames.append(pd.DataFrame(dict(zip(TOKENS, columns, strict=True)))[r.counts])
    return pd.concat(frames, ignore_index=True).astype({"sampler": "float64", "trainer": "float64"})


# what cannot be judged


def _check_model(stack: StackModel, responses: Sequence[DumpedResponse]) -> None:
    """Raise UserError if a model cannot compute a response."""
    for r in responses:
        if not r.prompt_ids or not r.response_ids:
            what = "response tokens" if not r.response_ids else "prompt token, so nothing predicts its first token"
            raise UserError(f"row {r.row}: has no {what}; an audit needs the ids of prompt and response")
        largest = max(*r.prompt_ids, *r.response_ids)
        length = len(r.prompt_ids) + len(r.response_ids)
        advice = "give the folder of the model that the dump was made with"
        for name, model in stack.models.items():
            if largest >= (size := vocabulary(model)):
                raise UserError(
                    f"row {r.row}: token {largest} is not in the vocabulary of {size} of the {name}; {advice}"
                )
            if length - 1 > (most := positions(model)):  # the last token is no input
                raise UserError(f"row {r.row}: {length} tokens; the {name} has {most} positions; {advice}")


def _require_temperature(sampling: StackSampling, sides: Iterable[JudgedSide]) -> None:
    """Raise UserError if the user gave no temperature and one explains a side, which may be right at it, or wrong."""
    if sampling.is_temperature_given:
        return
    temperatures = {side.name: f"{side.temperature:.4g}" for side in sides if side.temperature is not None}
    if temperatures:
        explained = " and ".join(f"temperature {x} explains the {name}" for name, x in temperatures.items())
        x = next(iter(temperatures.values()))
        raise UserError(
            f"--temperature: missing, and {explained}; did you forget --temperature {x}? Give the temperature of the "
            "sampler, --temperature 1 if it was 1"
        )


def _check_weights(sampler: JudgedSide, trainer: JudgedSide, recorded: Sequence[RecordedSide], floor: float) -> None:
    """Raise UserError if both sides agree with each other but not with the model, for no known cause."""
    if not sampler.state == trainer.state == "unknown":
        return
    pairs = zip(*(side.numbers for side in recorded), strict=True)
    differences = torch.cat([(a.recorded - b.recorded)[a.usable & b.usable] for a, b in pairs])
    if not len(differences):
        return  # the sides share no token
    apart = rms(differences)
    nearer = min(sampler.distance.rms, trainer.distance.rms)
    if apart <= max(limits.RIGHT * floor, limits.AGREE * nearer):
        known = f" ({sampler.known[0]})" if sampler.known else ""
        raise UserError(
            f"--model: sampler and trainer are {apart:.2g} nats (rms) from each other and {nearer:.2g} from this "
            f"model, and no fault explains it{known}; give the folder of the weights that the dump was made with, and "
            "its --temperature and cuts"
        )
