"""Sum what tells the cause of a mismatch: the pattern of delta over the tokens of one iteration.

`delta = logprobs_b - logprobs_a` (trainer minus sampler, nats), all arithmetic in float64 on the recorded float32.
`statistics.mismatch_metrics` sums how large delta is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

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


@dataclass(frozen=True)
class GroupSums:
    """Sums over a group of sequences."""

    sequences: float = 0.0  # their number
    equal: float = 0.0  # the number whose log-probs all agree
    means: float = 0.0  # of their mean |delta|, nats
    means_sq: float = 0.0


UNKNOWN = GroupSums(math.nan, math.nan, math.nan, math.nan)  # a response lacks the column


@dataclass(frozen=True)
class Formats:
    """Counts of a side's log-probs other than 0, which every format has, and of the 16-bit numbers among them."""

    nonzero: float = 0.0
    float16: float = 0.0
    bfloat16: float = 0.0


Record = TypeVar("Record", GroupSums, Formats)


@dataclass(frozen=True)
class PatternSums:
    """Sums over the tokens with two finite log-probs; NaN, of an optional column, if a token lacks it."""

    tokens: float = 0.0
    above_0: float = 0.0  # tokens with a log-prob above 0
    delta_sq: float = 0.0
    a: float = 0.0  # the sampler's log-probs; b: the trainer's
    b: float = 0.0
    a_sq: float = 0.0
    b_sq: float = 0.0
    ab: float = 0.0
    sorted_sq: float = 0.0  # (a - b)^2 after both are sorted
    zeros: float = 0.0  # tokens of which one log-prob is 0
    zeros_sq: float = 0.0  # delta^2 of these tokens
    neighbours: float = 0.0  # pairs of neighbouring tokens of a response
    next_sq: float = 0.0  # (b[i] - a[i + 1])^2
    previous_sq: float = 0.0  # (b[i + 1] - a[i])^2
    repeated: float = 0.0  # tokens whose id occurs twice
    by_token_sq: float = 0.0  # what a slope for each token id leaves of their delta^2
    by_one_slope_sq: float = 0.0  # what one slope leaves
    # with the entropy H: x = b + H and k = H + log sum p^2, the terms of a temperature
    delta_x: float = 0.0
    x_sq: float = 0.0
    delta_k: float = 0.0
    x_k: float = 0.0
    k_sq: float = 0.0
    mass_sq: float = 0.0  # (delta - log_kept_mass)^2
    again: float = 0.0  # tokens with a second pass of the trainer
    again_sq: float = 0.0  # (second pass - b)^2
    again_delta_sq: float = 0.0  # delta^2 of these tokens
    formats_a: Formats = Formats()
    formats_b: Formats = Formats()
    by_column: Mapping[GroupColumn, tuple[GroupSums, GroupSums]] = field(default_factory=dict)

    def groups(self, column: GroupColumn) -> tuple[GroupSums, GroupSums]:
        """Return the sequences where a column is 0, and the sequences where it is above 0."""
        return self.by_column.get(column, (GroupSums(), GroupSums()))


def pattern_sums(tokens: pd.DataFrame) -> PatternSums:
    """Return the sums of one iteration from its `with_mismatch` rows, in the order of TOKEN_KEY."""
    if "token_id_b" in tokens:
        scored = tokens["token_id_b"].to_numpy(np.float64, na_value=np.nan)
        tokens = tokens.assign(id_differs=np.where(np.isnan(scored), np.nan, tokens["token_id"].to_numpy() != scored))
    tokens = tokens[tokens["finite"]]
    a32, b32 = tokens["logprobs_a"].to_numpy(), tokens["logprobs_b"].to_numpy()
    a, b, delta = a32.astype(np.float64), b32.astype(np.float64), tokens["delta"].to_numpy()
    owner = np.unique(tokens["sequence"].to_numpy(), return_inverse=True)[1]
    parts = [  # each has sums of its own, and 0 for the other sums
        _moments(a, b, delta),
        _positions(tokens, a, b, delta, owner),
        _by_token(tokens["token_id"].to_numpy(), b, delta),
        _optional(tokens, b, delta),
        _groups(tokens, delta, owner),
        PatternSums(formats_a=_formats(a32), formats_b=_formats(b32)),
    ]
    return added_patterns(parts)


