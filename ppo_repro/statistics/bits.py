"""Compare the bits of float32 arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def unequal_bits(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return a bool per element: whether two arrays differ there in any bit of float32."""
    left, right = (np.ascontiguousarray(x, np.float32).view(np.int32) for x in (a, b))
    return np.asarray(left != right, dtype=bool)


# near log-prob 0 neighbouring float32 are so close that steps say nothing; below this |log-prob| they are not counted
ULP_FLOOR = 1e-2


def has_steps(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return a bool per pair of log-probs: whether float32 steps between them say something."""
    return np.minimum(np.abs(a), np.abs(b)) > ULP_FLOOR


def ulp_distance(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the number of float32 steps between finite numbers a and b, int64 [N]; +0 and -0 are one number."""
    bits = [np.ascontiguousarray(x).view(np.int32).astype(np.int64) for x in (a, b)]
    # float32 bits are ordered like positive values, and in reverse for negative values
    ordered = [np.where(x < 0, -(x & 0x7FFFFFFF), x) for x in bits]
    return np.abs(ordered[0] - ordered[1])
