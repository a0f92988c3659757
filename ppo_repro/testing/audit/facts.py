"""Describe wrong log-probs of a side without a cause: their positions, and the form of their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Numbers
from ppo_repro.testing.audit.measure import Stored
from ppo_repro.testing.dumps import DumpedResponse


def facts(responses: Sequence[DumpedResponse], numbers: Sequence[Numbers], tolerance: float) -> list[str]:
    """Return sentences about wrong log-probs; "right" means equal up to rounding.

    Args:
        responses: prompts and tokens.
        numbers: recorded and right log-probs of each response, in nats.
        tolerance: largest rounding error, in nats.

    Returns:
        Sentences; the first ones narrow the cause most.
    """
    found = list[str]()
    # responses with a wrong token, and of their usable tokens: positions, log-probs as they should be, how far they are
    # off, whether they are wrong
    wrong: list[tuple[DumpedResponse, Tensor, Tensor, Tensor, Tensor]] = []
    for r, of in zip(responses, numbers, strict=True):
        off, usable = of.recorded - of.reference, of.usable
        bad = usable & ~(off.abs() <= tolerance)
        if bool(bad.any()):
            wrong.append((r, usable.nonzero()[:, 0], of.reference[usable], off[usable], bad[usable]))
    if not wrong:
        return found
    if len(wrong) < len(responses):
        found.append(f"wrong in {len(wrong)} of {len(responses)} responses, right in the others")
    found += _where([(len(r.prompt_ids), positions, bad) for r, positions, _, _, bad in wrong])
    ideal, off, bad = (torch.cat(parts) for parts in list(zip(*wrong, strict=True))[2:])
    if min(int(bad.sum()), int((~bad).sum())) >= 3:  # a threshold of the log-prob tells right from wrong
        if float(ideal[bad].max()) < float(ideal[~bad].min()):
            found.append(f"wrong where the log-prob should be below {float(ideal[~bad].min()):.3g}, right above")
        elif float(ideal[bad].min()) > float(ideal[~bad].max()):
            found.append(f"wrong where the log-prob should be above {float(ideal[~bad].max()):.3g}, right below")
    return [*found, *_how(ideal[bad], off[bad], tolerance)]


def of_format(stored: Stored) -> list[str]:
    """Say which number format narrower than float32 holds all numbers."""
    if not stored.mantissa:
        return [f"every number has {stored.name}"]
    of_bits = ": its low 16 bits are 0" if stored.name == "bfloat16" else ""
    return [f"every number is a {stored.name} number{of_bits}"] if stored.name else []


def _where(wrong: Sequence[tuple[int, Tensor, Tensor]]) -> list[str]:
    """Say up to which token all responses are right.

    `wrong`: (tokens of the prompt, positions [n], is wrong [n] bool).
    """
    first = [int(bad.nonzero()[0]) for _, _, bad in wrong]
    if len(wrong) > 1 and all(k == len(bad) - 1 for k, (_, _, bad) in zip(first, wrong, strict=True)):
        return ["wrong at the last token of the response alone"]
    if not all(
        k and float(bad[k:].double().mean()) >= limits.MANY for k, (_, _, bad) in zip(first, wrong, strict=True)
    ):
        return []
    starts = [int(positions[k]) for k, (_, positions, _) in zip(first, wrong, strict=True)]
    before = {start + prompt for start, (prompt, _, _) in zip(starts, wrong, strict=True)}
    if len(set(starts)) == 1:
        return [f"right up to token {starts[0]} of each response, then not"]
    if len(before) == 1:
        return [f"right where at most {min(before) - 1} tokens come before, then not"]
    return [f"right up to some token of each response ({min(starts)} to {max(starts)}), then not"]


def _how(ideal: Tensor, off: Tensor, tolerance: float) -> list[str]:
    """Describe the errors `off` [n] in nats: constant, proportional to `ideal` [n], or of one sign."""
    found: list[str] = []
    if len(off) < 3:
        return found
    mean, recorded = float(off.mean()), ideal + off
    factor, sign = float((recorded @ ideal) / (ideal @ ideal)), "higher" if mean > 0 else "lower"
    if float((off - mean).abs().max()) <= 3 * tolerance:
        found.append(f"{abs(mean):.6g} nats {sign} at every wrong token")
    elif float((recorded - factor * ideal).abs().max()) <= 3 * tolerance:
        found.append(f"{factor:.6g} times the right number at every wrong token")
    elif bool((off > 0).all()) or bool((off < 0).all()):
        found.append(f"{sign} at every wrong token, by {abs(mean):.3g} nats on average")
    values, counts = recorded.unique(return_counts=True)
    if int(counts.max()) >= max(3, math.ceil(0.1 * len(recorded))):
        found.append(f"the number {float(values[counts.argmax()]):.6g} occurs {int(counts.max())} times")
    return found