def added_patterns(parts: Sequence[PatternSums]) -> PatternSums:
    """Add sums; an optional column that one iteration lacks makes its sums NaN."""
    counted = [f.name for f in fields(PatternSums) if isinstance(f.default, float)]
    groups = {column: zip(*(part.groups(column) for part in parts), strict=True) for column in GROUP_COLUMNS}
    return PatternSums(
        **{name: float(sum(getattr(part, name) for part in parts)) for name in counted},
        formats_a=_by_field([part.formats_a for part in parts]),
        formats_b=_by_field([part.formats_b for part in parts]),
        by_column={column: (_by_field(clean), _by_field(dirty)) for column, (clean, dirty) in groups.items()},
    )


def _by_field(records: Sequence[Record]) -> Record:
    return type(records[0])(*map(sum, zip(*map(astuple, records), strict=True)))


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


def _moments(a: Floats, b: Floats, delta: Floats) -> PatternSums:
    return PatternSums(
        tokens=float(len(delta)),
        above_0=_total((a > ABOVE_0) | (b > ABOVE_0)),
        delta_sq=_total(delta**2),
        a=_total(a),
        b=_total(b),
        a_sq=_total(a**2),
        b_sq=_total(b**2),
        ab=_total(a * b),
        sorted_sq=_total((np.sort(a) - np.sort(b)) ** 2),
    )


def _positions(tokens: pd.DataFrame, a: Floats, b: Floats, delta: Floats, owner: npt.NDArray[np.int64]) -> PatternSums:
    zero = (a == 0.0) != (b == 0.0)
    same = owner[1:] == owner[:-1]
    # neighbours in the response, not just in the frame
    same &= np.diff(tokens["position"].to_numpy()) == 1
    return PatternSums(
        zeros=_total(zero),
        zeros_sq=_total(delta[zero] ** 2),
        neighbours=_total(same),
        next_sq=_total((b[:-1] - a[1:])[same] ** 2),
        previous_sq=_total((b[1:] - a[:-1])[same] ** 2),
    )


def _by_token(token_id: npt.NDArray[Any], b: Floats, delta: Floats) -> PatternSums:
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
    return PatternSums(
        repeated=_total(repeated),
        by_token_sq=_total(left(ids)[repeated]),
        by_one_slope_sq=_total(left(np.zeros_like(ids))[repeated]),
    )


def _optional(tokens: pd.DataFrame, b: Floats, delta: Floats) -> PatternSums:
    """Return the sums of the optional columns, and of the tokens with a second pass.

    delta_sq is of all tokens, so the sums of a column must be of all tokens too: one NaN makes them NaN.
    """

    def numbers(name: str) -> Floats:
        """Return a column of the frame; NaN if the frame, or a response of a file, lacks it."""
        values = tokens[name].to_numpy().astype(np.float64) if name in tokens else np.full(len(tokens), np.nan)
        return np.where(np.isfinite(values), values, np.nan)

    entropy, squares, again = numbers("entropies"), numbers("prob_sq_sums"), numbers("logprobs_b_again")
    x, k = b + entropy, entropy + np.log(np.where(squares > 0, squares, np.nan))
    twice = np.isfinite(again)
    return PatternSums(
        delta_x=_total(delta * x),
        x_sq=_total(x * x),
        delta_k=_total(delta * k),
        x_k=_total(x * k),
        k_sq=_total(k * k),
        mass_sq=_total((delta - numbers("log_kept_mass")) ** 2),
        again=_total(twice),
        again_sq=_total((again - b)[twice] ** 2),
        again_delta_sq=_total(delta[twice] ** 2),
    )


def _groups(tokens: pd.DataFrame, delta: Floats, owner: npt.NDArray[np.int64]) -> PatternSums:
    """Return the two groups of sequences of each GroupColumn."""
    means = np.bincount(owner, np.abs(delta)) / np.bincount(owner)

    def groups(column: GroupColumn) -> tuple[GroupSums, GroupSums]:
        values = tokens[column].to_numpy().astype(np.float64) if column in tokens else np.array([np.nan])
        if np.isnan(values).any():
            return UNKNOWN, UNKNOWN
        largest = np.zeros(len(means))
        np.maximum.at(largest, owner, values)
        return _group(means[largest == 0]), _group(means[largest > 0])

    return PatternSums(by_column={column: groups(column) for column in GROUP_COLUMNS})


def _group(means: Floats) -> GroupSums:
    return GroupSums(float(len(means)), _total(means == 0.0), _total(means), _total(means**2))


def _formats(side: npt.NDArray[np.float32]) -> Formats:
    side = side[side != 0.0]
    return Formats(float(len(side)), _total(in_float16(side)), _total(in_bfloat16(side)))
