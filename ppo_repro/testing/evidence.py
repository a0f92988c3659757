"""Sum what tells the cause of a mismatch: the pattern of delta over the tokens of one iteration.

`delta = logprobs_b - logprobs_a` (trainer minus sampler, nats), all arithmetic in float64 on the recorded float32.
`statistics.mismatch_metrics` sums how large delta is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.records.logprob_pairs import PAIR, TOKEN_KEY
from ppo_repro.statistics.bits import in_bfloat16, in_float16
from ppo_repro.statistics.kl import Floats
from ppo_repro.testing.dumps import ABOVE_0

# optional columns, each of which parts the sequences in two groups: 0 at all tokens, and above 0 at some token
GroupColumn = Literal["pad_length", "steps_since_sync", "id_differs", "prompt_differs"]
GROUP_COLUMNS: tuple[GroupColumn, ...] = get_args(GroupColumn)


class Moments(NamedTuple):
    """Sums over log-probs: the sampler's a, and the trainer's b."""

    a: float
    b: float
    a_sq: float
    b_sq: float
    ab: float
    sorted_sq: float  # (a - b)^2 after both are sorted


class NeighbourSums(NamedTuple):
    """Sums over the pairs of neighbouring tokens i and i + 1 of a response."""

    pairs: float
    next_sq: float  # (b[i] - a[i + 1])^2
    previous_sq: float  # (b[i + 1] - a[i])^2


class RepeatedSums(NamedTuple):
    """Sums over the tokens whose id occurs twice."""

    tokens: float
    by_token_sq: float  # what a slope for each token id leaves of their delta^2
    by_one_slope_sq: float  # what one slope leaves


class TemperatureSums(NamedTuple):
    """Sums of the terms of a temperature: with the entropy H, x = b + H and k = H + log sum p^2."""

    delta_x: float
    x_sq: float
    delta_k: float
    x_k: float
    k_sq: float


class AgainSums(NamedTuple):
    """Sums over the tokens with a second pass of the trainer."""

    tokens: float
    again_sq: float  # (second pass - b)^2
    delta_sq: float


class Formats(NamedTuple):
    """Counts of a side's log-probs other than 0, which every format has, and of the 16-bit numbers among them."""

    nonzero: float
    float16: float
    bfloat16: float


class GroupSums(NamedTuple):
    """Sums over a group of sequences."""

    sequences: float  # their number
    equal: float  # the number whose log-probs all agree
    means: float  # of their mean |delta|, nats
    means_sq: float


class Groups(NamedTuple):
    """The sums of the sequences where a column is 0 (clean), and of the sequences where it is above 0."""

    clean: GroupSums
    dirty: GroupSums


UNKNOWN = GroupSums(math.nan, math.nan, math.nan, math.nan)  # a response lacks the column


class PatternSums(NamedTuple):
    """Sums over the tokens with two finite log-probs; NaN, of an optional column, if a token lacks it."""

    tokens: float
    above_0: float  # tokens with a log-prob above 0
    delta_sq: float
    moments: Moments
    zeros: float  # tokens of which one log-prob is 0
    zeros_sq: float  # delta^2 of these tokens
    neighbours: NeighbourSums
    repeated: RepeatedSums
    temperature: TemperatureSums
    mass_sq: float  # (delta - log_kept_mass)^2
    again: AgainSums
    formats_a: Formats
    formats_b: Formats
    groups: Mapping[GroupColumn, Groups]


def pattern_sums(tokens: pd.DataFrame) -> PatternSums:
    """Return the sums of one iteration from its `with_mismatch` rows, in the order of TOKEN_KEY."""
    if "token_id_b" in tokens:
        scored = tokens["token_id_b"].to_numpy(np.float64, na_value=np.nan)
        tokens = tokens.assign(id_differs=np.where(np.isnan(scored), np.nan, tokens["token_id"].to_numpy() != scored))
    tokens = tokens[tokens["finite"]]
    a32, b32 = tokens["logprobs_a"].to_numpy(), tokens["logprobs_b"].to_numpy()
    a, b, delta = a32.astype(np.float64), b32.astype(np.float64), tokens["delta"].to_numpy()
    owner = np.unique(tokens["sequence"].to_numpy(), return_inverse=True)[1]
    is_zero = (a == 0.0) != (b == 0.0)
    return PatternSums(
        tokens=float(len(delta)),
        above_0=_total((a > ABOVE_0) | (b > ABOVE_0)),
        delta_sq=_total(delta**2),
        moments=_moments(a, b),
        zeros=_total(is_zero),
        zeros_sq=_total(delta[is_zero] ** 2),
        neighbours=_neighbours(tokens["position"].to_numpy(), a, b, owner),
        repeated=_repeated(tokens["token_id"].to_numpy(), b, delta),
        temperature=_temperature(b, delta, _optional(tokens, "entropies"), _optional(tokens, "prob_sq_sums")),
        mass_sq=_total((delta - _optional(tokens, "log_kept_mass")) ** 2),
        again=_again(b, delta, _optional(tokens, "logprobs_b_again")),
        formats_a=_formats(a32),
        formats_b=_formats(b32),
        groups=_groups(tokens, delta, owner),
    )


