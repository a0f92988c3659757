"""What is measured of pairs of log-probs: sums over tokens, which can be added over iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Measured:
    """Sums over tokens; `largest_*` are maxima. `has_*` is 0 where an optional column is missing."""

    sequences: float = 0.0
    tokens: float = 0.0  # pairs of finite log-probs
    nonfinite: float = 0.0
    unequal: float = 0.0  # in any bit
    other_ids: float = 0.0
    largest_ulp: float = 0.0
    largest_delta: float = 0.0
    delta: float = 0.0
    delta_abs: float = 0.0
    delta_sq: float = 0.0
    k3: float = 0.0  # expm1(delta) - delta
    a: float = 0.0
    b: float = 0.0
    a_sq: float = 0.0
    b_sq: float = 0.0
    ab: float = 0.0
    # clusters: S is a sequence's sum of delta or |delta|, n its tokens, u its sum of 1 - exp(b)
    ss: float = 0.0
    sn: float = 0.0
    nn: float = 0.0
    uncertainty: float = 0.0
    abs_abs: float = 0.0
    abs_u: float = 0.0
    u_u: float = 0.0
    clean_sequences: float = 0.0  # below and above a gap of a factor 10 in |delta|, in iterations that have one
    dirty_sequences: float = 0.0
    # the part of delta_sq at some tokens, or what remains of it after a correction
    at_zeros: float = 0.0
    zeros: float = 0.0
    at_last: float = 0.0
    at_last_4: float = 0.0
    last: float = 0.0
    positive: float = 0.0  # tokens with delta above a tenth of its root mean square
    negative: float = 0.0
    sorted_sq: float = 0.0
    # tokens whose id occurs again; delta^2 left there by a slope on u for each id, or by one for all, of the others
    repeated: float = 0.0
    by_token_sq: float = 0.0
    by_one_slope_sq: float = 0.0
    neighbours: float = 0.0
    next_sq: float = 0.0
    previous_sq: float = 0.0
    # delta on x = b + H and k = H + log sum p^2
    has_entropies: float = 0.0
    dx: float = 0.0
    xx: float = 0.0
    dk: float = 0.0
    xk: float = 0.0
    kk: float = 0.0
    has_mass: float = 0.0
    mass_sq: float = 0.0
    has_again: float = 0.0
    again_sq: float = 0.0  # over the tokens that the trainer scored twice, and of their delta
    again_delta_sq: float = 0.0
    other_prompts: float = 0.0
    has_ids: float = 0.0
    has_padding: float = 0.0
    unpadded: float = 0.0
    unpadded_abs: float = 0.0
    unpadded_abs_sq: float = 0.0
    unpadded_equal: float = 0.0  # sequences without any difference
    padded: float = 0.0
    padded_abs: float = 0.0
    padded_abs_sq: float = 0.0
    padded_equal: float = 0.0
    has_steps: float = 0.0
    fresh: float = 0.0
    fresh_abs: float = 0.0
    fresh_abs_sq: float = 0.0
    fresh_equal: float = 0.0
    behind: float = 0.0
    behind_abs: float = 0.0
    behind_abs_sq: float = 0.0
    behind_equal: float = 0.0
    # nonzero log-probs that are numbers of a 16-bit format, on the side that has more of them
    as_bfloat16: float = 0.0
    as_float16: float = 0.0


def added(measured: Sequence[Measured]) -> Measured:
    """The sums of several iterations together."""
    columns = {f.name: [getattr(one, f.name) for one in measured] for f in fields(Measured)}
    # a column that only some iterations have counts as missing
    combine = {"largest": max, "has": min}
    return Measured(**{name: float(combine.get(name.partition("_")[0], sum)(v)) for name, v in columns.items()})
