"""What can be said about the numbers of a side without knowing the cause: where they are right, and how they are
off."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_repro.audit.search import Entries, Reference, Stored
from ppo_repro.testing.dumps import Response

MANY = 0.8  # of the tokens after a point that have to differ


def facts(
    responses: Sequence[Response], entries: Entries, reference: Reference, tolerance: float, stored: Stored
) -> list[str]:
    """Sentences, those that narrow the cause most first; "right" means equal to rounding."""
    found = [f"every number is a {stored.name} number" if "float" in stored.name else f"every number has {stored.name}"]
    found = found if stored.name else []
    if "bfloat16" in stored.name:
        found[0] += ": its low 16 bits are 0"
    apart = [v - e for v, e in zip(entries.values, reference.logprobs, strict=True)]
    is_wrong = [u & ~(d.abs() <= tolerance) for d, u in zip(apart, entries.usable, strict=True)]
    wrong = [i for i, w in enumerate(is_wrong) if bool(w.any())]
    if not wrong:
        return found
    if len(wrong) < len(responses):
        found.append(f"wrong in {len(wrong)} of {len(responses)} responses, right in the others")
    found += _where(responses, entries, is_wrong, wrong)
    ideal = torch.cat([reference.logprobs[i][entries.usable[i]] for i in wrong])
    off = torch.cat([apart[i][entries.usable[i]] for i in wrong])
    bad = torch.cat([is_wrong[i][entries.usable[i]] for i in wrong])
    return [*found, *_by_probability(ideal, bad), *_how(ideal, off, bad, tolerance)]


def _where(
    responses: Sequence[Response], entries: Entries, is_wrong: Sequence[Tensor], wrong: Sequence[int]
) -> list[str]:
    first, last = {}, {}
    clean = {"after": True, "before": True, "last": True}
    for i in wrong:
        places = entries.usable[i].nonzero()[:, 0]
        bad = is_wrong[i][places]
        first[i], last[i] = int(bad.nonzero()[0]), int(bad.nonzero()[-1])
        clean["after"] &= bool(first[i]) and float(bad[first[i] :].double().mean()) >= MANY
        clean["before"] &= last[i] < len(bad) - 1 and float(bad[: last[i] + 1].double().mean()) >= MANY
        clean["last"] &= first[i] == len(bad) - 1
    starts = {int(entries.usable[i].nonzero()[first[i], 0]) for i in wrong}
    ends = {int(entries.usable[i].nonzero()[last[i], 0]) for i in wrong}
    turns = {int(responses[i].turns[int(entries.usable[i].nonzero()[first[i], 0])]) for i in wrong}
    before = {len(responses[i].prompt_ids) + int(entries.usable[i].nonzero()[first[i], 0]) for i in wrong}
    several = any(r.turns.max() > 1 for r in responses)
    if clean["last"] and len(wrong) > 1:
        return ["wrong at the last token of the response alone"]
    if clean["after"]:
        if several and len(turns) == 1 and min(turns) > 1:
            return [f"right up to turn {min(turns) - 1}, then not"]
        upto = f"up to some token of each response ({min(starts)} to {max(starts)})"
        if len(starts) == 1:
            upto = f"up to token {min(starts)} of each response"
        elif len(before) == 1:
            upto = f"where at most {min(before) - 1} tokens come before"
        return [f"right {upto}, then not"]
    if clean["before"]:
        upto = f"token {min(ends) + 1}" if len(ends) == 1 else "some token"
        return [f"wrong up to {upto} of each response, then right"]
    ids = [torch.tensor(responses[i].response_ids)[is_wrong[i]] for i in wrong]
    good = [torch.tensor(responses[i].response_ids)[entries.usable[i] & ~is_wrong[i]] for i in wrong]
    bad_ids, good_ids = set(torch.cat(ids).tolist()), set(torch.cat(good).tolist())
    if len(bad_ids) <= 3 and not bad_ids & good_ids and len(torch.cat(ids)) > len(bad_ids):
        return [f"wrong at token id {', '.join(map(str, sorted(bad_ids)))} alone"]
    return []


def _by_probability(ideal: Tensor, bad: Tensor) -> list[str]:
    """Whether a threshold of the log-prob tells right from wrong."""
    if not bad.any() or bad.all() or min(int(bad.sum()), int((~bad).sum())) < 3:
        return []
    if float(ideal[bad].max()) < float(ideal[~bad].min()):
        return [f"wrong where the log-prob should be below {float(ideal[~bad].min()):.3g}, right above"]
    if float(ideal[bad].min()) > float(ideal[~bad].max()):
        return [f"wrong where the log-prob should be above {float(ideal[~bad].max()):.3g}, right below"]
    return []


def _how(ideal: Tensor, off: Tensor, bad: Tensor, tolerance: float) -> list[str]:
    """What kind of distance it is: constant, a factor, of one sign."""
    found: list[str] = []
    wrong = off[bad]
    if len(wrong) < 3:
        return found
    mean = float(wrong.mean())
    recorded = (ideal + off)[bad]
    factor = float((recorded @ ideal[bad]) / (ideal[bad] @ ideal[bad]))
    if float((wrong - mean).abs().max()) <= 3 * tolerance:
        found.append(f"{abs(mean):.6g} nats {'higher' if mean > 0 else 'lower'} at every wrong token")
    elif float((recorded - factor * ideal[bad]).abs().max()) <= 3 * tolerance:
        found.append(f"{factor:.6g} times the right number at every wrong token")
    elif bool((wrong > 0).all()) or bool((wrong < 0).all()):
        found.append(f"{'higher' if mean > 0 else 'lower'} at every wrong token, by {abs(mean):.3g} nats on average")
    values, counts = recorded.unique(return_counts=True)
    if int(counts.max()) >= max(3, math.ceil(0.1 * len(recorded))):
        found.append(f"the number {float(values[counts.argmax()]):.6g} occurs {int(counts.max())} times")
    return found
