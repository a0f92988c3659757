"""What would each published remedy have done to the tokens of a run, or of another stack's dump?

Side a of a pair is the sampler, side b the trainer. The analysis ignores the run's own remedies, and calls the
trainer's `corrections_of`, so a remedy here is what training would do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.config.algorithm import ImportanceWeights, RatioRejection, Rejection, VetoRejection
from ppo_repro.ppo.corrections import Correction, Corrections, removes_loss
from ppo_repro.records.logprob_pairs import NO_TOKEN
from ppo_repro.stages.corrections import corrections_of
from ppo_repro.statistics.bits import Float32
from ppo_repro.statistics.clusters import effective_share, exact_sum, mean
from ppo_repro.statistics.kl import k3


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
            f"{rule.level} [{rule.low:g}, {rule.high:g}]" if isinstance(rule, RatioRejection) else rule.kind
            for rule in self.rejection
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


def _corrections(remedy: Remedy, old: Tensor, sampled: Tensor, lengths: Tensor) -> Corrections:
    """Return weights and changes of a remedy; without tokens or settings, weights of 1 and no change."""
    corrected = None
    if len(old):
        corrected = corrections_of(remedy.importance_weights, remedy.rejection, old, sampled, lengths)
    return corrected or Corrections(torch.ones_like(old), torch.full(old.shape, Correction.NONE, dtype=torch.uint8))


def _sums(remedy: Remedy, sampled: Float32, old: Float32, response: npt.NDArray[np.int64]) -> pd.DataFrame:
    """Return sums over the tokens of each response of a chunk, one row per response.

    Columns: tokens, changed (tokens whose weight is bounded or 0), weightless (tokens whose weight is 0), the sums of
    weight, weight_sq and k3, and k3_kept (k3 over the tokens whose weight is not 0).
    """
    lengths = torch.from_numpy(np.bincount(response))
    corrected = _corrections(remedy, torch.from_numpy(old), torch.from_numpy(sampled), lengths)
    weights = corrected.weights.numpy().astype(np.float64)
    is_weightless = removes_loss(corrected.changes).numpy()
    divergence = k3(sampled.astype(np.float64) - old.astype(np.float64))
    columns = {
        "tokens": np.ones(len(response)),
        "changed": (corrected.changes != Correction.NONE).numpy(),
        "weightless": is_weightless,
        "weight": weights,
        "weight_sq": weights * weights,
        "k3": divergence,
        "k3_kept": np.where(is_weightless, 0.0, divergence),
    }
    return pd.DataFrame({name: np.bincount(response, values) for name, values in columns.items()})


class RemedyEffect(NamedTuple):
    """What a remedy would have done to all tokens: a row of `remedy_table`."""

    remedy: str
    bounds: str
    tokens_changed: float  # share of tokens whose weight is bounded or 0
    tokens_weightless: float  # share of tokens whose weight is 0
    responses_changed: float  # share of responses with a changed token
    responses_weightless: float  # share of responses in which every weight is 0
    weight_mean: float  # mean weight w, whose logarithm the trainer bounds to [-87, 88]
    ess_frac: float  # effective sample size per token, (sum w)^2 / (n sum w^2)
    k3: float  # KL(a || b), nats, token mean
    k3_kept: float  # k3 over tokens whose weight is not 0


def remedy_table(pairs: Iterable[pd.DataFrame], remedies: Sequence[Remedy] = PUBLISHED) -> pd.DataFrame:
    """Return a `RemedyEffect` per remedy. Responses with a token that is not finite are left out.

    Raises UserError if there is no token.
    """
    sums: list[list[pd.DataFrame]] = []  # by chunk and remedy
    for chunk in pairs:
        if not len(chunk):  # a mask may have removed all tokens of an iteration
            continue
        a, b = (chunk[name].to_numpy(np.float32) for name in ("logprobs_a", "logprobs_b"))
        response = chunk.groupby(["iteration", "sequence"]).ngroup().to_numpy()
        complete = (np.bincount(response, ~(np.isfinite(a) & np.isfinite(b))) == 0)[response]
        codes = np.unique(response[complete], return_inverse=True)[1]
        sums.append([_sums(remedy, a[complete], b[complete], codes) for remedy in remedies])
    if not sums:
        raise UserError(NO_TOKEN)
    by_remedy = zip(remedies, zip(*sums, strict=True), strict=True)
    return pd.DataFrame([_effect(remedy, pd.concat(parts)) for remedy, parts in by_remedy])


def _effect(remedy: Remedy, responses: pd.DataFrame) -> RemedyEffect:
    total = {str(name): exact_sum(responses[name].to_numpy(np.float64)) for name in responses}
    tokens = total["tokens"] or math.nan
    kept = total["tokens"] - total["weightless"]
    changed, weightless, length = (responses[name].to_numpy(np.float64) for name in ("changed", "weightless", "tokens"))
    return RemedyEffect(
        remedy=remedy.name,
        bounds=remedy.bounds,
        tokens_changed=total["changed"] / tokens,
        tokens_weightless=total["weightless"] / tokens,
        responses_changed=mean((changed > 0).astype(np.float64)).value,
        responses_weightless=mean((weightless == length).astype(np.float64)).value,
        weight_mean=total["weight"] / tokens,
        ess_frac=effective_share(total["weight"], total["weight_sq"], tokens),
        k3=total["k3"] / tokens,
        k3_kept=total["k3_kept"] / kept if kept else math.nan,
    )
