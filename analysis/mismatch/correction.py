"""What would truncated or masked importance sampling do to these ratios: how much is cut, how often?

TIS multiplies a token's loss by min(w, high); MIS masks where w is outside [low, high]; rejection drops whole
responses. w is rho per token, the product over the response, or its geometric mean. Bounds are on w itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.mismatch.sequence import mismatch_sequence
from analysis.mismatch.token import sequence_starts
from analysis.stats import exact_sums
from analysis.stats.exact_sums import ClusterSums, Estimate, Floats
from ppo_repro.errors import UserError

LEVELS = ("token", "sequence", "geometric")
CORRECTION_COLUMNS = ["level", "low", "high", "veto", "metric", "reduction", "value", "se", "tokens", "sequences"]


@dataclass(frozen=True)
class Correction:
    """Bounds 0 <= low <= 1 <= high on w at a level; a response with any rho below `veto` is dropped whole."""

    level: str
    low: float
    high: float
    veto: float = 1e-4

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UserError(f"level = {self.level!r}: must be one of {', '.join(LEVELS)}")
        if not 0.0 <= self.low <= 1.0 <= self.high:
            raise UserError(f"low = {self.low}, high = {self.high}: must be 0 <= low <= 1 <= high")
        if not 0.0 <= self.veto <= 1.0:
            raise UserError(f"veto = {self.veto}: must lie between 0 and 1")


# the bounds of verl's documentation per token and per response, and of Geo-RS for the geometric mean
USUAL = (
    Correction("token", 0.5, 2.0),
    Correction("token", 0.2, 5.0),
    Correction("sequence", 0.5, 2.0),
    Correction("sequence", 0.1, 10.0),
    Correction("geometric", 0.999, 1.001),
)


@dataclass(frozen=True)
class CorrectionSums:
    """Sums with three units: one importance weight (of a token or a response), one token, one response."""

    by_weight: ClusterSums
    by_token: ClusterSums
    by_sequence: ClusterSums


def correction_sums(tokens: pd.DataFrame, corrections: Sequence[Correction]) -> dict[Correction, CorrectionSums]:
    """The sums of `mismatch_token` rows of whole sequences; sequences with a token that is not finite do not count."""
    starts = sequence_starts(tokens)
    lengths = np.diff(np.append(starts, len(tokens)))
    finite = tokens["finite"].to_numpy()
    if not finite.all():
        complete = np.logical_and.reduceat(finite, starts)
        tokens = tokens[np.repeat(complete, lengths)].reset_index(drop=True)
    table = mismatch_sequence(tokens)
    starts = sequence_starts(tokens)
    with np.errstate(over="ignore"):
        products = np.exp(table["log_rho_seq"].to_numpy())
    weights = {"token": tokens["rho"].to_numpy(), "sequence": products, "geometric": table["rho_geo"].to_numpy()}
    counts = table["tokens"].to_numpy().astype(np.int64)
    smallest = np.minimum.reduceat(weights["token"], starts) if len(starts) else np.zeros(0)
    return {
        correction: _sums(correction, weights[correction.level], counts, starts, smallest) for correction in corrections
    }


def _sums(
    correction: Correction, w: Floats, counts: exact_sums.Ints, starts: np.ndarray, smallest: Floats
) -> CorrectionSums:
    def per_sequence(values: Floats) -> Floats:
        return np.add.reduceat(values, starts) if correction.level == "token" and len(starts) else values

    above, below = (
        per_sequence((w > correction.high).astype(np.float64)),
        per_sequence((w < correction.low).astype(np.float64)),
    )
    ones = np.ones(len(counts), np.int64)
    by_weight = {
        "tis_trunc_frac_high": above,
        "tis_trunc_frac_low": below,
        "tis_weight_mean_before": per_sequence(w),
        "tis_weight_mean_after": per_sequence(np.minimum(w, correction.high)),
    }
    outside = above + below
    masked = outside if correction.level == "token" else outside * counts
    by_sequence = {
        "seq_mask_frac": (outside > 0).astype(np.float64),
        "veto_frac": (smallest < correction.veto).astype(float),
    }
    return CorrectionSums(
        exact_sums.cluster_sums(by_weight, counts if correction.level == "token" else ones),
        exact_sums.cluster_sums({"mask_frac": masked}, counts),
        exact_sums.cluster_sums(by_sequence, ones),
    )


def merge_corrections(
    a: Mapping[Correction, CorrectionSums], b: Mapping[Correction, CorrectionSums]
) -> dict[Correction, CorrectionSums]:
    """The sums over the sequences of both."""
    return {
        correction: CorrectionSums(
            exact_sums.merge_clusters(sums.by_weight, b[correction].by_weight),
            exact_sums.merge_clusters(sums.by_token, b[correction].by_token),
            exact_sums.merge_clusters(sums.by_sequence, b[correction].by_sequence),
        )
        for correction, sums in a.items()
    }


def correction_table(sums: Mapping[Correction, CorrectionSums]) -> pd.DataFrame:
    """Long: level, low, high, veto, metric, reduction, value, se, tokens, sequences.

    tis_trunc_frac_high, _low: share of weights w > high, w < low; tis_weight_mean_before, _after: mean of w and of
    min(w, high) (weights are tokens at level token, else responses); mask_frac: share of tokens under a mask outside
    [low, high]; seq_mask_frac: share of responses with a masked token; veto_frac: share with any rho < veto.
    """
    rows = []
    for correction, totals in sums.items():
        by_weight = "token_mean" if correction.level == "token" else "seq_mean"
        estimates = [(name, by_weight, exact_sums.item_mean(totals.by_weight, name)) for name in totals.by_weight.sums]
        estimates.append(("mask_frac", "token_mean", exact_sums.item_mean(totals.by_token, "mask_frac")))
        for name in totals.by_sequence.sums:
            estimates.append((name, "seq_mean", exact_sums.item_mean(totals.by_sequence, name)))
        rows += [
            _row(correction, name, reduction, estimate, totals.by_token) for name, reduction, estimate in estimates
        ]
    return pd.DataFrame(rows, columns=CORRECTION_COLUMNS)


def _row(
    correction: Correction, name: str, reduction: str, estimate: Estimate, by_token: ClusterSums
) -> tuple[object, ...]:
    sizes = (by_token.items, by_token.clusters)
    return (
        correction.level,
        correction.low,
        correction.high,
        correction.veto,
        name,
        reduction,
        estimate.value,
        estimate.se,
        *sizes,
    )
