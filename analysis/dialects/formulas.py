"""The published keys of eight frameworks as one table: formula, source, and how each differs from ours.

In formulas p = old, g = rollout, n = new log-probs, r = exp(n - anchor), A = advantage. Assumed: one process, one
micro-batch per minibatch, responses padded on the right to the longest of the iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.clipping.update_rows import ClipRule, Float64, IterationRows, column, policy_rows, steps_of
from ppo_repro.errors import UserError

# over what a key is computed: each step; all steps, averaged; the last step; all steps of an epoch; the rollout before
# any step; all steps of the value model, averaged; all steps, at once
Over = Literal["step", "steps", "last", "epoch", "rollout", "value steps", "all steps"]
DUAL_CLIP = 3.0  # verl's default: it always applies one
LOG_RATIO_LIMIT = 20.0  # verl's, before exp
INVALID_LOGPROB = 1.0  # what TRL writes at padding, in old and new log-probs alike
EPSILON = 1e-8  # NeMo-RL and verl add it to denominators


@dataclass(frozen=True)
class Bounds:
    """The frameworks' defaults of bounds that a run of ours does not have."""

    cispo_high: float = 5.0  # TRL: on the ratio itself
    cap: float = 2.0  # TRL: on importance ratios
    threshold: float = 2.0  # verl: C of rollout_corr
    tis_low: float = 0.0  # slime
    tis_high: float = 2.0
    mask_low: float = 0.2  # prime-rl: on differences of probabilities
    mask_high: float = 0.2

    def __post_init__(self) -> None:
        if not (self.cispo_high > 0 and self.cap > 0 and 1 < self.threshold < np.inf):
            raise UserError(f"{self}: cispo_high and cap must be positive, threshold above 1")
        if not (0 <= self.tis_low < self.tis_high and self.mask_low >= 0 and self.mask_high >= 0):
            raise UserError(f"{self}: need 0 <= tis_low < tis_high, and masks of 0 or more")


@dataclass(frozen=True)
class Rows:
    """Tokens of a step, an epoch or the rollout as arrays; what a stage does not have is empty."""

    sequence: npt.NDArray[np.int64]  # response of each token, from 0
    g: Float64
    p: Float64
    ref: Float64
    n: Float64
    A: Float64
    H: Float64  # entropies of the new policy
    v: Float64  # new values
    v_old: Float64
    R: Float64  # returns
    width: int  # tokens of the longest response of the iteration
    rule: ClipRule
    bounds: Bounds

    @property
    def r(self) -> Float64:
        """exp(n - p)."""
        return exp(self.n - self.p)

    @property
    def clipped(self) -> Float64:
        return np.clip(self.r, 1.0 - self.rule.low, 1.0 + self.rule.high)

    @property
    def w(self) -> Float64:
        """exp(p - g)."""
        return exp(self.p - self.g)

    def by_response(self, values: Float64) -> Float64:
        """Token means of each response."""
        return np.asarray(np.bincount(self.sequence, values) / np.bincount(self.sequence))

    def sums(self, values: Float64) -> Float64:
        return np.asarray(np.bincount(self.sequence, values))

    @property
    def cells(self) -> int:
        """Positions of the padded matrix."""
        return self.width * (int(self.sequence.max()) + 1)


def exp(values: Float64) -> Float64:
    """exp in float64; infinite where it overflows."""
    with np.errstate(over="ignore"):
        return np.exp(values)


def mean(values: npt.NDArray[np.generic]) -> float:
    return float(values.mean())


def seq_mean(x: Rows, values: npt.NDArray[np.generic]) -> float:
    """Mean over responses of their token means."""
    return float(x.by_response(np.asarray(values, np.float64)).mean())


def _std(values: Float64) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _rows(frame: pd.DataFrame, item: IterationRows, bounds: Bounds, width: int) -> Rows:
    names = {"g": "rollout_logprobs", "p": "old_logprobs", "ref": "ref_logprobs", "n": "new_logprobs"}
    names |= {"A": "advantages", "H": "new_entropies", "v": "new_values", "v_old": "values", "R": "returns"}
    sequence = np.unique(frame["sequence"].to_numpy(), return_inverse=True)[1].astype(np.int64)
    arrays = {short: column(frame, name) if name in frame else np.empty(0) for short, name in names.items()}
    return Rows(sequence, width=width, rule=item.rule, bounds=bounds, **arrays)


@dataclass(frozen=True)
class Key:
    """One published key. `value` is None where the records lack what it needs."""

    framework: str
    key: str
    source: tuple[str, str, str]  # repository, path, commit
    formula: str
    anchor: str  # the denominator of its ratio, or the two log-probs that it compares
    reduction: str  # over tokens, and over the steps of an iteration
    difference: str  # from ours
    over: Over
    value: Callable[[Rows], float] | None


