"""What would each published remedy have done to these tokens, whatever the run did?

Works on any pairs of log-probs: those of a recorded run, or of another stack's dump. a sampled, b is the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.clipping.corrections import WEIGHTLESS, applied, bounds_of
from analysis.mismatch.token import mismatch_token, sequence_starts
from analysis.stats import exact_sums
from analysis.stats.exact_sums import ExactSum, Floats
from ppo_repro.config.objectives import ImportanceWeights, RatioRejection, Rejection, VetoRejection
from ppo_repro.errors import UserError


@dataclass(frozen=True)
class Remedy:
    """A remedy as papers call it, and the configuration that has it."""

    name: str
    importance_weights: ImportanceWeights | None = None
    rejection: tuple[Rejection, ...] = ()

    @property
    def bounds(self) -> str:
        """Level and bounds, in words."""
        if self.importance_weights is not None:
            low, high = bounds_of(self.importance_weights)
            return f"{self.importance_weights.level} [{low:g}, {high:g}]"
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
COUNTS = ("tokens", "responses", "changed", "weightless", "responses_changed", "responses_weightless")
SUMS = ("weight", "weight_sq", "k3", "k3_kept")


@dataclass(frozen=True)
class RemedySums:
    """Counts and exact sums over tokens, by remedy; those of two chunks can be added."""

    counts: tuple[int, ...]  # COUNTS
    sums: tuple[ExactSum, ...]  # SUMS

    def __add__(self, other: RemedySums) -> RemedySums:
        return RemedySums(
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            tuple(exact_sums.add(a, b) for a, b in zip(self.sums, other.sums, strict=True)),
        )


def remedy_sums(pairs: pd.DataFrame, remedies: Sequence[Remedy]) -> list[RemedySums]:
    """Of one chunk of whole responses, for each remedy; responses with a token that is not finite do not count."""
    tokens = mismatch_token(pairs)
    starts = sequence_starts(tokens)
    lengths = np.diff(np.append(starts, len(tokens)))
    if not tokens["finite"].all():
        complete = np.logical_and.reduceat(tokens["finite"].to_numpy(), starts)
        tokens = tokens[np.repeat(complete, lengths)].reset_index(drop=True)
        lengths = lengths[complete]
    response = np.repeat(np.arange(len(lengths)), lengths)
    delta, k3 = tokens["delta"].to_numpy(), tokens["k3"].to_numpy()
    return [_sums(remedy, delta, k3, response, len(lengths)) for remedy in remedies]


def _sums(remedy: Remedy, delta: Floats, k3: Floats, response: npt.NDArray[np.int64], responses: int) -> RemedySums:
    weights, changes = applied(remedy.importance_weights, remedy.rejection, delta, response)
    changed, without = changes.astype(str) != "none", np.isin(changes.astype(str), WEIGHTLESS)
    of_response = np.bincount(response, minlength=responses)
    has_change = np.bincount(response, changed, minlength=responses) > 0
    lost = np.bincount(response, without, minlength=responses) == of_response
    counts = (len(delta), responses, changed.sum(), without.sum(), has_change.sum(), lost.sum())
    with np.errstate(over="ignore"):
        stacked = np.array([weights, weights * weights, k3, np.where(without, 0.0, k3)])
    return RemedySums(tuple(int(count) for count in counts), exact_sums.exact_sums(stacked.reshape(len(SUMS), -1)))


def remedy_table(pairs: Iterable[pd.DataFrame], remedies: Sequence[Remedy] = PUBLISHED) -> pd.DataFrame:
    """One row per remedy, over all tokens; raises UserError where there is no token.

    remedy, bounds; tokens_changed, tokens_weightless, responses_changed, responses_weightless: shares whose weight is
    bounded or 0, and whose weight is 0 (of a response: of one of its tokens, of all of them); weight_mean; ess_frac =
    (sum w)^2 / (n sum w^2), the effective sample size of the weights; k3: KL(a || b), nats, token mean; k3_kept: the
    same over tokens whose weight is not 0.
    """
    total: list[RemedySums] | None = None
    for chunk in pairs:
        if len(chunk):
            found = remedy_sums(chunk, remedies)
            total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
    if total is None:
        raise UserError("there is no token to compare; give a run or a file with responses")
    return pd.DataFrame([_row(remedy, sums) for remedy, sums in zip(remedies, total, strict=True)])


def _row(remedy: Remedy, sums: RemedySums) -> dict[str, object]:
    count = dict(zip(COUNTS, sums.counts, strict=True))
    total = {name: exact_sums.value(s) for name, s in zip(SUMS, sums.sums, strict=True)}
    tokens, responses = count["tokens"] or math.nan, count["responses"] or math.nan
    kept = count["tokens"] - count["weightless"]
    finite = math.isfinite(total["weight_sq"]) and total["weight_sq"] > 0.0
    return {
        "remedy": remedy.name,
        "bounds": remedy.bounds,
        "tokens_changed": count["changed"] / tokens,
        "tokens_weightless": count["weightless"] / tokens,
        "responses_changed": count["responses_changed"] / responses,
        "responses_weightless": count["responses_weightless"] / responses,
        "weight_mean": total["weight"] / tokens,
        "ess_frac": total["weight"] ** 2 / (tokens * total["weight_sq"]) if finite else math.nan,
        "k3": total["k3"] / tokens,
        "k3_kept": total["k3_kept"] / kept if kept else math.nan,
    }
