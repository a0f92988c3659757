"""What would each published remedy have done to the tokens of a run, or of another stack's dump?

Side a of a pair is the sampler, side b the trainer. The analysis ignores the run's own remedies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clipping.corrections import WEIGHTLESS, applied
from ppo_repro.analysis.mismatch.mismatch_metrics import NO_TOKEN
from ppo_repro.analysis.stats.clusters import Floats, effective_share, exact_sum, mean
from ppo_repro.base.errors import UserError
from ppo_repro.config.algorithm import ImportanceWeights, RatioRejection, Rejection, VetoRejection
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
# per response: tokens whose weight is bounded or 0; tokens whose weight is 0; sums of the weights, of their squares, of
# k3, and of k3 over the tokens whose weight is not 0
_SUMS = ("changed", "weightless", "weight", "weight_sq", "k3", "k3_kept")


def _sums(remedy: Remedy, delta: Floats, response: npt.NDArray[np.int64]) -> list[Floats]:
    """Return the sums _SUMS of one chunk, one number [R] per response."""
    weights, changes = applied(remedy.importance_weights, remedy.rejection, delta, response)
    changed, without = changes.astype(str) != "none", np.isin(changes.astype(str), WEIGHTLESS)
    divergence = k3(delta)
    with np.errstate(over="ignore"):
        columns = (changed, without, weights, weights * weights, divergence, np.where(without, 0.0, divergence))
    return [np.asarray(np.bincount(response, column), np.float64) for column in columns]


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
    lengths, sums = [], []
    for chunk in pairs:
        a, b = (chunk[name].to_numpy().astype(np.float64) for name in ("logprobs_a", "logprobs_b"))
        response = chunk.groupby(["iteration", "sequence"]).ngroup().to_numpy()
        complete = (np.bincount(response, ~(np.isfinite(a) & np.isfinite(b))) == 0)[response]
        codes = np.unique(response[complete], return_inverse=True)[1]
        lengths.append(np.bincount(codes))
        sums.append([_sums(remedy, (b - a)[complete], codes) for remedy in remedies])
    if not sums:
        raise UserError(NO_TOKEN)
    n = np.concatenate(lengths)
    return pd.DataFrame(
        [
            _row(remedy, n, dict(zip(_SUMS, (np.concatenate(c) for c in zip(*parts, strict=True)), strict=True)))
            for remedy, parts in zip(remedies, zip(*sums, strict=True), strict=True)
        ]
    )


def _row(remedy: Remedy, n: npt.NDArray[np.int64], of_response: Mapping[str, Floats]) -> dict[str, object]:
    total = {name: exact_sum(column) for name, column in of_response.items()}
    tokens, kept = int(n.sum()) or math.nan, int(n.sum()) - total["weightless"]
    return {
        "remedy": remedy.name,
        "bounds": remedy.bounds,
        "tokens_changed": total["changed"] / tokens,
        "tokens_weightless": total["weightless"] / tokens,
        "responses_changed": mean((of_response["changed"] > 0).astype(np.float64)).value,
        "responses_weightless": mean((of_response["weightless"] == n).astype(np.float64)).value,
        "weight_mean": total["weight"] / tokens,
        "ess_frac": effective_share(total["weight"], total["weight_sq"], tokens),
        "k3": total["k3"] / tokens,
        "k3_kept": total["k3_kept"] / kept if kept else math.nan,
    }
