"""Describe wrong log-probs of a side without a cause: their positions, and the form of their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.measure import Stored
from ppo_repro.testing.audit.numbers import Numbers
from ppo_repro.testing.dumps import DumpedResponse


@dataclass(frozen=True)
class _Response:
    """The usable tokens [n] of a response with a wrong log-prob."""

    prompt: int  # tokens of the prompt
    positions: Tensor  # in the response
    right: Tensor  # log-probs as they should be
    off: Tensor  # recorded minus right log-probs
    is_wrong: Tensor


def facts(responses: Sequence[DumpedResponse], numbers: Sequence[Numbers], tolerance: float) -> list[str]:
    """Return sentences about log-probs wrong by more than `tolerance` nats; the first ones narrow the cause most."""
    every = [_response(r, one, tolerance) for r, one in zip(responses, numbers, strict=True)]
    wrong = [response for response in every if bool(response.is_wrong.any())]
    if not wrong:
        return []
    found = []
    if len(wrong) < len(every):
        found.append(f"wrong in {len(wrong)} of {len(every)} responses, right in the others")
    right, off = torch.cat([response.right for response in wrong]), torch.cat([response.off for response in wrong])
    bad = torch.cat([response.is_wrong for response in wrong])
    return [*found, *_where(wrong), *_threshold(right, bad), *_how(right[bad], off[bad], tolerance)]


def _response(r: DumpedResponse, numbers: Numbers, tolerance: float) -> _Response:
    usable, off = numbers.usable, numbers.recorded - numbers.reference
    positions, is_wrong = usable.nonzero()[:, 0], numbers.are_wrong(tolerance)
    return _Response(len(r.prompt_ids), positions, numbers.reference[usable], off[usable], is_wrong[usable])


def of_format(stored: Stored) -> list[str]:
    """Say which number format narrower than float32 holds all numbers."""
    if not stored.mantissa:
        return [f"every number has {stored.name}"]
    of_bits = ": its low 16 bits are 0" if stored.name == "bfloat16" else ""
    return [f"every number is a {stored.name} number{of_bits}"] if stored.name else []


def _where(wrong: Sequence[_Response]) -> list[str]:
    """Say up to which token all responses are right."""
    first = [int(response.is_wrong.nonzero()[0]) for response in wrong]
    if len(wrong) > 1 and all(k == len(response.is_wrong) - 1 for k, response in zip(first, wrong, strict=True)):
        return ["wrong at the last token of the response alone"]
    after = [float(response.is_wrong[k:].double().mean()) for k, response in zip(first, wrong, strict=True)]
    if not all(first) or min(after) < limits.WRONG_AFTER:
        return []
    starts = [int(response.positions[k]) for k, response in zip(first, wrong, strict=True)]
    before = {start + response.prompt for start, response in zip(starts, wrong, strict=True)}
    if len(set(starts)) == 1:
        return [f"right up to token {starts[0]} of each response, then not"]
    if len(before) == 1:
        return [f"right where at most {min(before) - 1} tokens come before, then not"]
    return [f"right up to some token of each response ({min(starts)} to {max(starts)}), then not"]


def _threshold(right: Tensor, bad: Tensor) -> list[str]:
    """Say which threshold of the log-prob tells the wrong tokens `bad` from the others."""
    if min(int(bad.sum()), int((~bad).sum())) < limits.FEWEST_FACTS:
        return []
    if float(right[bad].max()) < float(right[~bad].min()):
        return [f"wrong where the log-prob should be below {float(right[~bad].min()):.3g}, right above"]
    if float(right[bad].min()) > float(right[~bad].max()):
        return [f"wrong where the log-prob should be above {float(right[~bad].max()):.3g}, right below"]
    return []


def _how(ideal: Tensor, off: Tensor, tolerance: float) -> list[str]:
    """Describe the errors `off` [n] in nats: constant, proportional to `ideal` [n], or of one sign."""
    found: list[str] = []
    if len(off) < limits.FEWEST_FACTS:
        return found
    mean, recorded = float(off.mean()), ideal + off
    factor, sign = float((recorded @ ideal) / (ideal @ ideal)), "higher" if mean > 0 else "lower"
    if float((off - mean).abs().max()) <= limits.SAME_ERROR * tolerance:
        found.append(f"{abs(mean):.6g} nats {sign} at every wrong token")
    elif float((recorded - factor * ideal).abs().max()) <= limits.SAME_ERROR * tolerance:
        found.append(f"{factor:.6g} times the right number at every wrong token")
    elif bool((off > 0).all()) or bool((off < 0).all()):
        found.append(f"{sign} at every wrong token, by {abs(mean):.3g} nats on average")
    values, counts = recorded.unique(return_counts=True)
    if int(counts.max()) >= max(limits.FEWEST_FACTS, math.ceil(limits.OFTEN * len(recorded))):
        found.append(f"the number {float(values[counts.argmax()]):.6g} occurs {int(counts.max())} times")
    return found
