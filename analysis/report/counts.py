"""Histograms and sums for the figures, one iteration at a time, with fixed edges, so that results can be added.

Everything is float64 from the recorded columns. Values that are not finite are counted separately, in no histogram.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

PROBABILITY_EDGES: Floats = 10.0 ** np.linspace(-6.0, 0.0, 37)
LOG_RATIO_EDGES: Floats = np.linspace(-2.0, 2.0, 161)
ADVANTAGE_EDGES: Floats = np.linspace(-4.0, 4.0, 41)
RATIO_EDGES: Floats = 2.0 ** np.linspace(-2.0, 2.0, 49)
_POSITIVE = 10.0 ** np.linspace(-9.0, 1.0, 31)
# from -10 to 10 nats, finer towards 0; the middle bin is |delta| < 1e-9
DELTA_EDGES: Floats = np.concatenate([-_POSITIVE[::-1], _POSITIVE])
FLAGS = (
    *("clip_high", "clip_low", "clip_dual", "clip_cov", "wrong_high", "wrong_low"),
    *("bound_high", "bound_low", "kl_cov"),
)


def histogram(values: Floats, edges: Floats) -> Counts:
    """How many finite values lie in each bin [lo, hi); values beyond the ends are in the outer bins."""
    finite = values[np.isfinite(values)]
    bins = np.clip(np.searchsorted(edges, finite, side="right") - 1, 0, len(edges) - 2)
    return np.bincount(bins, minlength=len(edges) - 1).astype(np.int64)


def histogram_2d(x: Floats, y: Floats, x_edges: Floats, y_edges: Floats) -> Counts:
    """The same in two dimensions, [x bins, y bins], over pairs that are both finite."""
    both = np.isfinite(x) & np.isfinite(y)
    columns, rows = len(x_edges) - 1, len(y_edges) - 1
    i = np.clip(np.searchsorted(x_edges, x[both], side="right") - 1, 0, columns - 1)
    j = np.clip(np.searchsorted(y_edges, y[both], side="right") - 1, 0, rows - 1)
    return np.bincount(i * rows + j, minlength=columns * rows).reshape(columns, rows).astype(np.int64)


def probability_grid(tokens: pd.DataFrame) -> Counts:
    """Tokens by probability of the sampler and of the trainer, [rollout bins, old bins] of PROBABILITY_EDGES."""
    rollout, old = (np.exp(tokens[name].to_numpy(np.float64)) for name in ("rollout_logprobs", "old_logprobs"))
    return histogram_2d(rollout, old, PROBABILITY_EDGES, PROBABILITY_EDGES)


def deltas(tokens: pd.DataFrame) -> Floats:
    """old_logprobs - rollout_logprobs in nats, float64."""
    return tokens["old_logprobs"].to_numpy(np.float64) - tokens["rollout_logprobs"].to_numpy(np.float64)


def log_ratios(updates: pd.DataFrame) -> Floats:
    """Logarithm of the recorded ratios in nats; NaN where the policy took no step."""
    with np.errstate(divide="ignore"):
        return np.log(updates["ratios"].to_numpy(np.float64))


def ratio_histogram(updates: pd.DataFrame) -> pd.DataFrame:
    """epoch, minibatch, bin_lo, bin_hi (log-ratio, nats), count; one row per step and bin that has a token."""
    edges, values = LOG_RATIO_EDGES, log_ratios(updates)
    finite = np.isfinite(values)
    bin_of = np.clip(np.searchsorted(edges, values[finite], side="right") - 1, 0, len(edges) - 2)
    counts = updates.loc[finite, ["epoch", "minibatch"]].assign(bin=bin_of).value_counts(sort=False)
    table = counts.rename("count").reset_index().sort_values(["epoch", "minibatch", "bin"], ignore_index=True)
    bins = table["bin"].to_numpy(np.int64)
    return table.drop(columns="bin").assign(bin_lo=edges[bins], bin_hi=edges[bins + 1])


def quadrant_grid(advantages: Floats, updates: pd.DataFrame) -> Counts:
    """Token updates by advantage and ratio, [ADVANTAGE_EDGES bins, RATIO_EDGES bins]; `advantages` per update row."""
    return histogram_2d(advantages, updates["ratios"].to_numpy(np.float64), ADVANTAGE_EDGES, RATIO_EDGES)


def flag_row(iteration: int, updates: pd.DataFrame) -> dict[str, float]:
    """Counts of the recorded clip flags of one iteration, and of the token updates that have one."""
    flags = updates["clip_flag"].value_counts()
    counts = {flag: int(flags.get(flag, 0)) for flag in FLAGS}
    return {"iteration": iteration, **counts, "token_updates": int(flags.sum())}


def extremes_row(iteration: int, updates: pd.DataFrame) -> dict[str, float]:
    """Smallest and largest finite ratio of one iteration, and how many recorded ratios are not finite."""
    ratios = updates["ratios"].to_numpy(np.float64)
    finite = ratios[np.isfinite(ratios)]
    least, most = (float(finite.min()), float(finite.max())) if len(finite) else (np.nan, np.nan)
    # null reads as NaN; only the flag says whether there was a step
    broken = int((updates["clip_flag"].notna().to_numpy() & ~np.isfinite(ratios)).sum())
    return {"iteration": iteration, "min_ratio": least, "max_ratio": most, "nonfinite_ratios": broken}


def special_tokens(tokens: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Tokens without text that are alone in their word: end tokens and the like, not bytes of a character."""
    empty = (tokens["char_start"] == tokens["char_end"]).to_numpy()
    words = tokens.groupby(["iteration", "sequence", "word_id"])["position"].transform("size").to_numpy()
    return np.asarray(empty & (words == 1), dtype=np.bool_)
