"""Name the cause of a mismatch from the pattern of `delta = logprobs_b - logprobs_a`.

The diagnosis names a cause only if the cause predicts the numbers and leaves at most 1 % of the sum of delta^2, or if
one group of sequences differs 10 times as much as the others. Otherwise the verdict is `unknown`, with the possible
causes and the columns that would decide between them. The diagnosis needs no model; `ppo-repro audit` has a model and
names more causes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.testing.causes import CAUSES, Cause
from ppo_repro.testing.diagnosis.evidence import MismatchSums, added, measure

# the evidence that would decide about a possible cause
INPUTS: dict[Cause, str] = {
    "reduced_precision": "`ppo-repro audit` (whether one side computes in 16 bits)",
    "temperature": "entropies and prob_sq_sums of the trainer",
    "stale_weights": "steps_since_sync, some of them 0",
    "token_bias": "steps_since_sync (0 everywhere leaves an error of each token)",
    "dropout": "logprobs_b_again, a second pass of the trainer",
    "padding_leak": "pad_length of each row, some of them 0",
    "retokenization": "token_id_b, the ids that the trainer scored",
    "other_prompt": "prompt_differs, 0 for some sequences",
    "forced_eos": "the ids that were sampled last",
    "zero_filled": "log_kept_mass (greedy sampling has log-probs of 0 too)",
    "truncated_sampling": "log_kept_mass",
}


@dataclass(frozen=True)
class Tier:
    """Limits in nats, all of which must hold.

    We measured them on tiny models on CPUs; other models need other limits.
    """

    name: str
    mean_abs: float
    max_abs: float
    k3: float


# measured on tiny models: cached decoding against the full forward in float32, and 16-bit weights
TIERS = (
    Tier("T2", 5e-6, 1e-4, 1e-10),
    Tier("T3", 1e-2, math.inf, 1e-4),
    Tier("T4", 5e-2, math.inf, 2e-3),
)
# a cause explains a mismatch if it leaves at most a tenth of its amplitude
LEFT = 0.01
# temperature is a two-term series in 1 - 1/tau, exact at 1 and 1/2, so it leaves more
LEFT_BY_TEMPERATURE = 0.05
# a difference counts from this many standard errors (clustered by sequence); its probability is 6e-5 if it is normal
CLEAR = 4.0
# a pattern of a smaller probability counts as no accident
CHANCE = 1e-3
# squares left by a slope for each token id, over squares left by one slope, if ENOUGH_TOKENS tokens occur twice: an
# error of each token leaves 0.13 on average and 0.38 at most; of other causes only old weights leave less than 0.9
LEFT_BY_TOKEN = 0.5
ENOUGH_TOKENS = 50


@dataclass(frozen=True)
class Diagnosis:
    """Verdict: the cause whose prediction fits, or `unknown` with all causes that remain possible."""

    verdict: Cause
    possible: tuple[Cause, ...]
    tier: str  # T0 (bitwise) to T4, or `beyond T4`
    advice: str
    needed: str  # the columns that would decide between the possible causes
    evidence: dict[str, float]


def diagnose(pairs: pd.DataFrame) -> Diagnosis:
    """Name the cause of the mismatch in `pairs`, one row per token.

    Columns iteration, sequence, position, token_id, logprobs_a (sampler), logprobs_b (trainer), float32, nats.
    Optional: entropies and prob_sq_sums (trainer), log_kept_mass (sampler), logprobs_b_again (NaN without a second
    pass), token_id_b (-1 if the trainer does not have the token), pad_length, steps_since_sync, prompt_differs (not 0
    if the two sides have different tokens before the response). Raises UserError on a missing column, a repeated token,
    or no finite pair of log-probs.
    """
    return diagnose_chunks([pairs])


def diagnose_chunks(chunks: Iterable[pd.DataFrame]) -> Diagnosis:
    """Diagnose chunks of whole sequences, with one chunk in memory at a time.

    Columns and errors are the same as in `diagnose`.
    """
    sums = [measure(frame) for chunk in chunks for _, frame in chunk.groupby("iteration", sort=True)]
    if not sum(frame["tokens"] for frame in sums):
        raise UserError("pairs have no token with two finite log-probs; there is nothing to compare")
    m = added(sums)
    evidence = _evidence(m)
    tier = _tier(m)
    verdict: Cause = _named(m, evidence, tier) or "unknown"
    possible = _possible(m, evidence, tier) if verdict == "unknown" else ()
    needed = "; ".join(INPUTS[cause] for cause in possible)
    advice = CAUSES[verdict].advice
    if m["above_0"]:  # losses or probabilities, as the guard and the audit say
        advice = f"{m['above_0']:.0f} log-probs are above 0; give log-probs in nats."
    return Diagnosis(verdict, possible, tier, advice, needed, evidence)


def _ratio(left: float, whole: float) -> float:
    return left / whole if whole > 0 else math.nan


def _tier(sums: MismatchSums) -> str:
    if not sums["unequal"]:
        return "T0"
    if sums["largest_ulp"] <= 4 and sums["largest_delta"] <= TIERS[0].max_abs:
        return "T1"
    mean_abs, k3 = sums["delta_abs"] / sums["tokens"], sums["k3"] / sums["tokens"]
    for tier in TIERS:
        if mean_abs <= tier.mean_abs and sums["largest_delta"] <= tier.max_abs and k3 <= tier.k3:
            return tier.name
    return f"beyond {TIERS[-1].name}"


def _evidence(sums: MismatchSums) -> dict[str, float]:
    n = sums["tokens"]
    mean = sums["delta"] / n
    clusters = sums["sequences"] / (sums["sequences"] - 1) if sums["sequences"] > 1 else math.nan
    variance = (sums["ss"] - 2 * mean * sums["sn"] + mean**2 * sums["nn"]) / n**2 * clusters
    covariance = sums["ab"] - sums["a"] * sums["b"] / n
    spread = (sums["a_sq"] - sums["a"] ** 2 / n) * (sums["b_sq"] - sums["b"] ** 2 / n)
    slope, left_by_temperature = _temperature(sums)
    of_b = sums["b_sq"] - sums["b"] ** 2 / n
    repeated = _ratio(sums["again_sq"], sums["again_delta_sq"])
    shift = min(_ratio(sums["next_sq"], sums["neighbours"]), _ratio(sums["previous_sq"], sums["neighbours"]))
    return {
        "tokens": n,
        "nonfinite": sums["nonfinite"],
        "frac_bitwise_equal": 1 - sums["unequal"] / n,
        "mean_abs": sums["delta_abs"] / n,
        "max_abs": sums["largest_delta"],
        "k1": -mean,
        "k1_se": math.sqrt(max(variance, 0.0)),
        "k3": sums["k3"] / n,
        "pearson_logp": covariance / math.sqrt(spread) if spread > 0 else math.nan,
        "temperature_ratio": 1 / (1 - slope) if slope < 1 else math.nan,
        "left_by_temperature": left_by_temperature,
        "delta_logp_slope": 1 - _ratio(covariance, of_b),
        "left_by_kept_mass": _ratio(sums["mass_sq"], sums["delta_sq"]) if sums["has_mass"] else math.nan,
        "left_without_zeros": _ratio(sums["delta_sq"] - sums["at_zeros"], sums["delta_sq"]),
        "left_without_last": _ratio(sums["delta_sq"] - sums["at_last"], sums["delta_sq"]),
        "left_by_shift": _ratio(shift, sums["delta_sq"] / n),
        "left_by_sorting": _ratio(sums["sorted_sq"], sums["delta_sq"]),
        "left_by_token": _ratio(sums["by_token_sq"], sums["by_one_slope_sq"]),
        "repeat_over_delta": math.sqrt(repeated) if sums["has_again"] else math.nan,
        "clean_sequences": sums["clean_sequences"],
        "dirty_sequences": sums["dirty_sequences"],
        "frac_bfloat16": sums["as_bfloat16"] / n,
        "frac_float16": sums["as_float16"] / n,
    }


def _temperature(sums: MismatchSums) -> tuple[float, float]:
    """Return t = 1 - 1/tau of the best fit delta = t x + t^2 k, and the share of delta^2 that the fit leaves.

    x = b + H, k = H + log sum p^2. The fit is the parabola for log sum_v p_v^s that is 0 with slope -H at s = 1 and
    log sum p^2 at s = 2. NaN without the entropies.
    """
    if not sums["has_entropies"] or not sums["delta_sq"]:
        return math.nan, math.nan
    terms = np.array([sums["delta_sq"], -2 * sums["dx"], sums["xx"] - 2 * sums["dk"], 2 * sums["xk"], sums["kk"]])
    residual = np.polynomial.Polynomial(terms)
    roots = residual.deriv().roots()
    real = roots[np.abs(roots.imag) < 1e-9].real
    best = min(real, key=lambda t: float(residual(t)), default=0.0)
    return float(best), float(residual(best)) / sums["delta_sq"]


def _is_group(sums: MismatchSums, clean: str, dirty: str) -> bool:
    """Return whether the mismatch of group `dirty` is clearly 10 times that of group `clean`, or `clean` has none."""
    return _ten_times(sums, clean, dirty) or _only_one_group(sums, clean, dirty)


def _only_one_group(sums: MismatchSums, clean: str, dirty: str) -> bool:
    """Return whether, beyond chance, no sequence of `clean` differs and some sequences of `dirty` do.

    If z of n sequences, chosen at random, do not differ, then all u sequences of the first group are among the z with
    probability C(z, u) / C(n, u).
    """
    u, others, equal, equal_others = (int(sums[name]) for name in (clean, dirty, f"{clean}_equal", f"{dirty}_equal"))
    if equal < u or equal_others == others:
        return False
    return math.comb(equal + equal_others, u) <= CHANCE * math.comb(u + others, u)


def _ten_times(sums: MismatchSums, clean: str, dirty: str) -> bool:
    """Return whether the mean |delta| of the sequences of `dirty` is clearly 10 times the mean of `clean`."""
    if min(sums[clean], sums[dirty]) < 2:
        return False
    groups = [(sums[name], sums[f"{name}_abs"], sums[f"{name}_abs_sq"]) for name in (clean, dirty)]
    (m0, v0), (m1, v1) = ((s / n, max(sq - s**2 / n, 0.0) / (n - 1) / n) for n, s, sq in groups)
    return m1 >= 10 * m0 and m1 - m0 > CLEAR * math.sqrt(v0 + v1)


def _named(sums: MismatchSums, evidence: dict[str, float], tier: str) -> Cause | None:
    """Return the cause whose prediction fits, None if no cause fits.

    Evidence is NaN if a column is missing; NaN never fits.
    """
    if tier in ("T0", "T1", "T2"):
        agree: Cause = "none" if tier == "T0" else "floating_point_noise"
        return "non_finite" if sums["nonfinite"] else agree
    # greedy sampling has log-probs of 0 too
    is_zero_a_fault = sums["has_mass"] > 0 or sums["zeros"] < sums["tokens"]
    by_token = sums["repeated"] >= ENOUGH_TOKENS and evidence["left_by_token"] <= LEFT_BY_TOKEN
    fits: tuple[tuple[Cause, bool], ...] = (
        ("retokenization", _is_group(sums, "same_ids", "other_ids")),
        ("other_prompt", _is_group(sums, "same_prompt", "other_prompt")),
        ("truncated_sampling", evidence["left_by_kept_mass"] <= LEFT),
        ("zero_filled", evidence["left_without_zeros"] <= LEFT and is_zero_a_fault),
        ("off_by_one", evidence["left_by_shift"] <= LEFT),
        # log-probs that agree well are nearly the same multiset too, so they must also be uncorrelated
        ("shuffled", evidence["left_by_sorting"] <= LEFT and evidence["pearson_logp"] < 0.5),
        ("temperature", evidence["left_by_temperature"] <= LEFT_BY_TEMPERATURE),
        ("padding_leak", _is_group(sums, "unpadded", "padded")),
        # two passes differ by sqrt(2) sigma, and delta is sigma plus a bias of sqrt(7) sigma at most
        ("dropout", 0.5 <= evidence["repeat_over_delta"] <= 2.0),
        ("stale_weights", _is_group(sums, "fresh", "behind")),
        # a float32 value is by chance a bfloat16 number with probability 2^-16, a float16 number with 2^-13
        ("reduced_precision", tier != "beyond T4" and max(evidence["frac_bfloat16"], evidence["frac_float16"]) >= 0.99),
        # steps may favour some tokens everywhere too
        ("token_bias", by_token and _is_fresh(sums)),
    )
    return next((cause for cause, is_good in fits if is_good), None)


def _is_fresh(sums: MismatchSums) -> bool:
    return bool(sums["has_steps"]) and not sums["behind"]


def _possible(sums: MismatchSums, evidence: dict[str, float], tier: str) -> tuple[Cause, ...]:
    """Return the causes that neither a column nor the pattern rules out, and those that a column reports everywhere."""
    if _at_last_tokens(sums, evidence):
        return ("forced_eos",)
    some = min(sums["clean_sequences"], sums["dirty_sequences"]) >= 2  # only some sequences differ
    can: tuple[tuple[Cause, bool], ...] = (
        ("zero_filled", bool(sums["zeros"]) and sums["zeros"] == sums["tokens"]),
        ("retokenization", sums["other_ids"] > 0 or (some and not sums["has_ids"])),
        ("other_prompt", sums["other_prompt"] > 0),
        ("padding_leak", (some and not sums["has_padding"]) or (sums["padded"] > 0 and not sums["unpadded"])),
        ("reduced_precision", not some and tier != "beyond T4"),
        ("stale_weights", not _is_fresh(sums)),
        ("token_bias", sums["repeated"] >= ENOUGH_TOKENS and evidence["left_by_token"] <= LEFT_BY_TOKEN),
        ("dropout", not some and not sums["has_again"]),
        # a line in b is no proof of a temperature: at temperature 1/2 it explained between 6 % and 47 %
        ("temperature", not some and not sums["has_entropies"]),
        ("truncated_sampling", not some and not sums["has_mass"]),
    )
    return tuple(cause for cause, is_possible in can if is_possible)


def _at_last_tokens(sums: MismatchSums, evidence: dict[str, float]) -> bool:
    """Return whether only last tokens of one id differ: an end token replaced the sampled token."""
    if not evidence["left_without_last"] <= LEFT or sums["last"] == sums["tokens"] or sums["largest_last_ids"] > 1:
        return False
    # the effective number of tokens with large squares; by chance, each is last with probability last / tokens
    spikes = sums["at_last"] ** 2 / sums["at_last_4"]
    return spikes * math.log(sums["last"] / sums["tokens"]) <= math.log(CHANCE)
