"""What would each published remedy have done to the tokens of a run, or of another stack's dump?

Side a of a pair is the sampler, side b the trainer. The analysis ignores the run's own remedies, and calls the
trainer's `corrections_of`, so a remedy here is what training would do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.config.algorithm import ImportanceWeights, RatioRejection, Rejection, VetoRejection
from ppo_repro.ppo.corrections import Correction, Corrections, removes_loss
from ppo_repro.records.logprob_pairs import NO_TOKEN
from ppo_repro.stages.training_batch import corrections_of
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
    weights, is_weightless = corrected.weights.numpy().astype(np.float64), removes_loss(corrected.changes).numpy()
    divergence = k3(sampled.astype(np.float64) - old.astype(np.float64))
    of_tokens = {
        "tokens": np.ones(len(response)),
        "changed": (corrected.changes != Correction.NONE).numpy(),
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
        weight_mean: mean weight w, whose logarithm the trainer bounds to [-87, 88]
        ess_frac: effective sample size per token, (sum w)^2 / (n sum w^2)
        k3: KL(a || b), nats, token mean
        k3_kept: k3 over tokens whose weight is not 0
    """
    sums: list[list[pd.DataFrame]] = []  # by chunk and remedy
    for chunk in (pair for pair in pairs if len(pair)):  # a mask may have removed all tokens of an iteration
        a, b = (chunk[name].to_numpy(np.float32) for name in ("logprobs_a", "logprobs_b"))
        response = chunk.groupby(["iteration", "sequence"]).ngroup().to_numpy()
        complete = (np.bincount(response, ~(np.isfinite(a) & np.isfinite(b))) == 0)[response]
        codes = np.unique(response[complete], return_inverse=True)[1]
        sums.append([_sums(remedy, a[complete], b[complete], codes) for remedy in remedies])
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