def added_patterns(parts: Sequence[PatternSums]) -> PatternSums:
    """Add the sums of iterations; an optional column that one iteration lacks makes its sums NaN."""
    return PatternSums(*map(_added, zip(*parts, strict=True)))


def _added(parts: Sequence[Any]) -> Any:
    """Add numbers, or the fields of named tuples, or the values of mappings."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _added([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return type(first)(*map(_added, zip(*parts, strict=True)))
    return sum(parts)


def ordered_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs in the order of TOKEN_KEY.

    Raises UserError on missing columns, log-probs not in float32, or repeated tokens.
    """
    missing = [name for name in PAIR if name not in pairs.columns]
    if missing:
        raise UserError(f"pairs have no column '{missing[0]}'; needed are {', '.join(PAIR)}")
    for name in ("logprobs_a", "logprobs_b"):
        if pairs[name].dtype != np.float32:
            raise UserError(f"column {name} is {pairs[name].dtype}: must be float32, as computed, without rounding")
    twice = pairs.duplicated(TOKEN_KEY)
    if twice.any():
        where = ", ".join(f"{name} {pairs.loc[twice, name].iloc[0]}" for name in TOKEN_KEY)
        raise UserError(f"pairs have the token at {where} twice; give each token one row")
    return pairs.sort_values(TOKEN_KEY, kind="stable", ignore_index=True)


def _total(values: npt.ArrayLike) -> float:
    return float(np.sum(np.asarray(values, dtype=np.float64)))


def _optional(tokens: pd.DataFrame, name: str) -> Floats:
    """Return an optional column; NaN if the frame, or a response of a file, lacks it.

    delta_sq is of all tokens, so the sums of a column must be of all tokens too: one NaN makes them NaN.
    """
    values = tokens[name].to_numpy().astype(np.float64) if name in tokens else np.full(len(tokens), np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def _moments(a: Floats, b: Floats) -> Moments:
    sorted_sq = (np.sort(a) - np.sort(b)) ** 2
    return Moments(_total(a), _total(b), _total(a**2), _total(b**2), _total(a * b), _total(sorted_sq))


def _neighbours(positions: npt.NDArray[Any], a: Floats, b: Floats, owner: npt.NDArray[np.int64]) -> NeighbourSums:
    # neighbours in the response, not just in the frame
    are_neighbours = (owner[1:] == owner[:-1]) & (np.diff(positions) == 1)
    return NeighbourSums(
        pairs=_total(are_neighbours),
        next_sq=_total((b[:-1] - a[1:])[are_neighbours] ** 2),
        previous_sq=_total((b[1:] - a[:-1])[are_neighbours] ** 2),
    )


def _repeated(token_id: npt.NDArray[Any], b: Floats, delta: Floats) -> RepeatedSums:
    """Return the sums of squares left by the fit delta = slope * (1 - p), the effect of a wrong logit of a token.

    The slope of a token is fitted without this token, because noise must not explain itself.
    """
    u, ids = -np.expm1(b), np.unique(token_id, return_inverse=True)[1]

    def left(group: npt.NDArray[np.int64]) -> Floats:
        squares, products = np.bincount(group, u * u)[group], np.bincount(group, u * delta)[group]
        others = squares - u * u
        usable = others > 0
        slope = np.divide(products - u * delta, others, out=np.zeros_like(delta), where=usable)
        return np.where(usable, (delta - slope * u) ** 2, 0.0)

    repeated = np.bincount(ids)[ids] > 1
    by_token, by_one_slope = left(ids)[repeated], left(np.zeros_like(ids))[repeated]
    return RepeatedSums(_total(repeated), _total(by_token), _total(by_one_slope))


def _temperature(b: Floats, delta: Floats, entropy: Floats, prob_sq_sum: Floats) -> TemperatureSums:
    x, k = b + entropy, entropy + np.log(np.where(prob_sq_sum > 0, prob_sq_sum, np.nan))
    return TemperatureSums(_total(delta * x), _total(x * x), _total(delta * k), _total(x * k), _total(k * k))


def _again(b: Floats, delta: Floats, again: Floats) -> AgainSums:
    there = np.isfinite(again)
    return AgainSums(_total(there), _total((again - b)[there] ** 2), _total(delta[there] ** 2))


def _groups(tokens: pd.DataFrame, delta: Floats, owner: npt.NDArray[np.int64]) -> dict[GroupColumn, Groups]:
    """Return the two groups of sequences of each GroupColumn."""
    means = np.bincount(owner, np.abs(delta)) / np.bincount(owner)

    def groups(column: GroupColumn) -> Groups:
        values = tokens[column].to_numpy().astype(np.float64) if column in tokens else np.array([np.nan])
        if np.isnan(values).any():
            return Groups(UNKNOWN, UNKNOWN)
        largest = np.zeros(len(means))
        np.maximum.at(largest, owner, values)
        return Groups(_group(means[largest == 0]), _group(means[largest > 0]))

    return {column: groups(column) for column in GROUP_COLUMNS}


def _group(means: Floats) -> GroupSums:
    return GroupSums(float(len(means)), _total(means == 0.0), _total(means), _total(means**2))


def _formats(side: npt.NDArray[np.float32]) -> Formats:
    side = side[side != 0.0]
    return Formats(float(len(side)), _total(in_float16(side)), _total(in_bfloat16(side)))
