"""How long do two runs sample the same tokens? Survival of identical responses, and hazard per token."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def _check(durations: Ints, events: Bools) -> None:
    if len(durations) != len(events) or not len(durations) or durations.min() < 1:
        raise ValueError("durations must be one or more counts of at least 1, with one event flag each")


def kaplan_meier(durations: Ints, events: Bools) -> pd.DataFrame:
    """S(t) = product over u <= t of (1 - d_u / n_u), the share of responses identical beyond token t.

    durations: tokens compared, including the first different one; events: whether there is one, or else the response
    ended (censored). One row per time with an event: time, at_risk, events, survival, se (Greenwood; NaN at S = 0).
    Kaplan and Meier (1958). Raises ValueError on durations below 1.
    """
    _check(durations, events)
    times, died = np.unique(durations[events], return_counts=True)
    at_risk = len(durations) - np.searchsorted(np.sort(durations), times, side="left")
    survival = np.cumprod(1 - died / at_risk)
    with np.errstate(divide="ignore", invalid="ignore"):
        se = survival * np.sqrt(np.cumsum(died / (at_risk * (at_risk - died))))
    return pd.DataFrame({"time": times, "at_risk": at_risk, "events": died, "survival": survival, "se": se})


def log_rank(durations_a: Ints, events_a: Bools, durations_b: Ints, events_b: Bools) -> tuple[float, float]:
    """(statistic, p-value) of H0: equal hazards. (sum O - E)^2 / sum V is chi-squared with one degree of freedom.

    Over the times of events: E = d n_a / n, V = d (n_a / n) (n_b / n) (n - d) / (n - 1) (Mantel, 1966). NaN
    where no event has both groups at risk. Raises ValueError on durations below 1.
    """
    _check(durations_a, events_a)
    _check(durations_b, events_b)
    times = np.unique(np.concatenate([durations_a[events_a], durations_b[events_b]]))

    def at(durations: Ints, side: str) -> Ints:
        return np.asarray(np.searchsorted(np.sort(durations), times, side=side))  # type: ignore[call-overload]

    n_a, n_b = len(durations_a) - at(durations_a, "left"), len(durations_b) - at(durations_b, "left")
    d_a = at(durations_a[events_a], "right") - at(durations_a[events_a], "left")
    d = d_a + at(durations_b[events_b], "right") - at(durations_b[events_b], "left")
    n = n_a + n_b
    variance = float((d * (n_a / n) * (n_b / n) * (n - d) / np.maximum(n - 1, 1)).sum())
    if variance == 0.0:
        return math.nan, math.nan
    statistic = float((d_a - d * n_a / n).sum()) ** 2 / variance
    return statistic, float(stats.chi2.sf(statistic, 1))


def hazard(durations: Ints, events: Bools, level: float = 0.95) -> tuple[float, float, float]:
    """(h, low, high): first differences per token compared, with the exact Poisson interval.

    With h constant over positions, a response of T tokens is identical with probability about exp(-h T). Raises
    ValueError on durations below 1.
    """
    _check(durations, events)
    exposure, count = int(durations.sum()), int(events.sum())
    tail = (1 - level) / 2
    low = float(stats.chi2.ppf(tail, 2 * count)) / 2 if count else 0.0
    high = float(stats.chi2.isf(tail, 2 * (count + 1))) / 2
    return count / exposure, low / exposure, high / exposure
