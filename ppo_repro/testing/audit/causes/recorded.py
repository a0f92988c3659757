"""Causes after the softmax: which quantity of a token is recorded, in which unit, at which position.

A function of a quantity gets log-probs [k, V] and returns a number for each token [k]. A function of a unit gets the
numbers of a whole response [n], NaN where they are not known, and returns what is recorded [n].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ppo_repro.testing.advice import CauseName
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause, Parameter, RecordedChunk
from ppo_repro.testing.audit.distributions import target_logprobs
from ppo_repro.testing.audit.stack import StackSampling

STEPS = (1, -1, 2, -2, 3, -3)
MOST_SHIFTED = 64  # places

# another quantity than the token's log-prob


def _likeliest(chunk: RecordedChunk, s: StackSampling, logp: Tensor, x: float) -> Tensor:
    return logp.max(-1).values


def _entropy(chunk: RecordedChunk, s: StackSampling, logp: Tensor, x: float) -> Tensor:
    return -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)


def _minus_entropy(chunk: RecordedChunk, s: StackSampling, logp: Tensor, x: float) -> Tensor:
    return -_entropy(chunk, s, logp, x)


def _logit(chunk: RecordedChunk, s: StackSampling, logp: Tensor, x: float) -> Tensor:
    return chunk.logits.gather(-1, chunk.targets[:, None])[:, 0]


def _of_one_token(chunk: RecordedChunk, s: StackSampling, logp: Tensor, x: float) -> Tensor:
    return logp[:, int(x)]


def _nearest_token(chunks: Sequence[RecordedChunk], sampling: StackSampling) -> Sequence[float]:
    """Find the token whose log-probs are nearest to the recorded ones."""
    chunk = max(chunks, key=lambda r: int(r.usable.sum()))
    logp = (chunk.logits / sampling.temperature).log_softmax(-1)[chunk.usable]
    return [float((logp - chunk.wanted[chunk.usable][:, None]).abs().mean(0).argmin())]


def _of_other_token(chunk: RecordedChunk, s: StackSampling, logp: Tensor, x: float) -> Tensor:
    return _paired(chunk, logp, int(x), 0)


def _by_other_logits(chunk: RecordedChunk, s: StackSampling, logp: Tensor, x: float) -> Tensor:
    return _paired(chunk, logp, 0, int(x))


def _paired(chunk: RecordedChunk, logp: Tensor, token: int, logits: int) -> Tensor:
    """Return at position i the log-prob of target i + `token` by the logits at i + `logits`; NaN outside."""
    index = torch.arange(len(logp), dtype=torch.float64, device=logp.device)
    of_token, of_logits = moved(index, token), moved(index, logits)
    values = logp[of_logits.nan_to_num(0.0).long(), chunk.targets[of_token.nan_to_num(0.0).long()]]
    return values.masked_fill((of_token + of_logits).isnan(), torch.nan)


# another unit than nats of one token


def _to_the_end(y: Tensor) -> Tensor:
    return y.flip(0).cumsum(0).flip(0)


def _running_mean(y: Tensor) -> Tensor:
    return y.cumsum(0) / torch.arange(1, len(y) + 1, device=y.device)


def _sum(y: Tensor) -> Tensor:
    return y.sum().expand_as(y)


def _mean(y: Tensor) -> Tensor:
    return y.mean().expand_as(y)


def _by_length(y: Tensor) -> Tensor:
    return y / len(y)


def _divided_by_temperature(chunk: RecordedChunk, s: StackSampling, v: Tensor, x: float) -> Tensor:
    return v / s.temperature


def _shifted(chunk: RecordedChunk, s: StackSampling, v: Tensor, x: float) -> Tensor:
    return moved(v, int(x))


def _shifts(chunks: Sequence[RecordedChunk], sampling: StackSampling) -> Sequence[float]:
    """Propose the shifts that leave a token, the short ones first."""
    longest = min(max(len(r.numbers.counts) for r in chunks) - 1, MOST_SHIFTED)
    return [float(k) for n in range(1, longest + 1) for k in (n, -n)]


def _limited(chunk: RecordedChunk, s: StackSampling, v: Tensor, x: float) -> Tensor:
    return v.clamp(min=x)


def _lower_limit(chunks: Sequence[RecordedChunk], sampling: StackSampling) -> Sequence[float]:
    """Propose the lowest number, if it occurs twice and others are above it."""
    of_responses = {id(r.numbers): r.numbers for r in chunks}.values()  # chunks of one response have the same
    values = torch.cat([n.recorded[n.usable] for n in of_responses])
    low = values.min() if len(values) else torch.tensor(0.0)
    return [float(low)] if int((values == low).sum()) >= 2 and int((values > low).sum()) >= limits.VARIED else []


def _with_added(chunk: RecordedChunk, s: StackSampling, v: Tensor, x: float) -> Tensor:
    return (v.exp() + x).clamp_min(1e-30).log()


def _added_probability(chunks: Sequence[RecordedChunk], sampling: StackSampling) -> Sequence[float]:
    """Find the median of recorded minus right probability."""
    scaled = ((chunk, target_logprobs(chunk.targets, chunk.logits / sampling.temperature)) for chunk in chunks)
    added = float(torch.cat([(chunk.wanted.exp() - logp.exp())[chunk.usable] for chunk, logp in scaled]).median())
    return [added] if added > 0.0 else []


def moved(x: Tensor, by: int) -> Tensor:
    """Return y with y[i] = x[i + by], NaN if x has no such entry."""
    found = torch.full_like(x, torch.nan)
    if by >= 0:
        found[: max(len(x) - by, 0)] = x[by:]
    else:
        found[-by:] = x[:by]
    return found


# the rows


def _counted(chunk: RecordedChunk, s: StackSampling, v: Tensor, x: float, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `change` to the numbers of the tokens that count; others are not predicted."""
    found, counts = torch.full_like(v, torch.nan), chunk.numbers.counts
    found[counts] = change(v[counts])
    return found


