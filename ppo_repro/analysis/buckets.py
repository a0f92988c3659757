"""Place values in buckets: the edges that every table by probability, entropy or position has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PROBABILITIES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.9, 0.99, 1.0)
ENTROPIES = (0.0, 0.01, 0.1, 0.3, 1.0, 2.0, 4.0, np.inf)  # nats
DOUBLING = (0.0, *(float(1 << power) for power in range(31)))  # positions, lengths, lags, turns: 0, 1, 2-3, 4-7, ...


def bucket_of(values: npt.NDArray[np.float64], edges: tuple[float, ...]) -> npt.NDArray[np.int64]:
    """Return the index of each value's bucket [edge, next edge), int64; outer buckets are open, NaN gets -1."""
    buckets = np.clip(np.searchsorted(np.array(edges), values, side="right") - 1, 0, len(edges) - 2)
    return np.where(np.isnan(values), -1, buckets)
