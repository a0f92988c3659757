"""What would each published remedy have done to the tokens of a run, or of another stack's dump?

Side a of a pair is the sampler, side b the trainer. The analysis ignores the run's own remedies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clip_flags import Bool, ratios_of
from ppo_repro.base.errors import UserError
from ppo_repro.config.algorithm import ImportanceWeights, RatioRejection, Rejection, VetoRejection
from ppo_repro.records.logprob_pairs import NO_TOKEN
from ppo_repro.statistics.clusters import Floats, effective_share, exact_sum, mean
from ppo_repro.statistics.kl import k2, k3

WEIGHTLESS = ("masked_high", "masked_low", "rejected")  # the weight is 0


@dataclass(frozen=True)
class Remedy:
    """Name of a remedy in papers, and the configuration that applies it."""

    name: str
    importance_weights: ImportanceWeights | None = None
    rejection: tuple[Rejection, ...] = ()

    @property
    def bounds(self) -> str:
        """Return the level and the bounds of the ratio as text."""
        if self.importance_weights is not None:
            weights = self.importance_weights
            return f"{weights.level} [{weights.lowest:g}, {weights.highest:g}]"
        return ", ".join(
            f"{e.level} [{e.low:g}, {e.high:g}]" if isinstance(e, RatioRejection) else e.kind for e in self.rejection
        )


# with the bounds of their authors, or of the stacks that have them
PUBLISHED = (
    Remedy("none"),
    Remedy("decoupled PPO", ImportanceWeights(kind="truncated", cap=None)),
    Remedy("TIS", ImportanceWeights(kind="truncated")),
    Remedy("TIS by response", ImportanceWeights(kind="truncated", level="sequence")),
    Remedy("AReaL", ImportanceWeights(kind="masked", cap=5.0, floor=0.0)),
    Remedy("IcePop", ImportanceWeights(kind="masked", cap=5.0, floor=0.5)),
    Remedy("MIS", ImportanceWeights(kind="masked")),
    Remedy("MIS by response", ImportanceWeights(kind="masked", level="sequence")),
    Remedy("Geo-RS", None, (RatioRejection(kind="ratio", level="geometric", low=0.999, high=1.001),)),
    Remedy("veto", None, (VetoRejection(kind="veto"),)),
)


def ratios_at(delta: Floats, sequence: npt.NDArray[np.int64], level: str) -> Floats:
    """Return the ratio w of each token, float64, from delta = old - rollout log-prob.

    w = exp(delta) at the level `token`, exp(sum of delta over the response) at `sequence`, and exp(mean of delta over
    the response) at `geometric`. `sequence` has the response of each token.
    """
    if level == "token":
        return ratios_of(delta)
    codes = np.unique(sequence, return_inverse=True)[1]
    sums = np.asarray(np.bincount(codes, delta), dtype=np.float64)
    return ratios_of((sums / np.bincount(codes) if level == "geometric" else sums)[codes])


def weights_of(
    settings: ImportanceWeights, delta: Floats, sequence: npt.NDArray[np.int64]
) -> tuple[Floats, npt.NDArray[np.object_]]:
    """Return the importance weight of each token, float64 [N], and the change of its ratio (column `correction`).

    A ratio outside the bounds is truncated to the nearer bound, or masked: its weight is 0. With `normalize`, weights
    are divided by their mean over the tokens, or over the responses if the level is not `token`.
    """
    ratios, low, high = ratios_at(delta, sequence, settings.level), settings.lowest, settings.highest
    changes = np.full(len(ratios), "none", dtype=object)
    changes[ratios > high] = f"{settings.kind}_high"
    changes[ratios < low] = f"{settings.kind}_low"
    if settings.kind == "truncated":
        weights = np.clip(ratios, low, high)
    else:
        weights = np.where(changes == "none", ratios, 0.0)
    if settings.normalize:
        each = weights if settings.level == "token" else weights[np.unique(sequence, return_index=True)[1]]
        weights = weights / each.mean() if each.mean() > 0.0 else weights
    return weights, changes


def rejected(entry: Rejection, delta: Floats, sequence: npt.NDArray[np.int64]) -> Bool:
    """Return a bool per token: whether an entry of `ppo.rejection` rejects it. `ratios_at` describes the arguments."""
    codes = np.unique(sequence, return_inverse=True)[1]
    if entry.kind == "ratio":
        ratios = ratios_at(delta, sequence, entry.level)
        return (ratios < entry.low) | (ratios > entry.high)
    if entry.kind == "veto":
        return (np.bincount(codes, ratios_of(delta) < entry.below) > 0)[codes]
    if entry.kind != "divergence":
        assert_never(entry)
    values = k2(-delta) if entry.estimator == "k2" else k3(-delta)
    if entry.level == "token":
        return values > entry.above
    if entry.level == "max":
        largest = np.full(codes.max(initial=-1) + 1, -np.inf)
        np.maximum.at(largest, codes, values)
        return (largest > entry.above)[codes]
    sums = np.bincount(codes, values)
    return ((sums / np.bincount(codes) if entry.level == "mean" else sums) > entry.above)[codes]


def applied(
    importance_weights: ImportanceWeights | None,
    rejection: Sequence[Rejection],
    delta: Floats,
    sequence: npt.NDArray[np.int64],
) -> tuple[Floats, npt.NDArray[np.object_]]:
    """Apply importance weights, and then every entry of the rejection.

    Args:
        importance_weights: the section `ppo.importance_weights`; None leaves every weight 1.
        rejection: the entries of `ppo.rejection`.
        delta: [N] float64, old - rollout log-prob of each token, nats.
        sequence: [N] int64, the response of each token.

    Returns:
        The weight of each token, [N] float64, and the change of its ratio, [N] strings of the column `correction`.
    """
    weights, changes = np.ones(len(delta)), np.full(len(delta), "none", dtype=object)
    if importance_weights is not None:
        weights, changes = weights_of(importance_weights, delta, sequence)
    for entry in rejection:
        where = rejected(entry, delta, sequence)
        weights, changes = np.where(where, 0.0, weights), np.where(where, "rejected", changes)
    return weights, changes


def _sums(remedy: Remedy, delta: Floats, response: npt.NDArray[np.int64]) -> pd.DataFrame:
    """Return sums over the tokens of each response of a chunk, one row per response.

    Columns: tokens, changed (tokens whose weight is bounded or 0), weightless (tokens whose weight is 0), the sums of
    weight, weight_sq and k3, and k3_kept (k3 over the tokens whose weight is not 0).
    """
    weights, changes = applied(remedy.importance_weights, remedy.rejection, delta, response)
    is_weightless, divergence = np.isin(changes.astype(str), WEIGHTLESS), k3(-delta)
    with np.errstate(over="ignore"):
        of_tokens = {
            "tokens": np.ones(len(delta)),
            "changed": changes.astype(str) != "none",
            "weightless": is_weightless,
            "weight": weights,
            "weight_sq": weights * weights,
            "k3": divergence,
            "k3_kept": np.where(is_weightless, 0.0, divergence),
        }
    return pd.DataFrame({name: np.bincount(response, values) for name, values in of_tokens.items()})


def remedy_table(pairs: Iterable[pd.DataFrame], remedies: Sequence[Remedy] = PUBLISHED) -> pd.DataFrame:
    """Return one row per remedy, over all tokens. Raises UserError if there is no token.

    Responses with a token that is not finite are left out. The columns are remedy, bounds, and

        tokens_changed: share of tokens whose weight is bounded or 0
        tokens_weightless: share of tokens whose weight is 0
        responses_changed: share of responses with a changed token
        responses_weightless: share of responses in which every weight is 0
        weight_mean: mean weight w
        ess_frac: effective sample size per token, (sum w)^2 / (n sum w^2)
        k3: KL(a || b), nats, token mean
        k3_kept: k3 over tokens whose weight is not 0
    """
    sums: list[list[pd.DataFrame]] = []  # by chunk and remedy
    for chunk in (pair for pair in pairs if len(pair)):  # a mask may have removed all tokens of an iteration
        a, b = (chunk[name].to_numpy().astype(np.float64) for name in ("logprobs_a", "logprobs_b"))
        response = chunk.groupby(["iteration", "sequence"]).ngroup().to_numpy()
        complete = (np.bincount(response, ~(np.isfinite(a) & np.isfinite(b))) == 0)[response]
        codes = np.unique(response[complete], return_inverse=True)[1]
        sums.append([_sums(remedy, (b - a)[complete], codes) for remedy in remedies])
    if not sums:
        raise UserError(NO_TOKEN)
    by_remedy = zip(remedies, zip(*sums, strict=True), strict=True)
    return pd.DataFrame([_row(remedy, pd.concat(parts)) for remedy, parts in by_remedy])


def _row(remedy: Remedy, responses: pd.DataFrame) -> dict[str, object]:
    total = {str(name): exact_sum(responses[name].to_numpy(np.float64)) for name in responses}
    tokens, kept = total["tokens"] or math.nan, total["tokens"] - total["weightless"]
    changed, weightless, length = (responses[name].to_numpy(np.float64) for name in ("changed", "weightless", "tokens"))
    return {
        "remedy": remedy.name,
        "bounds": remedy.bounds,
        "tokens_changed": total["changed"] / tokens,
        "tokens_weightless": total["weightless"] / tokens,
        "responses_changed": mean((changed > 0).astype(np.float64)).value,
        "responses_weightless": mean((weightless == length).astype(np.float64)).value,
        "weight_mean": total["weight"] / tokens,
        "ess_frac": effective_share(total["weight"], total["weight_sq"], tokens),
        "k3": total["k3"] / tokens,
        "k3_kept": total["k3_kept"] / kept if kept else math.nan,
    }
