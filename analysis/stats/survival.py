"""How long do two runs sample the same tokens? Survival of identical responses, and hazard per token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def censored(durations: Ints, events: Bools) -> stats.CensoredData:
    """Durations of which those without an event are right-censored, for SciPy (`ecdf`, `logrank`)."""
    return stats.CensoredData.right_censored(durations, ~np.asarray(events, bool))


def kaplan_meier(durations: Ints, events: Bools) -> pd.DataFrame:
    """S(t), the share of responses identical beyond token t (Kaplan and Meier, 1958): columns time and survival.

    durations: tokens compared, including the first different one; events: whether there is one, or else the response
    ended (censored). One row per time with an event.
    """
    survival = stats.ecdf(censored(durations, events)).sf
    table = pd.DataFrame({"time": survival.quantiles, "survival": survival.probabilities})
    return table[table["time"].isin(np.asarray(durations)[np.asarray(events, bool)])].reset_index(drop=True)


def hazard(durations: Ints, events: Bools, level: float = 0.95) -> tuple[float, float, float]:
    """(h, low, high): first differences per token compared, with the exact Poisson interval.

    With h constant over positions, a response of T tokens is identical with probability about exp(-h T).
    """
    exposure, count = int(durations.sum()), int(events.sum())
    tail = (1 - level) / 2
    low = float(stats.chi2.ppf(tail, 2 * count)) / 2 if count else 0.0
    high = float(stats.chi2.isf(tail, 2 * (count + 1))) / 2
    return count / exposure, low / exposure, high / exposure
