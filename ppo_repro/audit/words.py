"""An audit in words, and as a tree for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ppo_repro.audit.judge import UNKNOWN, Audit, Side


def sentence(side: Side, responses: int) -> str:
    """The verdict about one side."""
    definition = "" if side.definition == "tempered" else f" (log-probs judged as {side.definition})"
    is_unknown = side.cause == UNKNOWN
    some = 0 < side.wrong_responses < responses and not is_unknown
    where = f", in {side.wrong_responses} of {responses} responses" if some else ""
    distance = f"{side.rms:.2g} nats (rms) from the model in float64{where}{definition}"
    if side.is_right:
        return f"{side.name} is right: {distance}"
    if not side.tokens:
        return f"{side.name} is wrong: {side.cause}"
    if is_unknown:
        return f"{side.name} is wrong: {distance}; the cause is unknown{': ' * bool(side.known)}{'; '.join(side.known)}"
    left = f"; that leaves {side.left:.2g} nats" if side.tried else ""
    return f"{side.name} is wrong: {distance}; {side.cause}{left}"


def verdict(found: Audit) -> str:
    """Which side is wrong."""
    wrong = [side.name for side in (found.sampler, found.trainer) if not side.is_right]
    return {0: "both sides are right", 1: f"the {''.join(wrong)} is wrong", 2: "both sides are wrong"}[len(wrong)]


def lines(found: Audit, skipped: int = 0) -> list[str]:
    """The audit in words, the verdict last."""
    left_out = f" ({skipped:,} without a token that counts left out)" if skipped else ""
    sides = (found.sampler, found.trainer)
    return [
        f"{len(found.tokens):,} tokens of {found.responses:,} responses{left_out}; stock float32 is "
        f"{found.floor:.2g} nats (rms) from the model in float64",
        *(sentence(side, found.responses) for side in sides),
        *(f"{side.name}: {t.left:.2g} nats (rms) are left by: {t.words}" for side in sides for t in side.tried),
        *(f"{side.name}: {side.advice}" for side in sides if side.advice),
        f"verdict: {verdict(found)}",
    ]


def fields(found: Audit, skipped: int = 0) -> dict[str, Any]:
    """The audit for JSON, without its tokens."""
    return {
        "verdict": verdict(found),
        "responses": found.responses,
        "skipped": skipped,
        "tokens": len(found.tokens),
        "float32_rms": found.floor,
        "sampler": asdict(found.sampler),
        "trainer": asdict(found.trainer),
    }
