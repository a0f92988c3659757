"""The probability of a text, summed over all its segmentations into tokens.

A sampler can spell one text in many ways: log p(canonical) <= log p(text) = log sum over segmentations of
p(segmentation). Cao and Rimell, 2021. The model is a function from the ids so far to the log-probs of the next token,
[V] nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ppo_repro.errors import UserError

NextLogprobs = Callable[[tuple[int, ...]], npt.NDArray[np.float64]]
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Marginal:
    """log p(text) in nats, `se` its standard error (0 where it is exact)."""

    logprob: float
    se: float
    segmentations: int  # how many were summed, or drawn
    effective: float  # effective number of draws; `segmentations` where exact


def count_segmentations(text: bytes, token_bytes: Mapping[int, bytes]) -> int:
    """How many sequences of tokens spell `text`."""
    pieces = _pieces(text, token_bytes)
    ways = [0] * len(text) + [1]
    for start in range(len(text) - 1, -1, -1):
        ways[start] = sum(ways[end] for _, end in pieces[start])
    return ways[0]


def segmentations(text: bytes, token_bytes: Mapping[int, bytes]) -> Iterator[Ids]:
    """Every sequence of nonempty tokens that spells `text`, depth first in the order of ids."""
    pieces, reachable = _pieces(text, token_bytes), _reachable(text, token_bytes)
    stack: list[tuple[Ids, int]] = [((), 0)]
    while stack:
        ids, start = stack.pop()
        if start == len(text):
            yield ids
            continue
        following = [(token, end) for token, end in pieces[start] if reachable[end]]
        stack += [((*ids, token), end) for token, end in reversed(following)]


def segmentation_logprob(ids: Sequence[int], next_logprobs: NextLogprobs, *, end_id: int | None) -> float:
    """sum_t log p(ids_t | ids before), including `end_id` after them unless it is None; nats."""
    whole = (*ids,) if end_id is None else (*ids, end_id)
    return math.fsum(float(next_logprobs(whole[:t])[token]) for t, token in enumerate(whole))


def exact_marginal(
    text: bytes,
    token_bytes: Mapping[int, bytes],
    next_logprobs: NextLogprobs,
    *,
    end_id: int | None,
    max_segmentations: int,
) -> Marginal:
    """log of the sum of p over all segmentations, nats; with `end_id` the response ends there, else it may go on.

    The model is called once per distinct prefix. UserError where there are more than `max_segmentations`, or none.
    """
    count = _checked_count(text, token_bytes)
    if count > max_segmentations:
        raise UserError(
            f"max_segmentations = {max_segmentations}: the text has {count} segmentations; "
            "raise it, or estimate with importance_marginal"
        )
    cache: dict[Ids, npt.NDArray[np.float64]] = {}

    def remembered(prefix: Ids) -> npt.NDArray[np.float64]:
        if prefix not in cache:
            cache[prefix] = next_logprobs(prefix)
        return cache[prefix]

    logprobs = [segmentation_logprob(ids, remembered, end_id=end_id) for ids in segmentations(text, token_bytes)]
    return Marginal(_log_sum(np.array(logprobs)), 0.0, count, float(count))


def importance_marginal(
    text: bytes,
    token_bytes: Mapping[int, bytes],
    next_logprobs: NextLogprobs,
    *,
    end_id: int | None,
    draws: int,
    generator: np.random.Generator,
) -> Marginal:
    """The same by importance sampling: draws from the model, restricted to tokens that can spell the text.

    q(next) = p(next) / Z over the tokens after which the text can still be spelled. The weight of a draw is the
    product of its Z (and p of `end_id`); its mean is an unbiased estimate of p(text). `se` is that of the log by the
    delta method, se(mean) / mean. UserError for fewer than 2 draws, or where no tokens spell the text.
    """
    if draws < 2:
        raise UserError(f"draws = {draws}: must be at least 2 for a standard error")
    _checked_count(text, token_bytes)
    pieces, reachable = _pieces(text, token_bytes), _reachable(text, token_bytes)
    log_weights = np.empty(draws)
    for draw in range(draws):
        log_weights[draw] = _one_draw(len(text), pieces, reachable, next_logprobs, end_id, generator)
    largest = float(log_weights.max())
    if largest == -math.inf:
        return Marginal(-math.inf, math.nan, draws, math.nan)
    weights = np.exp(log_weights - largest)
    mean = float(weights.mean())
    se = float(weights.std(ddof=1)) / math.sqrt(draws) / mean
    return Marginal(largest + math.log(mean), se, draws, float(weights.sum() ** 2 / (weights * weights).sum()))


def _one_draw(
    length: int,
    pieces: list[list[tuple[int, int]]],
    reachable: list[bool],
    next_logprobs: NextLogprobs,
    end_id: int | None,
    generator: np.random.Generator,
) -> float:
    ids: Ids = ()
    start, log_weight = 0, 0.0
    while start < length:
        following = [(token, end) for token, end in pieces[start] if reachable[end]]
        logprobs = next_logprobs(ids)[[token for token, _ in following]]
        log_mass = _log_sum(logprobs)
        log_weight += log_mass
        if log_mass == -math.inf:
            return log_weight
        drawn = int(generator.choice(len(following), p=_normalised(logprobs - log_mass)))
        ids, start = (*ids, following[drawn][0]), following[drawn][1]
    return log_weight if end_id is None else log_weight + float(next_logprobs(ids)[end_id])


def _normalised(logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    p = np.exp(logprobs)
    return np.asarray(p / p.sum())


def _log_sum(logprobs: npt.NDArray[np.float64]) -> float:
    largest = float(np.max(logprobs))
    if largest == -math.inf:
        return largest
    return largest + math.log(math.fsum(np.exp(logprobs - largest).tolist()))


def _pieces(text: bytes, token_bytes: Mapping[int, bytes]) -> list[list[tuple[int, int]]]:
    """For every position in the text, the tokens that match there and where they end, by id."""
    tokens = sorted((token, spelled) for token, spelled in token_bytes.items() if spelled)
    starts = range(len(text))
    return [[(i, at + len(b)) for i, b in tokens if text.startswith(b, at)] for at in starts]


def _reachable(text: bytes, token_bytes: Mapping[int, bytes]) -> list[bool]:
    """From which positions the rest of the text can be spelled."""
    pieces = _pieces(text, token_bytes)
    reachable = [False] * len(text) + [True]
    for start in range(len(text) - 1, -1, -1):
        reachable[start] = any(reachable[end] for _, end in pieces[start])
    return reachable


def _checked_count(text: bytes, token_bytes: Mapping[int, bytes]) -> int:
    count = count_segmentations(text, token_bytes)
    if not count:
        raise UserError(f"text = {text!r}: no tokens spell it; use a text of the tokenizer's characters")
    return count