def _unit(words: str, change: Callable[[Tensor], Tensor], name: CauseName = "other_number") -> Cause:
    return Cause(words, "unit", name, partial(_counted, change=change))


RECORDED: tuple[Cause, ...] = (
    Cause("log-prob of the likeliest token", "quantity", "other_quantity", _likeliest),
    Cause("minus the entropy", "quantity", "other_quantity", _minus_entropy),
    Cause("the entropy", "quantity", "other_quantity", _entropy),
    Cause("the logit, not normalised", "quantity", "other_quantity", _logit),
    Cause(
        "log-prob of token id {x:.0f} at every position",
        "quantity",
        "other_quantity",
        _of_one_token,
        parameter=Parameter(propose=_nearest_token),
    ),
    Cause(
        "log-prob of the token {x:+.0f} places on, by the right logits",
        "quantity",
        "other_pairs",
        _of_other_token,
        parameter=Parameter(STEPS, in_pairs=2),
    ),
    Cause(
        "log-prob of the right token, by the logits {x:+.0f} places on",
        "quantity",
        "other_pairs",
        _by_other_logits,
        parameter=Parameter(STEPS, in_pairs=2),
    ),
    _unit("in base 2, not in nats", partial(torch.div, other=math.log(2))),
    _unit("in base 10, not in nats", partial(torch.div, other=math.log(10))),
    _unit("minus the log-prob (a loss)", torch.neg),
    _unit("the probability, not its logarithm", torch.exp),
    Cause(
        "divided by the temperature {given} after the softmax",
        "unit",
        "temperature",
        _divided_by_temperature,
        presumes=StackSampling.is_tempered,
    ),
    Cause(
        "each entry is of the token {x:+.0f} places on",
        "unit",
        "off_by_one",
        _shifted,
        parameter=Parameter(propose=_shifts, in_pairs=4),
    ),
    _unit("cumulative sums", partial(torch.cumsum, dim=0)),
    _unit("sums from each token to the end", _to_the_end),
    _unit("running means", _running_mean),
    _unit("the sum over the response at every token", _sum),
    _unit("the mean over the response at every token", _mean),
    _unit("divided by the number of tokens of the response", _by_length),
    _unit("in the opposite order", partial(torch.flip, dims=(0,)), "shuffled"),
    Cause(
        "cut off below {x:.4g}",
        "unit",
        "other_number",
        _limited,
        parameter=Parameter(propose=_lower_limit, in_pairs=1),
    ),
    Cause(
        "the logarithm of the probability + {x:.3g}",
        "unit",
        "epsilon_in_log",
        _with_added,
        parameter=Parameter(propose=_added_probability, is_fitted=True),
    ),
)