def evaluate(item: IterationRows, keys: tuple[Key, ...], bounds: Bounds | None = None) -> Iterator[dict[str, object]]:
    """framework, key, epoch, minibatch and value; epoch and minibatch are None for keys of an iteration."""
    bounds = Bounds() if bounds is None else bounds
    width = int(item.tokens.groupby("sequence").size().max())

    def arrays(frame: pd.DataFrame) -> Rows:
        return _rows(frame, item, bounds, width)

    policy = policy_rows(item)
    steps = {place: arrays(policy.iloc[rows]) for place, rows in sorted(steps_of(policy).items())}
    epochs = {epoch: arrays(policy[policy["epoch"] == epoch]) for epoch in sorted({e for e, _ in steps})}
    moved = item.rows[item.rows["new_values"].notna()]
    value_steps = [arrays(moved.iloc[rows]) for _, rows in sorted(steps_of(moved).items())]
    rollout = arrays(item.tokens)
    for key in keys:
        if key.value is None:
            continue
        places: list[tuple[int | None, int | None, float]]
        if key.over == "step":
            places = [(epoch, minibatch, key.value(x)) for (epoch, minibatch), x in steps.items()]
        elif key.over == "epoch":
            places = [(epoch, None, key.value(x)) for epoch, x in epochs.items()]
        elif key.over == "rollout":
            places = [(None, None, key.value(rollout))]
        elif key.over == "all steps":
            padded = [key.value(x) for x in steps.values()]
            places = [(None, None, float(np.var(padded, ddof=1)) if len(padded) > 1 else float("nan"))]
        else:
            chosen = value_steps if key.over == "value steps" else list(steps.values())
            values = [key.value(x) for x in (chosen[-1:] if key.over == "last" else chosen)]
            places = [(None, None, float(np.mean(values)) if values else float("nan"))]
        for epoch, minibatch, value in places:
            yield {
                "framework": key.framework,
                "key": key.key,
                "iteration": item.iteration,
                "epoch": epoch,
                "minibatch": minibatch,
                "value": value,
            }


def symmetric(value: Callable[[Rows], float]) -> Callable[[Rows], float]:
    """NaN where the clip range is asymmetric, which the framework does not have."""
    return lambda x: value(x) if x.rule.low == x.rule.high else float("nan")


def log_ratio(x: Rows) -> Float64:
    """verl's n - p, clamped."""
    return np.clip(x.n - x.p, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def losses(x: Rows) -> tuple[Float64, Float64]:
    """verl's two surrogates."""
    ratio = exp(log_ratio(x))
    return -x.A * ratio, -x.A * np.clip(ratio, 1.0 - x.rule.low, 1.0 + x.rule.high)


def dual_clipped(x: Rows) -> float:
    limit = DUAL_CLIP if x.rule.dual is None else x.rule.dual
    return mean((np.maximum(*losses(x)) > -x.A * limit) & (x.A < 0))


def value_clipped(x: Rows) -> float:
    if x.rule.value_range is None:
        return float("nan")
    clipped = np.clip(x.v, x.v_old - x.rule.value_range, x.v_old + x.rule.value_range)
    return mean((clipped - x.R) ** 2 > (x.v - x.R) ** 2)


def value_outside(x: Rows) -> float:
    if x.rule.value_range is None:
        return float("nan")
    return seq_mean(x, np.abs(x.v - x.v_old) > x.rule.value_range)


def explained_variance(x: Rows) -> float:
    spread = float(np.var(x.R))
    return 1.0 - float(np.var(x.R - x.v_old)) / spread if spread else float("nan")


def padded_entropy(x: Rows) -> float:
    lengths = np.bincount(x.sequence)
    return mean(x.sums(-x.g) - INVALID_LOGPROB * (x.width - lengths))


def correlation(x: Rows) -> float:
    a, b = exp(x.p), exp(x.g)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else float("nan")


def nemo_mean(values: Float64) -> float:
    """sum / (tokens + 1e-8), the reduction of all means of NeMo-RL."""
    return float(values.sum()) / (len(values) + EPSILON)


def mixture(x: Rows) -> float:
    """Both halves of k3 to the mixture of sampler and trainer, on the sampled token."""
    middle = np.log(0.5 * np.exp(x.p) + 0.5 * np.exp(x.g))
    a, b = x.p - middle, x.g - middle
    return nemo_mean(0.5 * (exp(a) - a - 1.0) + 0.5 * (exp(b) - b - 1.0))


def finite_weights(x: Rows) -> float:
    return nemo_mean(np.where(np.isfinite(x.w), x.w, 0.0))


def delta(x: Rows) -> Float64:
    """prime-rl's exp(n) - exp(g)."""
    return np.exp(x.n) - np.exp(x.g)


def masked(x: Rows) -> float:
    return mean(np.where(x.A > 0, delta(x) > x.bounds.mask_high, delta(x) < -x.bounds.mask_low))


def safe(values: Float64) -> Float64:
    """verl's bound on log-ratios before exp."""
    return np.clip(values, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def corr_weights(x: Rows) -> Float64:
    return exp(safe(x.p - x.g))


def clamped(x: Rows) -> Float64:
    return np.clip(corr_weights(x), 1.0 / x.bounds.threshold, x.bounds.threshold)


def clamped_spread(x: Rows) -> float:
    w = clamped(x)
    return max(mean(w**2) - mean(w) ** 2, 0.0) ** 0.5 if len(w) > 1 else 0.0


def effective_size(x: Rows) -> float:
    w = clamped(x)
    return 1.0 / mean((w / (mean(w) + EPSILON)) ** 2)


def seq_weights(x: Rows) -> Float64:
    return x.by_response(corr_weights(x))


def seq_difference(x: Rows) -> Float64:
    return x.by_response(x.g) - x.by_response(x.p)


def outside(x: Rows) -> npt.NDArray[np.bool_]:
    w = corr_weights(x)
    return (w > x.bounds.threshold) | (w < 1.0 / x.bounds.threshold)
