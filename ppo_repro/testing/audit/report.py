"""Put an audit into words for the terminal, and into fields for JSON."""

from __future__ import annotations

from typing import Any

from ppo_repro.testing.audit.audit import Audit
from ppo_repro.testing.audit.distributions import TEMPERED
from ppo_repro.testing.audit.judged_side import JudgedSide
from ppo_repro.testing.audit.search.hypothesis import Hypothesis


def verdict(found: Audit) -> str:
    """Return the words that say which side is wrong, or that both are, or that none is."""
    if found.sampler.state == "of its own order":
        drawn = "" if found.are_drawn else ", and tokens were not drawn from the sampler's"
        return f"the sides are processed in different orders of the cuts{drawn}; take one order on both"
    wrong = [side.name for side in (found.sampler, found.trainer) if not side.is_right]
    if not wrong and not found.are_drawn:
        return "the log-probs of both sides are right, but tokens were not drawn from them"
    return {0: "both sides are right", 1: f"the {''.join(wrong)} is wrong", 2: "both sides are wrong"}[len(wrong)]


def lines(found: Audit, skipped: int = 0, is_limited: bool = False) -> list[str]:
    """Return the printed lines of the audit, the verdict last.

    Args:
        found: the audit.
        skipped: the number of responses left out.
        is_limited: whether the dump may have more responses, because as many were judged as the user asked for.
    """
    left_out = f" ({skipped:,} without a token that counts left out)" if skipped else ""
    first, sides = "the first " if is_limited else "", (found.sampler, found.trainer)
    return [
        f"{len(found.tokens):,} tokens of {first}{found.responses:,} responses{left_out}; stock float32 is "
        f"{found.floor:.2g} nats (rms) from the model in float64",
        *(_sentence(side, found.responses) for side in sides),
        *(line for side in sides for line in _tried(side)),
        *(f"{side.name}: {advice}" for side in sides if (advice := side.advice)),
        *_drawn(found),
        f"verdict: {verdict(found)}",
    ]


def _tried(side: JudgedSide) -> list[str]:
    return [f"{side.name}: {t.left:.2g} nats (rms) are left by: {t.words}" for t in side.hypotheses.shown()]


def _drawn(found: Audit) -> list[str]:
    if not (found.draws.tokens or found.draws.impossible):
        return []
    if found.are_drawn:
        return [f"draws: right: {found.draws.sentence()}"]
    said = [f"draws: {found.draws.sentence()}"] if found.draws.is_wrong else []
    said += [f"draws: explained by {found.drawn_by}"] if found.draw_causes else []
    may_be_cut = not found.draw_causes or any(cause.kind == "cut" for cause in found.draw_causes)
    without = ", or sample without the cut" if may_be_cut else ""
    return [*said, f"draws: report log-probs of the distribution that is sampled from{without}"]


def as_fields(found: Audit, skipped: int = 0) -> dict[str, Any]:
    """Return the verdict as fields of JSON."""
    return {
        "verdict": verdict(found),
        "responses": found.responses,
        "skipped": skipped,
        "tokens": len(found.tokens),
        "float32_rms": found.floor,
        "sampler": side_fields(found.sampler),
        "trainer": side_fields(found.trainer),
        "draws": _draw_fields(found),
    }


def side_fields(side: JudgedSide) -> dict[str, Any]:
    """Return the verdict about a side as fields of JSON."""
    return {
        "name": side.name,
        "definition": side.definition.words,
        "tokens": side.distance.tokens,
        "empty": side.gaps.count,
        "rms": side.distance.rms,
        "largest": side.distance.largest,
        "wrong_responses": len(side.distance.wrong_responses),
        "is_right": side.is_right,
        "state": side.state,
        "cause": side.cause,
        "advice": side.advice,
        "left": side.distance.rms if side.left is None else side.left,
        "known": side.known,
        "tried": [_hypothesis_fields(t, t in side.hypotheses.best) for t in side.hypotheses.shown()],
        "temperature": side.temperature,
    }


def _hypothesis_fields(t: Hypothesis, is_best: bool) -> dict[str, Any]:
    return {
        "words": t.words,
        "advice": t.advice,
        "left": t.left,
        "explains": is_best,
        "deviations": t.deviations,
        "explains_zeros": t.explains_zeros,
        "temperature": t.temperature,
        "is_option": t.is_option,
    }


def _draw_fields(found: Audit) -> dict[str, Any]:
    draws = found.draws  # without tokens if they were not judged
    return {
        "tokens": draws.tokens,
        "mean": draws.mean if draws.tokens else None,
        "error": draws.error if draws.tokens else None,
        "tail_probability": min(draws.tail_probabilities),
        "are_right": found.are_drawn if draws.tokens or draws.impossible else None,
        "explained_by": found.drawn_by,
    }


def _sentence(side: JudgedSide, responses: int) -> str:
    distance = side.distance
    found = f"{distance.rms:.2g} nats (rms) from the model in float64"
    if side.state == "of its own order":
        return f"{side.name} is {side.cause}; {found}"
    wrong = len(distance.wrong_responses)
    is_said = side.state == "unknown" or not 0 < wrong < responses  # the known facts say in which responses
    where = "" if is_said else f", in {wrong} of {responses} responses"
    definition = "" if side.definition == TEMPERED else f" (log-probs judged as {side.definition.words})"
    parts = [f"{found}{where}{definition}"] if distance.tokens else []
    return f"{side.name} is {'right' if side.is_right else 'wrong'}: {'; '.join([*parts, *side.reasons])}"
