"""Why do sampler and trainer disagree? From the pattern of `delta = logprobs_b - logprobs_a` to a named cause.

Most causes predict `delta`; a cause is named if its prediction leaves at most 1 % of the sum of delta^2. Causes without
a prediction (precision, stale weights, dropout) are told apart by optional columns; without those, all are named, and
`unknown` with them.

It was checked on faults made in this project's own tiny models only, never on a dump of another training stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.diagnosis.causes import ADVICE, INPUTS, Cause
from analysis.diagnosis.evidence import Sums, added, measure
from ppo_repro.errors import UserError


@dataclass(frozen=True)
class Tier:
    """Limits in nats, all of which must hold. They were measured on tiny models on CPUs; calibrate yours for others."""

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
# a difference counts from this many standard errors (clustered by sequence): chance 6e-5 under a normal law
CLEAR = 4.0
# a pattern counts as no accident below this probability
CHANCE = 1e-3
# growth of |delta| per unit of uncertainty: it is nearly constant for noise and dropout, and grows after each sync for
# stale weights; noise alone grew 2.9 times in a run of 70 iterations, while its policy became more certain
GROWTH = 10.0
# what a slope for each token id leaves of what one slope leaves, where so many tokens have others of their id: an error
# of each token 0.13 on average and 0.38 at most, of the other causes without a prediction only old weights below 0.9
LEFT_BY_TOKEN = 0.5
ENOUGH_TOKENS = 50


@dataclass(frozen=True)
class Diagnosis:
    """`verdict` is one cause, or all that fit joined by ' or '; `needed` then says which columns would decide."""

    verdict: str
    causes: tuple[Cause, ...]
    tier: str  # T0 (bitwise) to T4, or `beyond T4`
    advice: str
    needed: str
    evidence: dict[str, float]


def diagnose(pairs: pd.DataFrame) -> Diagnosis:
    """The cause of the mismatch in `pairs`, one row per token.

    Columns iteration, sequence, position, token_id, logprobs_a (sampler), logprobs_b (trainer), float32, nats.
    Optional: entropies and prob_sq_sums (trainer), log_kept_mass (sampler), logprobs_b_again (NaN where there is no
    second pass), token_id_b (-1 where the trainer has no such token), pad_length, steps_since_sync, prompt_differs
    (not 0 where the two sides have other tokens before the response). Raises UserError on a missing column, a token
    that occurs twice, or no finite pair of log-probs.
    """
    return diagnose_chunks([pairs])


def diagnose_chunks(chunks: Iterable[pd.DataFrame]) -> Diagnosis:
    """`diagnose` over chunks of whole sequences, one in memory at a time; UserError likewise."""
    sums = [measure(frame) for chunk in chunks for _, frame in chunk.groupby("iteration", sort=True)]
    if not sum(frame["tokens"] for frame in sums):
        raise UserError("pairs have no token with two finite log-probs; there is nothing to compare")
    m = added(sums)
    evidence = _evidence(m, sums)
    tier = _tier(m)
    causes = _causes(m, evidence, tier)
    needed = "; ".join(INPUTS[cause] for cause in causes if cause in INPUTS) if len(causes) > 1 else ""
    advice = " / ".join(ADVICE[cause] for cause in causes)
    return Diagnosis(" or ".join(causes), causes, tier, advice, needed, evidence)


def _ratio(left: float, whole: float) -> float:
    return left / whole if whole > 0 else math.nan


def _tier(m: Sums) -> str:
    if not m["unequal"]:
        return "T0"
    if m["largest_ulp"] <= 4 and m["largest_delta"] <= TIERS[0].max_abs:
        return "T1"
    mean_abs, k3 = m["delta_abs"] / m["tokens"], m["k3"] / m["tokens"]
    for tier in TIERS:
        if mean_abs <= tier.mean_abs and m["largest_delta"] <= tier.max_abs and k3 <= tier.k3:
            return tier.name
    return f"beyond {TIERS[-1].name}"


def _evidence(m: Sums, by_iteration: list[Sums]) -> dict[str, float]:
    n, growth = m["tokens"], _growth(by_iteration)
    mean = m["delta"] / n
    clusters = m["sequences"] / (m["sequences"] - 1) if m["sequences"] > 1 else math.nan
    variance = (m["ss"] - 2 * mean * m["sn"] + mean**2 * m["nn"]) / n**2 * clusters
    covariance = m["ab"] - m["a"] * m["b"] / n
    spread = (m["a_sq"] - m["a"] ** 2 / n) * (m["b_sq"] - m["b"] ** 2 / n)
    slope, left_by_temperature = _temperature(m)
    of_b = m["b_sq"] - m["b"] ** 2 / n
    shift = min(_ratio(m["next_sq"], m["neighbours"]), _ratio(m["previous_sq"], m["neighbours"]))
    return {
        "tokens": n,
        "nonfinite": m["nonfinite"],
        "frac_bitwise_equal": 1 - m["unequal"] / n,
        "mean_abs": m["delta_abs"] / n,
        "max_abs": m["largest_delta"],
        "k1": -mean,
        "k1_se": math.sqrt(max(variance, 0.0)),
        "k3": m["k3"] / n,
        "pearson_logp": covariance / math.sqrt(spread) if spread > 0 else math.nan,
        "temperature_ratio": 1 / (1 - slope) if slope < 1 else math.nan,
        "left_by_temperature": left_by_temperature,
        "delta_logp_slope": 1 - _ratio(covariance, of_b),
        "left_by_kept_mass": _ratio(m["mass_sq"], m["delta_sq"]) if m["has_mass"] else math.nan,
        "left_without_zeros": _ratio(m["delta_sq"] - m["at_zeros"], m["delta_sq"]),
        "left_without_last": _ratio(m["delta_sq"] - m["at_last"], m["delta_sq"]),
        "left_by_shift": _ratio(shift, m["delta_sq"] / n),
        "left_by_sorting": _ratio(m["sorted_sq"], m["delta_sq"]),
        "left_by_token": _ratio(m["by_token_sq"], m["by_one_slope_sq"]),
        "repeat_over_delta": math.sqrt(_ratio(m["again_sq"], m["again_delta_sq"])) if m["has_again"] else math.nan,
        "growth": growth[0],
        "growth_z": growth[1],
        "clean_sequences": m["clean_sequences"],
        "dirty_sequences": m["dirty_sequences"],
        "frac_bfloat16": m["as_bfloat16"] / n,
        "frac_float16": m["as_float16"] / n,
    }


def _temperature(m: Sums) -> tuple[float, float]:
    """(t = 1 - 1/tau, share of delta^2 left) of the best fit delta = t x + t^2 k.

    x = b + H, k = H + log sum p^2. It is the parabola for log sum_v p_v^s that is 0 with slope -H at s = 1 and
    log sum p^2 at s = 2. NaN without the entropies.
    """
    if not m["has_entropies"] or not m["delta_sq"]:
        return math.nan, math.nan
    terms = np.array([m["delta_sq"], -2 * m["dx"], m["xx"] - 2 * m["dk"], 2 * m["xk"], m["kk"]])
    residual = np.polynomial.Polynomial(terms)
    roots = residual.deriv().roots()
    real = roots[np.abs(roots.imag) < 1e-9].real
    best = min(real, key=lambda t: float(residual(t)), default=0.0)
    return float(best), float(residual(best)) / m["delta_sq"]


def _growth(by_iteration: list[Sums]) -> tuple[float, float]:
    """(ratio, difference in standard errors) of the highest and lowest level of |delta| among iterations.

    The level is sum |delta| / sum (1 - p), because an error in the logits reaches a log-prob with weight 1 - p.
    """
    levels = []
    for m in by_iteration:
        if m["uncertainty"] > 0 and m["sequences"] > 1:
            level = m["delta_abs"] / m["uncertainty"]
            square = m["abs_abs"] - 2 * level * m["abs_u"] + level**2 * m["u_u"]
            levels.append((level, max(square, 0.0) / m["uncertainty"] ** 2 * m["sequences"] / (m["sequences"] - 1)))
    if len(levels) < 2:
        return math.nan, math.nan
    (low, low_var), (high, high_var) = min(levels), max(levels)
    error = math.sqrt(low_var + high_var)
    if high == 0.0:
        return math.nan, math.nan
    return (high / low if low else math.inf), ((high - low) / error if error else math.inf)


def _is_group(m: Sums, clean: str, dirty: str) -> bool:
    """Whether the mismatch is in one group of sequences: clearly 10 times as large there, or only there."""
    return _ten_times(m, clean, dirty) or _only_one_group(m, clean, dirty)


def _only_one_group(m: Sums, clean: str, dirty: str) -> bool:
    """Whether no sequence of one group differs, some of the other do, and that is no accident.

    If any of the n sequences might be one of the z that do not differ, all u of the first group are so with probability
    C(z, u) / C(n, u).
    """
    u, others, equal, equal_others = (int(m[name]) for name in (clean, dirty, f"{clean}_equal", f"{dirty}_equal"))
    if equal < u or equal_others == others:
        return False
    return math.comb(equal + equal_others, u) <= CHANCE * math.comb(u + others, u)


def _ten_times(m: Sums, clean: str, dirty: str) -> bool:
    """Whether the mean |delta| of the sequences of one group is clearly 10 times that of the other."""
    if min(m[clean], m[dirty]) < 2:
        return False
    groups = [(m[name], m[f"{name}_abs"], m[f"{name}_abs_sq"]) for name in (clean, dirty)]
    (m0, v0), (m1, v1) = ((s / n, max(sq - s**2 / n, 0.0) / (n - 1) / n) for n, s, sq in groups)
    return m1 >= 10 * m0 and m1 - m0 > CLEAR * math.sqrt(v0 + v1)


def _causes(m: Sums, e: dict[str, float], tier: str) -> tuple[Cause, ...]:
    if m["other_ids"]:
        return ("retokenization",)  # the log-probs are of different tokens and say nothing more
    if m["other_prompts"] and tier not in ("T0", "T1", "T2"):
        return ("other_prompt",)
    if m["nonfinite"] and tier in ("T0", "T1", "T2"):
        return ("non_finite",)
    if tier == "T0":
        return ("none",)
    if tier in ("T1", "T2"):
        return ("floating_point_noise",)
    return _structured(m, e) or _unstructured(m, e, tier)


def _structured(m: Sums, e: dict[str, float]) -> tuple[Cause, ...]:
    """The causes whose prediction of delta fits; a NaN, from a missing column, fits nothing."""
    if e["left_by_kept_mass"] <= LEFT:
        return ("truncated_sampling",)
    if e["left_without_zeros"] <= LEFT:
        if m["zeros"] and m["zeros"] == m["tokens"] and not m["has_mass"]:
            return ("zero_filled", "truncated_sampling")
        # an engine may write 0 as the log-prob of an end token that it inserted
        return ("forced_eos",) if _at_last_tokens(m, e) else ("zero_filled",)
    if _at_last_tokens(m, e):
        return ("forced_eos",)
    if e["left_by_shift"] <= LEFT:
        return ("off_by_one",)
    # the same multiset of values; log-probs that agree well are nearly that too, so they must also be uncorrelated
    if e["left_by_sorting"] <= LEFT and e["pearson_logp"] < 0.5:
        return ("shuffled",)
    if e["left_by_temperature"] <= LEFT_BY_TEMPERATURE:
        return ("temperature",)
    if m["has_padding"] and _is_group(m, "unpadded", "padded"):
        return ("padding_leak",)
    return ()


def _at_last_tokens(m: Sums, e: dict[str, float]) -> bool:
    if not e["left_without_last"] <= LEFT or m["last"] == m["tokens"]:
        return False
    if m["largest_last_ids"] > 1:
        return False  # an end token is one id
    # the effective number of tokens that hold the squares; by chance each is last with probability last / tokens
    spikes = m["at_last"] ** 2 / m["at_last_4"]
    return spikes * math.log(m["last"] / m["tokens"]) <= math.log(CHANCE)


def _unstructured(m: Sums, e: dict[str, float], tier: str) -> tuple[Cause, ...]:
    if m["has_again"] and e["repeat_over_delta"] >= 0.5:
        # two passes differ by sqrt(2) sigma, and delta is sigma plus a bias: 1/2 allows a bias of sqrt(7) sigma
        return ("dropout",)
    if m["has_steps"] and _is_group(m, "fresh", "behind"):
        return ("stale_weights",)
    can_be_stale = not (m["has_steps"] and not m["behind"])
    if min(m["clean_sequences"], m["dirty_sequences"]) >= 2:
        ruled_out = {
            "padding_leak": m["has_padding"],
            "retokenization": m["has_ids"],
            "stale_weights": not can_be_stale,
        }
        candidates: tuple[Cause, ...] = ("padding_leak", "retokenization", "stale_weights")
        return (*(cause for cause in candidates if not ruled_out[cause]), "unknown")
    coarse = tier != "beyond T4"
    # a float32 value is by chance a bfloat16 number with probability 2^-16, a float16 number with 2^-13
    if coarse and max(e["frac_bfloat16"], e["frac_float16"]) >= 0.99:
        return ("reduced_precision",)
    if can_be_stale and e["growth"] >= GROWTH and e["growth_z"] >= CLEAR:
        return ("stale_weights",)
    if m["repeated"] >= ENOUGH_TOKENS and e["left_by_token"] <= LEFT_BY_TOKEN:
        # steps may favour some tokens everywhere too
        return ("token_bias", "stale_weights") if can_be_stale else ("token_bias",)
    causes: tuple[Cause, ...] = (
        *(("reduced_precision",) if coarse else ()),
        *(("stale_weights",) if can_be_stale else ()),
        *(() if m["has_again"] else ("dropout",)),
        # a line in b does not show a temperature: at 1/2 it explained between 6 % and 47 %
        *(() if m["has_entropies"] else ("temperature",)),
        *(() if m["has_mass"] else ("truncated_sampling",)),
    )
    # nothing was predicted: one cause is left only if the others are ruled out, and each has no size of its own
    return causes if causes == ("reduced_precision",) else (*causes, "unknown")
