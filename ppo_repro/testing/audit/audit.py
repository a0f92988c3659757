"""Say which side of a dump, sampler or trainer, is wrong, and why. `audit` is the algorithm:

1. Compute the right log-probs of the dumped tokens in float64, and the rounding of stock float32 (`reference`).
2. Choose the distribution that the log-probs of each side are of: of all tokens, or after penalties and cuts.
3. Measure how far each side is from the right log-probs. A side is right if it is about as near as float32.
4. Search the causes of a wrong side (`search`): each cause predicts numbers, and explains the side if what remains of
   the errors is rounding (`measure.explains`).
5. Name the causes if at most three hypotheses explain the side equally well; else the cause is `unknown`, and `facts`
   describes the errors.
6. If the sampler's log-probs are right, judge whether the tokens were drawn from them (`draws`).

`limits` has every number that decides, `report` the sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import say
from ppo_repro.models.stock import float64
from ppo_repro.statistics.draws import Draws
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause, Numbers
from ppo_repro.testing.audit.distributions import EACH_CUT_OF_ALL, Definition, sampled_from
from ppo_repro.testing.audit.draws import DrawCauses, Tally, drawn_from, left_out_of
from ppo_repro.testing.audit.facts import facts, of_format
from ppo_repro.testing.audit.measure import rms
from ppo_repro.testing.audit.reference import RecordedSide, chunks_of, largest_error, recorded_sides, references_of
from ppo_repro.testing.audit.search.hypothesis import Hypotheses, Hypothesis
from ppo_repro.testing.audit.search.search import causes_after_logits, causes_before_logits, search
from ppo_repro.testing.audit.search.trial import WrongSide, trial_of
from ppo_repro.testing.audit.stack import StackModel, StackSampling, positions, vocabulary
from ppo_repro.testing.audit.verdict import Distance, Explained, JudgedSide, OfItsOrder, Right, Unknown
from ppo_repro.testing.dumps import DumpedResponse, impossible

TOKENS = ("row", "turn", "position", "token_id", "reference", "sampler", "trainer")
FILL = "record a log-prob for every token that counts, and leave padding out by the mask"


@dataclass(frozen=True)
class Audit:
    """Verdicts about sampler and trainer, and the tokens that count.

    `tokens` has one row per token, with the columns TOKENS; the last three are log-probs in nats.
    """

    responses: int
    floor: float  # rms distance of stock float32, nats
    sampler: JudgedSide
    trainer: JudgedSide
    tokens: pd.DataFrame
    draws: Draws  # judged only if the sampler's log-probs are right
    are_drawn: bool = True  # from the model's distribution
    drawn_by: str = ""  # the causes that explain other draws

    @property
    def is_right(self) -> bool:
        """Return whether both sides are right, and tokens were drawn from what the sampler reports."""
        return self.sampler.is_right and self.trainer.is_right and self.are_drawn


@torch.no_grad()
def audit(stack: StackModel, responses: Sequence[DumpedResponse], sampling: StackSampling) -> Audit:
    """Judge both sides of a dump. Raises UserError if the dump cannot come from this model."""
    _check_model(stack, responses)
    tallies = {definition: Tally(left_out_of(stack, responses)) for definition in sampled_from(sampling)}
    references = references_of(stack.model, responses, sampling, tallies)
    recorded, have_own_orders = recorded_sides(responses, references, sampling)
    sampler, trainer = _judged(stack, recorded)
    if have_own_orders and sampler.is_right and trainer.is_right:
        sampler, trainer = _of_its_order(sampler), _of_its_order(trainer)
    reference = recorded[0].reference
    _require_temperature(sampling, (sampler, trainer))
    _check_weights(sampler, trainer, recorded, reference.floor)
    tally = tallies[drawn_from(tallies)] if sampler.is_right else Tally()
    return Audit(
        responses=len(responses),
        floor=reference.floor,
        sampler=sampler,
        trainer=trainer,
        tokens=_tokens(responses, reference.logprobs),
        draws=tally.draws(),
        are_drawn=not tally.is_wrong(),
        drawn_by=_causes_of_draws(stack.model, responses, sampling, tallies) if tally.is_wrong() else "",
    )


# is a side right, and if not, why


def _judged(stack: StackModel, recorded: Sequence[RecordedSide]) -> list[JudgedSide]:
    """Judge each side by its distance, and search the causes of a wrong one."""
    found, before_logits = list[JudgedSide](), list[Cause]()
    for side in recorded:
        distance = _distance(stack.model, side)
        if not distance.wrong_responses:
            found.append(_near(side, distance))
            continue
        say(f"audit: {side.name} is wrong; looks for the cause")
        before_logits = before_logits or causes_before_logits(stack, side.responses)  # once for both sides
        causes = [*before_logits, *causes_after_logits(side.sampling, side.definition)]
        trial = trial_of(stack.model, side, distance.wrong_responses, causes)
        found.append(_far(side, distance, trial.side, search(trial)))
    return found


def _distance(model: PreTrainedModel, side: RecordedSide) -> Distance:
    """Measure how far a side is; it is right up to limits.RIGHT times stock float32 if no token is further off."""
    limit, every = limits.RIGHT * side.reference.floor, torch.cat(side.errors)
    largest = float(every.abs().max()) if len(every) else math.nan
    far = [i for i, d in enumerate(side.errors) if bool((d.abs() > limits.TOKEN_OVER_RMS * limit).any())]
    is_right = rms(every) <= limit
    if is_right and far:
        is_right = largest <= limits.STOCK_LARGEST * largest_error(model, side, far)
    wrong = [] if is_right else [i for i, d in enumerate(side.errors) if rms(d) > limit or i in far]
    return Distance(len(every), rms(every), largest, tuple(wrong))


def _near(side: RecordedSide, distance: Distance) -> JudgedSide:
    """Return the verdict about a side whose log-probs are right; tokens without a log-prob make it wrong."""
    gaps = _missing_or_zero(side.numbers)
    verdict = Explained(gaps.words, gaps.advice) if gaps.count else Right()
    return JudgedSide(side.name, side.definition, distance, gaps.count, verdict)


def _far(side: RecordedSide, distance: Distance, wrong: WrongSide, found: Hypotheses) -> JudgedSide:
    """Return the verdict about a wrong side from the hypotheses that were tried."""
    best = found.best
    are_zeros_explained = bool(best) and best[0].explains_zeros
    gaps = _missing(side.numbers) if are_zeros_explained else _missing_or_zero(side.numbers)
    return JudgedSide(
        name=side.name,
        definition=side.definition,
        distance=distance,
        empty=gaps.count,
        verdict=_explained(best, wrong, gaps) if 0 < len(best) <= limits.NAMED else _unknown(side, wrong, gaps),
        best=tuple(best),
        tried=tuple(found.shown()),
        temperature=found.temperature(wrong.tolerance),
    )


def _explained(best: Sequence[Hypothesis], wrong: WrongSide, gaps: Gaps) -> Explained:
    """Return the verdict that names the hypotheses which explain a side."""
    return Explained(
        cause=" and ".join(filter(None, (gaps.words, " or ".join(t.words for t in best)))),
        advice="; ".join(filter(None, (gaps.advice, best[0].advice))),
        left=best[0].left,
        known=tuple(of_format(wrong.stored)) if wrong.stored.mantissa else (),  # decimals are of no computation
    )


def _unknown(side: RecordedSide, wrong: WrongSide, gaps: Gaps) -> Unknown:
    """Return the verdict that describes the numbers of a side, and their errors."""
    why = gaps.words or impossible(_counted(side.numbers).float().numpy())
    found = facts(side.responses, side.numbers, wrong.tolerance)
    return Unknown(gaps.advice, (*filter(None, [why]), *of_format(wrong.stored), *found))


@dataclass(frozen=True)
class Gaps:
    """Tokens that count and have no log-prob."""

    count: int
    words: str  # "" if there are none

    @property
    def advice(self) -> str:
        """Return what to do about the tokens."""
        return FILL if self.count else ""


def _missing(numbers: Sequence[Numbers]) -> Gaps:
    """Return the tokens whose log-prob is not finite."""
    values = _counted(numbers)
    count = int((~values.isfinite()).sum())
    return Gaps(count, f"{count:,} of {len(values):,} tokens have no log-prob" if count else "")


def _missing_or_zero(numbers: Sequence[Numbers]) -> Gaps:
    """Return the tokens whose log-prob is not finite, or is exactly 0 though the token is not sure."""
    values = _counted(numbers)
    count, finite = len(values) - sum(int(of.usable.sum()) for of in numbers), values[values.isfinite()]
    if count and len(finite) and not bool(finite.any()):
        return Gaps(count, impossible(values.float().numpy()))
    return Gaps(count, f"{count:,} of {len(values):,} tokens have no log-prob or a 0" if count else "")


def _counted(numbers: Sequence[Numbers]) -> Tensor:
    return torch.cat([of.recorded[of.counts] for of in numbers])


def _of_its_order(side: JudgedSide) -> JudgedSide:
    """Return a side that is right for another order of cuts than the other side."""
    order = ", each cut of all tokens" if side.definition == EACH_CUT_OF_ALL else ""
    return replace(side, verdict=OfItsOrder(f"{side.definition.words}{order}"))


# were the tokens drawn from the log-probs


def _causes_of_draws(
    model: PreTrainedModel,
    responses: Sequence[DumpedResponse],
    sampling: StackSampling,
    tallies: Mapping[Definition, Tally],
) -> str:
    """Return the causes that explain tokens that were not drawn from the likeliest of the distributions."""
    say("audit: tokens were not drawn from the log-probs; looks for the cause")
    definition = drawn_from(tallies)
    if not tallies[definition].draws().tokens:
        return ""  # no drawn token is possible at all
    causes = DrawCauses(tallies[definition], sampling.temperature)
    with float64(model):
        for _, chunk, counts in chunks_of(model, responses, sampling, is_wide=True):
            causes.add(definition.logits(chunk), chunk.targets, counts)
    return causes.words()


def _tokens(responses: Sequence[DumpedResponse], logprobs: Sequence[Tensor]) -> pd.DataFrame:
    frames = []
    for r, right in zip(responses, logprobs, strict=True):
        columns = r.row, r.turns, range(len(right)), r.response_ids, right.numpy(), r.sampler, r.trainer
        frames.append(pd.DataFrame(dict(zip(TOKENS, columns, strict=True)))[r.counts])
    return pd.concat(frames, ignore_index=True).astype({"sampler": "float64", "trainer": "float64"})


# what cannot be judged


def _check_model(stack: StackModel, responses: Sequence[DumpedResponse]) -> None:
    """Raise UserError if a model cannot compute a response."""
    for r in responses:
        if not r.prompt_ids or not r.response_ids:
            what = "response tokens" if not r.response_ids else "prompt token, so nothing predicts its first token"
            raise UserError(f"row {r.row}: has no {what}; an audit needs the ids of prompt and response")
        worst, length = max(*r.prompt_ids, *r.response_ids), len(r.prompt_ids) + len(r.response_ids)
        advice = "give the folder of the model that the dump was made with"
        for name, model in stack.models.items():
            if worst >= (size := vocabulary(model)):
                raise UserError(
                    f"row {r.row}: token {worst} is not in the vocabulary of {size} of the {name}; {advice}"
                )
            if length - 1 > (most := positions(model)):  # the last token is no input
                raise UserError(f"row {r.row}: {length} tokens; the {name} has {most} positions; {advice}")


def _require_temperature(sampling: StackSampling, sides: Iterable[JudgedSide]) -> None:
    """Raise UserError if the user gave no temperature and one explains a side, which may be right at it, or wrong."""
    if sampling.is_temperature_given:
        return
    found = {side.name: f"{side.temperature:.4g}" for side in sides if side.temperature is not None}
    if found:
        said = " and ".join(f"temperature {x} explains the {name}" for name, x in found.items())
        x = next(iter(found.values()))
        raise UserError(
            f"--temperature: missing, and {said}; did you forget --temperature {x}? Give the temperature of the "
            "sampler, --temperature 1 if it was 1"
        )


def _check_weights(sampler: JudgedSide, trainer: JudgedSide, recorded: Sequence[RecordedSide], floor: float) -> None:
    """Raise UserError if both sides agree with each other but not with the model, for no known cause."""
    if not (isinstance(sampler.verdict, Unknown) and isinstance(trainer.verdict, Unknown)):
        return
    pairs = zip(*(side.numbers for side in recorded), strict=True)
    apart = rms(torch.cat([(a.recorded - b.recorded)[a.usable & b.usable] for a, b in pairs]))
    nearer = min(sampler.distance.rms, trainer.distance.rms)
    if apart <= max(limits.RIGHT * floor, limits.AGREE * nearer):
        known = f" ({sampler.verdict.known[0]})" if sampler.verdict.known else ""
        raise UserError(
            f"--model: sampler and trainer are {apart:.2g} nats (rms) from each other and {nearer:.2g} from this "
            f"model, and no fault explains it{known}; give the folder of the weights that the dump was made with, and "
            "its --temperature and cuts"
        )
