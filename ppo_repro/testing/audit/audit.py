"""Judge each side against the unmodified model in float64, and search the cause of wrong log-probs.

A side is right if its rms distance is at most 10 times the distance of stock float32, and no token is far off. Stock
float32 is measured on the first responses, up to 2,048 tokens. If a side is wrong, every cause (`causes`) predicts
numbers. A cause is named only if the remaining error is rounding: of float32, or of the 16-bit format of the
computation or of the file. Else the verdict is `unknown`, with facts about the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import say
from ppo_repro.models.stock import float64
from ppo_repro.statistics.draws import Draws
from ppo_repro.testing.audit.causes.variant import Numbers
from ppo_repro.testing.audit.choose_distribution import definitions_of, different_orders, order_of
from ppo_repro.testing.audit.distributions import DEFINITIONS
from ppo_repro.testing.audit.draws import DrawCauses, Tally, drawn_from, left_out_of, sampled_definitions
from ppo_repro.testing.audit.one_side import Explained, Side, Unknown, judged
from ppo_repro.testing.audit.reference import RecordedSide, numbers_of, pieces_of, references_of
from ppo_repro.testing.audit.rounding import RIGHT, rms
from ppo_repro.testing.audit.subject import StackSampling, Subject, positions, vocabulary
from ppo_repro.testing.dumps import DumpedResponse

TOKENS = ("row", "turn", "position", "token_id", "reference", "sampler", "trainer")
AGREE = 0.1  # sides that are nearer to each other than this part of their distance say the same


@dataclass(frozen=True)
class Audit:
    """Verdicts about sampler and trainer, and the tokens that count.

    `tokens` has one row per token, with the columns TOKENS; the last three are log-probs in nats.
    """

    responses: int
    floor: float  # rms distance of stock float32, nats
    sampler: Side
    trainer: Side
    tokens: pd.DataFrame
    draws: Draws  # judged only if the sampler's log-probs are right
    are_drawn: bool = True  # from the model's distribution
    drawn_by: str = ""  # the causes that explain other draws
    are_comparable: bool = True  # False: each side is right for an order of cuts of its own

    @property
    def is_right(self) -> bool:
        """Return whether both sides are right, and tokens were drawn from what the sampler reports."""
        return self.sampler.is_right and self.trainer.is_right and self.are_drawn


@torch.no_grad()
def audit(subject: Subject, responses: Sequence[DumpedResponse], sampling: StackSampling) -> Audit:
    """Judge both sides of a dump. Raises UserError if the dump cannot come from this model."""
    _check(subject, responses)
    tallies = {name: Tally(left_out_of(subject, responses)) for name in sampled_definitions(sampling)}
    references = references_of(subject, responses, sampling, tallies)
    orders = different_orders(responses, references, sampling)
    definitions = orders or definitions_of(responses, references, sampling)
    numbers = {name: numbers_of(name, responses, references[d]) for name, d in definitions.items()}
    sides = {
        name: judged(subject, RecordedSide(name, responses, sampling, d, references[d], numbers[name]))
        for name, d in definitions.items()
    }
    are_comparable = not orders or not all(side.is_right for side in sides.values())
    if not are_comparable:
        sides = {
            name: replace(side, finding=Explained(order_of(side.definition), "", side.distance.rms))
            for name, side in sides.items()
        }
    reference = references[definitions["sampler"]]
    if not sampling.is_temperature_given:
        _check_temperature(sides.values())
    _check_unexplained(sides, numbers, reference.floor)
    tally = tallies[drawn_from(tallies)] if sides["sampler"].is_right else Tally()
    return Audit(
        responses=len(responses),
        floor=reference.floor,
        sampler=sides["sampler"],
        trainer=sides["trainer"],
        tokens=_tokens(responses, reference.logprobs),
        draws=tally.draws(),
        are_drawn=not tally.is_wrong(),
        drawn_by=_causes(subject, responses, sampling, tallies) if tally.is_wrong() else "",
        are_comparable=are_comparable,
    )


def _tokens(responses: Sequence[DumpedResponse], logprobs: Sequence[Tensor]) -> pd.DataFrame:
    frames = []
    for r, right in zip(responses, logprobs, strict=True):
        columns = r.row, r.turns, range(len(right)), r.response_ids, right.numpy(), r.sampler, r.trainer
        frames.append(pd.DataFrame(dict(zip(TOKENS, columns, strict=True)))[r.counts])
    return pd.concat(frames, ignore_index=True).astype({"sampler": "float64", "trainer": "float64"})


def _causes(
    subject: Subject, responses: Sequence[DumpedResponse], sampling: StackSampling, tallies: Mapping[str, Tally]
) -> str:
    """Return the causes that explain tokens that were not drawn from the likeliest of the distributions."""
    say("audit: tokens were not drawn from the log-probs; looks for the cause")
    name = drawn_from(tallies)
    if not tallies[name].draws().tokens:
        return ""  # no drawn token is possible at all
    causes = DrawCauses(tallies[name], sampling.temperature)
    with float64(subject.model):
        for _, piece, counts in pieces_of(subject.model, responses, is_wide=True):
            causes.add(DEFINITIONS[name].change(piece, sampling, piece.logits, 0.0), piece.targets, counts)
    return causes.words()


def _check(subject: Subject, responses: Sequence[DumpedResponse]) -> None:
    for r in responses:
        if not r.prompt_ids or not r.response_ids:
            what = "response tokens" if not r.response_ids else "prompt token, so nothing predicts its first token"
            raise UserError(f"row {r.row}: has no {what}; an audit needs the ids of prompt and response")
        worst, length = max(*r.prompt_ids, *r.response_ids), len(r.prompt_ids) + len(r.response_ids)
        advice = "give the folder of the model that the dump was made with"
        for name, model in subject.models.items():
            if worst >= (size := vocabulary(model)):
                raise UserError(
                    f"row {r.row}: token {worst} is not in the vocabulary of {size} of the {name}; {advice}"
                )
            if length > (most := positions(model)):
                raise UserError(f"row {r.row}: {length} tokens; the {name} has {most} positions; {advice}")


def _check_temperature(sides: Iterable[Side]) -> None:
    """Raise UserError if a temperature explains a side and the user gave none: the side may be right or wrong."""
    found = {side.name: f"{side.temperature:.4g}" for side in sides if side.temperature is not None}
    if found:
        said = " and ".join(f"temperature {x} explains the {name}" for name, x in found.items())
        x = next(iter(found.values()))
        raise UserError(
            f"--temperature: missing, and {said}; did you forget --temperature {x}? Give the temperature of the "
            "sampler, --temperature 1 if it was 1"
        )


def _check_unexplained(sides: Mapping[str, Side], numbers: Mapping[str, Sequence[Numbers]], floor: float) -> None:
    """Raise UserError if both sides agree with each other but not with the model, for no known cause."""
    if any(not isinstance(side.finding, Unknown) for side in sides.values()):
        return
    pairs = zip(*numbers.values(), strict=True)
    apart = rms(torch.cat([(a.recorded - b.recorded)[a.usable & b.usable] for a, b in pairs]))
    nearer = min(side.distance.rms for side in sides.values())
    if apart <= max(RIGHT * floor, AGREE * nearer):
        known = sides["sampler"].known
        raise UserError(
            f"--model: sampler and trainer are {apart:.2g} nats (rms) from each other and {nearer:.2g} from this "
            f"model, and no fault explains it{f' ({known[0]})' if known else ''}; give the folder of the weights that "
            "the dump was made with, and its --temperature and cuts"
        )
