"""Name the cause of a mismatch from the differences of sampler and trainer alone, without a model.

The pattern of `delta = logprobs_b - logprobs_a` decides. Each cause is one row of `ROWS`: its test, and the columns
that the test needs. Most rows fit if a prediction leaves little of the sum of delta^2 (1 %, a temperature 5 %), or if
one of two groups of sequences differs alone or 10 times as much as the other. Dropout, 16-bit numbers and a bias of
tokens have tests of their own. The first row that fits is the verdict. If no row fits, the verdict is `unknown`, and
`untested` has the causes that the columns cannot tell. `ppo-repro audit`, which has the model, says which side is
wrong. Its causes have the same names and the same advice (`testing.advice`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.statistics.mismatch_metrics import MismatchSums, merged_sums, metric_values, mismatch_sums, with_mismatch
from ppo_repro.testing.advice import ADVICE, CauseName
from ppo_repro.testing.dump_formats import Names
from ppo_repro.testing.evidence import (
    GroupColumn,
    GroupSums,
    PatternSums,
    added_patterns,
    ordered_pairs,
    pattern_sums,
)
from ppo_repro.testing.pairs import Source, evidence_of


@dataclass(frozen=True)
class Tier:
    """Limits in nats, all of which must hold.

    We measured them on tiny models on CPUs; other models need other limits.
    """

    name: str
    abs_mean: float
    abs_max: float
    k3: float


# T2: cached decoding against the full forward in float32; T3 and T4: 16-bit weights
TIERS = (
    Tier("T2", 5e-6, 1e-4, 1e-10),
    Tier("T3", 1e-2, math.inf, 1e-4),
    Tier("T4", 5e-2, math.inf, 2e-3),
)
BEYOND = f"beyond {TIERS[-1].name}"
# a cause explains a mismatch if it leaves at most a tenth of its amplitude
LEFT = 0.01
# temperature is a two-term series in 1 - 1/tau, exact at 1 and 1/2, so it leaves more
LEFT_BY_TEMPERATURE = 0.05
# a difference counts from this many standard errors (clustered by sequence); its probability is 6e-5 if it is normal
DIFFERS = 4.0
# a pattern of a smaller probability counts as no accident
ACCIDENT = 1e-3
# squares left by a slope for each token id, over squares left by one slope, if ENOUGH_TOKENS tokens occur twice: an
# error of each token leaves 0.13 on average and 0.38 at most; of other causes only old weights leave less than 0.9
LEFT_BY_TOKEN = 0.5
ENOUGH_TOKENS = 50


@dataclass(frozen=True)
class Evidence:
    """Numbers that the rows judge; NaN if a column is missing. `left_by_` and `left_without_` are shares of delta^2."""

    tokens: float
    n_nonfinite: float
    frac_bitwise_equal: float
    abs_mean: float
    abs_max: float
    k3: float
    pearson_logp: float
    temperature_ratio: float  # of the sampler's temperature to the trainer's
    left_by_temperature: float
    left_by_kept_mass: float
    left_without_zeros: float
    left_by_shift: float
    left_by_sorting: float
    left_by_token: float  # over the squares that one slope leaves
    repeat_over_delta: float  # the trainer's second pass, RMS of its differences over RMS of delta
    frac_bfloat16: float
    frac_float16: float


@dataclass(frozen=True)
class Diagnosis:
    """Verdict: the cause whose prediction fits, or `unknown` with the causes that the columns cannot tell."""

    verdict: CauseName
    untested: tuple[CauseName, ...]
    tier: str  # T0 (bitwise) to T4, or `beyond T4`
    advice: str
    needed: str  # the columns that would test the untested causes
    evidence: dict[str, float]  # the fields of `Evidence`


def diagnose(run_or_dump: Source, names: Names | str | None = None) -> Diagnosis:
    """Name the cause of the mismatch in the language run of a folder, or in a dump (`imported_pairs`).

    Raises UserError for a source that cannot be read, or that has no finite pair of log-probs.
    """
    return diagnose_chunks(evidence_of(run_or_dump, names))


def diagnose_chunks(chunks: Iterable[pd.DataFrame]) -> Diagnosis:
    """Name the cause of the mismatch in chunks of whole sequences, one row per token, one chunk in memory at a time.

    Columns iteration, sequence, position, token_id, logprobs_a (sampler), logprobs_b (trainer), float32, nats.
    Optional: entropies and prob_sq_sums (trainer), log_kept_mass (sampler), logprobs_b_again (NaN without a second
    pass), token_id_b (-1 if the trainer does not have the token), pad_length, steps_since_sync, prompt_differs (not 0
    if the two sides have different tokens before the response). Raises UserError on a missing column, a repeated token,
    or no finite pair of log-probs.
    """
    sizes, patterns = list[MismatchSums](), list[PatternSums]()
    for chunk in chunks:
        for _, pairs in ordered_pairs(chunk).groupby("iteration", sort=True):
            tokens = with_mismatch(pairs)
            sizes.append(mismatch_sums(tokens))
            patterns.append(pattern_sums(tokens))
    return diagnose_sums(sizes, patterns)


def diagnose_sums(sizes: Sequence[MismatchSums], patterns: Sequence[PatternSums]) -> Diagnosis:
    """Diagnose the mismatch of all iterations from its size and its pattern. Raises UserError if there is no token."""
    if not sum(pattern.tokens for pattern in patterns):
        raise UserError("pairs have no token with two finite log-probs; there is nothing to compare")
    pattern, metrics = added_patterns(patterns), metric_values(merged_sums(sizes))
    evidence = _evidence(pattern, metrics)
    tier = _tier(evidence, metrics["ulp_max", "token"])
    verdict = _named(pattern, evidence, tier)
    untested = [row for row in ROWS if verdict == "unknown" and not row.is_tested(pattern)]
    advice = ADVICE[verdict].sentence
    if pattern.above_0:  # losses or probabilities, as the guard and the audit say
        advice = f"{pattern.above_0:.0f} log-probs are above 0; give log-probs in nats."
    needed = "; ".join(dict.fromkeys(row.needs for row in untested))
    return Diagnosis(verdict, tuple(row.cause for row in untested), tier, advice, needed, asdict(evidence))


def _ratio(left: float, whole: float) -> float:
    return left / whole if whole > 0 else math.nan


def _tier(evidence: Evidence, ulp_max: float) -> str:
    if evidence.frac_bitwise_equal == 1:
        return "T0"
    if not ulp_max > 4 and evidence.abs_max <= TIERS[0].abs_max:  # NaN if no token's steps say something
        return "T1"
    return _tier_of_unequal(evidence)


def _tier_of_unequal(evidence: Evidence) -> str:
    for tier in TIERS:
        if evidence.abs_mean <= tier.abs_mean and evidence.abs_max <= tier.abs_max and evidence.k3 <= tier.k3:
            return tier.name
    return BEYOND


def _evidence(sums: PatternSums, metrics: Mapping[tuple[str, str], float]) -> Evidence:
    n = sums.tokens
    m = sums.moments
    covariance = m.ab - m.a * m.b / n
    spread = (m.a_sq - m.a**2 / n) * (m.b_sq - m.b**2 / n)
    slope, left_by_temperature = _temperature(sums)
    shift = _ratio(min(sums.neighbours.next_sq, sums.neighbours.previous_sq), sums.neighbours.pairs)
    repeated = _ratio(sums.again.again_sq, sums.again.delta_sq)
    return Evidence(
        tokens=n,
        n_nonfinite=metrics["n_nonfinite", "count"],
        frac_bitwise_equal=metrics["frac_bitwise_equal", "token_mean"],
        abs_mean=metrics["abs_mean", "token_mean"],
        abs_max=metrics["abs_max", "token"],
        k3=metrics["k3", "token_mean"],
        pearson_logp=covariance / math.sqrt(spread) if spread > 0 else math.nan,
        temperature_ratio=1 / (1 - slope) if slope < 1 else math.nan,
        left_by_temperature=left_by_temperature,
        left_by_kept_mass=_ratio(sums.mass_sq, sums.delta_sq),
        left_without_zeros=_ratio(sums.delta_sq - sums.zeros_sq, sums.delta_sq),
        left_by_shift=_ratio(shift, sums.delta_sq / n),
        left_by_sorting=_ratio(m.sorted_sq, sums.delta_sq),
        left_by_token=_ratio(sums.repeated.by_token_sq, sums.repeated.by_one_slope_sq),
        repeat_over_delta=math.sqrt(repeated) if sums.again.tokens else math.nan,
        frac_bfloat16=max(side.bfloat16 / max(side.nonzero, 1.0) for side in (sums.formats_a, sums.formats_b)),
        frac_float16=max(side.float16 / max(side.nonzero, 1.0) for side in (sums.formats_a, sums.formats_b)),
    )


def _temperature(sums: PatternSums) -> tuple[float, float]:
    """Return t = 1 - 1/tau of the best fit delta = t x + t^2 k, and the share of delta^2 that the fit leaves.

    x = b + H, k = H + log sum p^2. The fit is the parabola for log sum_v p_v^s that is 0 with slope -H at s = 1 and
    log sum p^2 at s = 2. NaN without the entropies.
    """
    terms = sums.temperature
    if math.isnan(terms.k_sq) or not sums.delta_sq:
        return math.nan, math.nan
    quadratic = terms.x_sq - 2 * terms.delta_k
    residual = np.polynomial.Polynomial([sums.delta_sq, -2 * terms.delta_x, quadratic, 2 * terms.x_k, terms.k_sq])
    roots = residual.deriv().roots()
    real = roots[np.abs(roots.imag) < 1e-9].real
    best = min(real, key=lambda t: float(residual(t)), default=0.0)
    return float(best), float(residual(best)) / sums.delta_sq


def _only_one_group(clean: GroupSums, dirty: GroupSums) -> bool:
    """Return whether, beyond chance, no sequence of `clean` differs and some sequences of `dirty` do.

    If z of n sequences, chosen at random, do not differ, then all u sequences of the first group are among the z with
    probability C(z, u) / C(n, u).
    """
    u, n, equal = int(clean.sequences), int(clean.sequences + dirty.sequences), int(clean.equal + dirty.equal)
    if clean.equal < u or dirty.equal == dirty.sequences:
        return False
    return math.prod((equal - i) / (n - i) for i in range(u)) <= ACCIDENT


def _ten_times(clean: GroupSums, dirty: GroupSums) -> bool:
    """Return whether the mean |delta| of the sequences of `dirty` is clearly 10 times the mean of `clean`."""
    if min(clean.sequences, dirty.sequences) < 2:
        return False
    counted = [(group.sequences, group.means, group.means_sq) for group in (clean, dirty)]
    (m0, v0), (m1, v1) = ((s / n, max(sq - s**2 / n, 0.0) / (n - 1) / n) for n, s, sq in counted)
    return m1 >= 10 * m0 and m1 - m0 > DIFFERS * math.sqrt(v0 + v1)


@dataclass(frozen=True)
class Row:
    """One cause: whether the pattern of a mismatch fits, whether the columns test it, and which columns would."""

    cause: CauseName
    fits: Callable[[PatternSums, Evidence], bool]  # NaN, for no column, never fits
    is_tested: Callable[[PatternSums], bool] = lambda sums: True
    needs: str = ""


def _in_one_group(cause: CauseName, column: GroupColumn, needs: str) -> Row:
    """Return the row of a cause in the sequences where `column` is above 0; if all have it, nothing tests the cause."""

    def fits(sums: PatternSums, evidence: Evidence) -> bool:
        groups = sums.groups[column]
        return is_tested(sums) and (_ten_times(*groups) or _only_one_group(*groups))

    def is_tested(sums: PatternSums) -> bool:
        return sums.groups[column].clean.sequences > 0

    return Row(cause, fits, is_tested, needs)


def _fits_zeros(sums: PatternSums, evidence: Evidence) -> bool:
    return evidence.left_without_zeros <= LEFT and _tells_zeros(sums)


def _tells_zeros(sums: PatternSums) -> bool:
    return not math.isnan(sums.mass_sq) or sums.zeros < sums.tokens  # greedy sampling has log-probs of 0 too


def _fits_shuffled(sums: PatternSums, evidence: Evidence) -> bool:
    # log-probs that agree well are nearly the same multiset too, so they must also be uncorrelated
    return evidence.left_by_sorting <= LEFT and evidence.pearson_logp < 0.5


def _fits_dropout(sums: PatternSums, evidence: Evidence) -> bool:
    # two passes differ by sqrt(2) sigma, and delta is sigma plus a bias of sqrt(7) sigma at most
    return 0.5 <= evidence.repeat_over_delta <= 2.0


def _fits_format(sums: PatternSums, evidence: Evidence) -> bool:
    # a float32 value is by chance a bfloat16 number with probability 2^-16, a float16 number with 2^-13
    return _tier_of_unequal(evidence) != BEYOND and max(evidence.frac_bfloat16, evidence.frac_float16) >= 0.99


def _fits_tokens(sums: PatternSums, evidence: Evidence) -> bool:
    # old weights may favour some tokens everywhere too
    is_fresh = sums.groups["steps_since_sync"].dirty.sequences == 0
    return is_fresh and sums.repeated.tokens >= ENOUGH_TOKENS and evidence.left_by_token <= LEFT_BY_TOKEN


ROWS = (
    _in_one_group("retokenization", "id_differs", "token_id_b, the ids that the trainer scored"),
    _in_one_group("other_prompt", "prompt_differs", "prompt_differs, 0 for some sequences"),
    Row(
        "truncated_sampling",
        lambda sums, evidence: evidence.left_by_kept_mass <= LEFT,
        lambda sums: not math.isnan(sums.mass_sq),
        "log_kept_mass",
    ),
    Row("zero_filled", _fits_zeros, _tells_zeros, "log_kept_mass"),
    Row("off_by_one", lambda sums, evidence: evidence.left_by_shift <= LEFT),
    Row("shuffled", _fits_shuffled),
    Row(
        "temperature",
        lambda sums, evidence: evidence.left_by_temperature <= LEFT_BY_TEMPERATURE,
        lambda sums: not math.isnan(sums.temperature.k_sq),
        "entropies and prob_sq_sums of the trainer",
    ),
    _in_one_group("padding_leak", "pad_length", "pad_length of each row, some of them 0"),
    Row("dropout", _fits_dropout, lambda sums: sums.again.tokens > 0, "logprobs_b_again, a second pass of the trainer"),
    _in_one_group("stale_weights", "steps_since_sync", "steps_since_sync, some of them 0"),
    Row("reduced_precision", _fits_format),
    Row(
        "token_bias",
        _fits_tokens,
        lambda sums: not math.isnan(sums.groups["steps_since_sync"].dirty.sequences),
        "steps_since_sync, 0 everywhere",
    ),
)


def _named(sums: PatternSums, evidence: Evidence, tier: str) -> CauseName:
    """Return the first cause whose prediction fits."""
    if tier in ("T0", "T1", "T2"):
        agree: CauseName = "none" if tier == "T0" else "floating_point_noise"
        return "non_finite" if evidence.n_nonfinite else agree
    return next((row.cause for row in ROWS if row.fits(sums, evidence)), "unknown")
