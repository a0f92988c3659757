"""Causes after the softmax: which quantity of a token is recorded, in which unit, at which position.

The formula of a quantity gets log-probs [k, V] and returns a number for each token [k]. The formula of a unit gets the
numbers of a whole response [n], NaN where they are not known, and returns what is recorded [n].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ppo_repro.testing.advice import CauseName
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Formula, OtherQuantity, OtherUnit, Parameter, fixed
from ppo_repro.testing.audit.distributions import Chunk, target_logprobs
from ppo_repro.testing.audit.numbers import RecordedChunk
from ppo_repro.testing.audit.stack import StackSampling

STEPS = (1, -1, 2, -2, 3, -3)
MOST_SHIFTED = 64  # places

# another quantity than the token's log-prob


def _entropy(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)


def _nearest_token(chunks: Sequence[RecordedChunk]) -> Sequence[float]:
    """Find the token whose log-probs are nearest to the recorded ones."""
    most = max(chunks, key=lambda recorded: int(recorded.usable.sum()))
    logp = (most.chunk.logits / most.chunk.sampling.temperature).log_softmax(-1)[most.usable]
    return [float((logp - most.recorded[most.usable][:, None]).abs().mean(0).argmin())]


def _paired(chunk: Chunk, logp: Tensor, token: int, logits: int) -> Tensor:
    """Return at position i the log-prob of target i + `token` by the logits at i + `logits`; NaN outside."""
    index = torch.arange(len(logp), dtype=torch.float64, device=logp.device)
    of_token, of_logits = moved(index, token), moved(index, logits)
    values = logp[of_logits.nan_to_num(0.0).long(), chunk.targets[of_token.nan_to_num(0.0).long()]]
    return values.masked_fill((of_token + of_logits).isnan(), torch.nan)


# another unit than nats of one token


def _shifts(chunks: Sequence[RecordedChunk]) -> Sequence[float]:
    """Propose the shifts that leave a token, the short ones first."""
    longest = min(max(len(one.numbers.counts) for one in chunks) - 1, MOST_SHIFTED)
    return [float(k) for n in range(1, longest + 1) for k in (n, -n)]


def _lower_limit(chunks: Sequence[RecordedChunk]) -> Sequence[float]:
    """Propose the lowest number, if it occurs twice and others are above it."""
    of_responses = {id(one.numbers): one.numbers for one in chunks}.values()  # chunks of one response have the same
    values = torch.cat([numbers.recorded[numbers.usable] for numbers in of_responses])
    low = values.min() if len(values) else torch.tensor(0.0)
    return [float(low)] if int((values == low).sum()) >= 2 and int((values > low).sum()) >= limits.VARIED else []


def _added_probability(chunks: Sequence[RecordedChunk]) -> Sequence[float]:
    """Find the median of recorded minus right probability."""
    added = []
    for one in chunks:
        logp = target_logprobs(one.chunk.targets, one.chunk.logits / one.chunk.sampling.temperature)
        added.append((one.recorded.exp() - logp.exp())[one.usable])
    median = float(torch.cat(added).median())
    return [median] if median > 0.0 else []


def moved(x: Tensor, by: int) -> Tensor:
    """Return y with y[i] = x[i + by], NaN if x has no such entry."""
    found = torch.full_like(x, torch.nan)
    if by >= 0:
        found[: max(len(x) - by, 0)] = x[by:]
    else:
        found[-by:] = x[:by]
    return found


# the rows


def _quantity(words: str, formula: Callable[[Chunk, Tensor], Tensor]) -> OtherQuantity:
    return OtherQuantity(words, "other_quantity", fixed(formula))


def _pair(words: str, formula: Formula) -> OtherQuantity:
    return OtherQuantity(words, "other_pairs", formula, parameter=Parameter(STEPS, in_pairs=2))


def _unit(words: str, change: Callable[[Tensor], Tensor], name: CauseName = "other_number") -> OtherUnit:
    """Return the row that applies `change` to the numbers of the tokens that count; others are not predicted."""

    def of_counted(c: Chunk, v: Tensor) -> Tensor:
        found, counts = torch.full_like(v, torch.nan), c.counts
        found[counts] = change(v[counts])
        return found

    return OtherUnit(words, name, fixed(of_counted))


RECORDED: tuple[OtherQuantity | OtherUnit, ...] = (
    _quantity("log-prob of the likeliest token", lambda c, logp: logp.max(-1).values),
    _quantity("minus the entropy", lambda c, logp: -_entropy(logp)),
    _quantity("the entropy", lambda c, logp: _entropy(logp)),
    _quantity("the logit, not normalised", lambda c, logp: c.logits.gather(-1, c.targets[:, None])[:, 0]),
    OtherQuantity(
        "log-prob of token id {x:.0f} at every position",
        "other_quantity",
        lambda c, logp, x: logp[:, int(x)],
        parameter=Parameter(propose=_nearest_token),
    ),
    _pair(
        "log-prob of the token {x:+.0f} places on, by the right logits",
        lambda c, logp, x: _paired(c, logp, token=int(x), logits=0),
    ),
    _pair(
        "log-prob of the right token, by the logits {x:+.0f} places on",
        lambda c, logp, x: _paired(c, logp, token=0, logits=int(x)),
    ),
    _unit("in base 2, not in nats", lambda y: y / math.log(2)),
    _unit("in base 10, not in nats", lambda y: y / math.log(10)),
    _unit("minus the log-prob (a loss)", lambda y: -y),
    _unit("the probability, not its logarithm", lambda y: y.exp()),
    OtherUnit(
        "divided by the temperature {given} after the softmax",
        "temperature",
        fixed(lambda c, v: v / c.sampling.temperature),
        presumes=StackSampling.is_tempered,
    ),
    OtherUnit(
        "each entry is of the token {x:+.0f} places on",
        "off_by_one",
        lambda c, v, x: moved(v, int(x)),
        parameter=Parameter(propose=_shifts, in_pairs=4),
    ),
    _unit("cumulative sums", lambda y: y.cumsum(0)),
    _unit("sums from each token to the end", lambda y: y.flip(0).cumsum(0).flip(0)),
    _unit("running means", lambda y: y.cumsum(0) / torch.arange(1, len(y) + 1, device=y.device)),
    _unit("the sum over the response at every token", lambda y: y.sum().expand_as(y)),
    _unit("the mean over the response at every token", lambda y: y.mean().expand_as(y)),
    _unit("divided by the number of tokens of the response", lambda y: y / len(y)),
    _unit("in the opposite order", lambda y: y.flip(0), "shuffled"),
    OtherUnit(
        "cut off below {x:.4g}",
        "other_number",
        lambda c, v, x: v.clamp(min=x),
        parameter=Parameter(propose=_lower_limit, in_pairs=1),
    ),
    OtherUnit(
        "the logarithm of the probability + {x:.3g}",
        "epsilon_in_log",
        lambda c, v, x: (v.exp() + x).clamp_min(1e-30).log(),
        parameter=Parameter(propose=_added_probability, is_fitted=True),
    ),
)
