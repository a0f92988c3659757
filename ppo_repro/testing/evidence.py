"""Compute the evidence of a diagnosis: sums over the tokens of one iteration, by name.

`delta = logprobs_b - logprobs_a` (trainer minus sampler, nats), all arithmetic in float64 on the recorded float32.
`added` adds the sums of iterations. `has_*` is 1 if the frame has an optional column, `any_*` if a token has it;
`largest_*` are maxima.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.statistics.bits import has_steps
from ppo_repro.statistics.kl import Floats
from ppo_repro.testing.dumps import ROUNDING
from ppo_repro.testing.pairs import KEY, PAIR, with_mismatch

# a sum that was not measured is 0
MismatchSums = defaultdict[str, float]
# optional columns, each of which parts the sequences in two groups: 0 at all tokens, and above 0 at some token
GROUPED = ("pad_length", "steps_since_sync", "id_differs", "prompt_differs")
KINDS = ("zero", "above")


@dataclass(frozen=True)
class Group:
    """Sums over a group of sequences."""

    sequences: float  # their number
    equal: float  # the number whose log-probs all agree
    means: float  # of their mean |delta|, nats
    means_sq: float


def mismatch_sums(pairs: pd.DataFrame) -> MismatchSums:
    """Return the sums of one iteration.

    Raises UserError on missing columns, log-probs not in float32, or repeated tokens.
    """
    _check(pairs)
    pairs = with_mismatch(pairs.sort_values(KEY, kind="stable", ignore_index=True))
    sums = {"nonfinite": _total(~pairs["finite"])}
    if "token_id_b" in pairs.columns:
        pairs["id_differs"] = pairs["token_id"] != pairs["token_id_b"]
    tokens = pairs[pairs["finite"]]
    a32, b32 = tokens["logprobs_a"].to_numpy(), tokens["logprobs_b"].to_numpy()
    a, b, delta = a32.astype(np.float64), b32.astype(np.float64), tokens["delta"].to_numpy()
    owner = np.unique(tokens["sequence"].to_numpy(), return_inverse=True)[1]
    return defaultdict(
        float,
        sums
        | _plain(tokens, a, b, delta)
        | _positions(tokens, a, b, delta, owner)
        | _by_token(tokens["token_id"].to_numpy(), b, delta)
        | _optional(tokens, b, delta)
        | _groups(tokens, delta, owner)
        | _formats(a32, b32),
    )


def added(measured: Sequence[MismatchSums]) -> MismatchSums:
    """Add the sums of several iterations; an optional column that one iteration lacks counts as missing."""
    combine = {"largest": max, "any": max, "has": min}
    names = {name: combine.get(name.partition("_")[0], sum) for one in measured for name in one}
    return defaultdict(float, {name: float(how(one[name] for one in measured)) for name, how in names.items()})


def require_columns(pairs: pd.DataFrame) -> None:
    """Raise UserError if a column of PAIR is missing."""
    missing = [name for name in PAIR if name not in pairs.columns]
    if missing:
        raise UserError(f"pairs have no column '{missing[0]}'; needed are {', '.join(PAIR)}")


def _check(pairs: pd.DataFrame) -> None:
    require_columns(pairs)
    for name in ("logprobs_a", "logprobs_b"):
        if pairs[name].dtype != np.float32:
            raise UserError(f"column {name} is {pairs[name].dtype}: must be float32, as computed, without rounding")
    twice = pairs.duplicated(KEY)
    if twice.any():
        where = ", ".join(f"{name} {pairs.loc[twice, name].iloc[0]}" for name in KEY)
        raise UserError(f"pairs have the token at {where} twice; give each token one row")


def _total(values: npt.ArrayLike) -> float:
    return float(np.sum(np.asarray(values, dtype=np.float64)))


def _plain(tokens: pd.DataFrame, a: Floats, b: Floats, delta: Floats) -> dict[str, float]:
    steps = tokens["ulp"].to_numpy()[has_steps(a, b)]
    return {
        "tokens": float(len(delta)),
        "above_0": _total((a > ROUNDING) | (b > ROUNDING)),
        "unequal": _total(~tokens["bitwise_equal"]),
        "largest_ulp": float(steps.max(initial=0)),
        "largest_delta": float(tokens["abs_delta"].max()) if len(tokens) else 0.0,
        "delta_abs": _total(tokens["abs_delta"]),
        "delta_sq": _total(delta**2),
        "k3": _total(tokens["k3"]),
        "a": _total(a),
        "b": _total(b),
        "a_sq": _total(a**2),
        "b_sq": _total(b**2),
        "ab": _total(a * b),
        "sorted_sq": _total((np.sort(a) - np.sort(b)) ** 2),
    }


def _positions(
    tokens: pd.DataFrame, a: Floats, b: Floats, delta: Floats, owner: npt.NDArray[np.int64]
) -> dict[str, float]:
    zero = (a == 0.0) != (b == 0.0)
    same = owner[1:] == owner[:-1]
    # neighbours in the response, not just in the frame
    same &= np.diff(tokens["position"].to_numpy()) == 1
    return {
        "zeros": _total(zero),
        "at_zeros": _total(delta[zero] ** 2),
        "neighbours": _total(same),
        "next_sq": _total((b[:-1] - a[1:])[same] ** 2),
        "previous_sq": _total((b[1:] - a[:-1])[same] ** 2),
    }


def _by_token(token_id: npt.NDArray[Any], b: Floats, delta: Floats) -> dict[str, float]:
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
    return {
        "repeated": _total(repeated),
        "by_token_sq": _total(left(ids)[repeated]),
        "by_one_slope_sq": _total(left(np.zeros_like(ids))[repeated]),
    }


def _optional(tokens: pd.DataFrame, b: Floats, delta: Floats) -> dict[str, float]:
    evidence: dict[str, float] = {}

    def column(name: str) -> Floats:
        return tokens[name].to_numpy().astype(np.float64)

    if "entropies" in tokens and "prob_sq_sums" in tokens:
        entropy, sums_of_squares = column("entropies"), column("prob_sq_sums")
        usable = np.isfinite(entropy) & (sums_of_squares > 0)  # all, unless the numbers themselves are wrong
        entropy, moved = entropy[usable], delta[usable]
        x, k = b[usable] + entropy, entropy + np.log(sums_of_squares[usable])
        products = {"dx": moved * x, "xx": x * x, "dk": moved * k, "xk": x * k, "kk": k * k}
        evidence |= {"has_entropies": 1.0, **{name: _total(values) for name, values in products.items()}}
    if "log_kept_mass" in tokens and np.isfinite(mass := column("log_kept_mass")).all():  # NaN: a response without it
        evidence |= {"has_mass": 1.0, "mass_sq": _total((delta - mass) ** 2)}
    if "logprobs_b_again" in tokens:
        again = column("logprobs_b_again")
        twice = np.isfinite(again)
        sums = {"again_sq": _total((again - b)[twice] ** 2), "again_delta_sq": _total(delta[twice] ** 2)}
        evidence |= {"any_again": float(twice.any()), **sums}
    return evidence


def _groups(tokens: pd.DataFrame, delta: Floats, owner: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the sums of each `Group`: for each column of GROUPED, where it is 0, and where it is above 0."""
    sums: dict[str, float] = {}
    means = np.bincount(owner, np.abs(delta)) / np.bincount(owner)
    for column in (name for name in GROUPED if name in tokens):
        sums[f"has_{column}"] = 1.0
        largest = np.zeros(len(means))
        np.maximum.at(largest, owner, tokens[column].to_numpy().astype(np.float64))
        for kind, of in zip(KINDS, (means[largest == 0], means[largest > 0]), strict=True):
            group = Group(float(len(of)), _total(of == 0.0), _total(of), _total(of**2))
            sums |= {f"{column}_{kind}_{name}": value for name, value in asdict(group).items()}
    return sums


def groups(sums: MismatchSums, column: str) -> list[Group]:
    """Return the sequences where a column of GROUPED is 0, and the sequences where it is above 0."""
    return [Group(*(sums[f"{column}_{kind}_{field.name}"] for field in fields(Group))) for kind in KINDS]


def _formats(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> dict[str, float]:
    """Count the log-probs of each side other than 0, which every format has, and the 16-bit numbers among them."""
    counts: dict[str, float] = {}
    for name, side in (("a", a[a != 0.0]), ("b", b[b != 0.0])):
        with np.errstate(over="ignore"):  # a log-prob beyond float16 overflows, and is not equal then
            halves = side.astype(np.float16).astype(np.float32) == side
        brains = side.view(np.uint32) & 0xFFFF == 0
        counts |= {f"{name}_nonzero": float(len(side)), f"{name}_float16": _total(halves)}
        counts[f"{name}_bfloat16"] = _total(brains)
    return counts
