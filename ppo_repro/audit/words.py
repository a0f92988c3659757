"""An audit in words, and as a tree for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ppo_repro.audit.judge import ROUNDED, UNKNOWN, Audit, Side


def sentence(side: Side, responses: int) -> str:
    """The verdict about one side."""
    if side.is_right:
        return f"{side.name} is right: {side.rms:.2g} nats (rms) from the model in float64"
    if not side.tokens:
        return f"{side.name} is wrong: {side.cause}"
    where = f", in {side.wrong_responses} of {responses} responses" if 0 < side.wrong_responses < responses else ""
    explains_nothing = side.cause == UNKNOWN or side.cause.startswith(ROUNDED) or not side.tried
    left = "" if explains_nothing else f"; that leaves {side.left:.2g} nats"
    return f"{side.name} is wrong: {side.rms:.2g} nats (rms) from the model in float64{where}; {side.cause}{left}"


def verdict(found: Audit) -> str:
    """Which side is wrong."""
    wrong = [side.name for side in (found.sampler, found.trainer) if not side.is_right]
    return {0: "both sides are right", 1: f"the {''.join(wrong)} is wrong", 2: "both sides are wrong"}[len(wrong)]


def lines(found: Audit, skipped: int = 0) -> list[str]:
    """The audit in words, the verdict last."""
    left_out = f" ({skipped:,} without a token that counts left out)" if skipped else ""
    return [
        f"{len(found.scored.reference):,} tokens of {found.responses:,} responses{left_out}; stock float32 is "
        f"{found.floor:.2g} nats (rms) from the model in float64",
        *(sentence(side, found.responses) for side in (found.sampler, found.trainer)),
        f"verdict: {verdict(found)}",
    ]


def fields(found: Audit, skipped: int = 0) -> dict[str, Any]:
    """The audit for JSON, without its tokens."""

    def side(of: Side) -> dict[str, Any]:
        tried = [{"left": t.left, **asdict(t.conditions)} for t in of.tried]
        return {**{k: v for k, v in asdict(of).items() if k != "tried"}, "tried": tried}

    return {
        "verdict": verdict(found),
        "responses": found.responses,
        "skipped": skipped,
        "tokens": len(found.scored.reference),
        "float32_rms": found.floor,
        "sampler": side(found.sampler),
        "trainer": side(found.trainer),
    }
