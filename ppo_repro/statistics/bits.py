"""Compare the bits of float32 arrays, and count those in which sampler and trainer disagree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def unequal_bits(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return a bool per element: whether two arrays differ there in any bit of float32."""
    left, right = (np.ascontiguousarray(x, np.float32).view(np.int32) for x in (a, b))
    return np.asarray(left != right, dtype=bool)


def in_bfloat16(x: Float32) -> npt.NDArray[np.bool_]:
    """Return a bool per number: whether it is a bfloat16 number, whose low 16 bits are 0."""
    return np.asarray(np.ascontiguousarray(x).view(np.uint32) & 0xFFFF == 0)


def in_float16(x: Float32) -> npt.NDArray[np.bool_]:
    """Return a bool per number: whether it is a float16 number."""
    with np.errstate(over="ignore"):  # a number beyond float16 overflows, and is not equal then
        return np.asarray(x.astype(np.float16).astype(np.float32) == x)


class IterationAgreement(NamedTuple):
    """Counts of unequal numbers, and the largest |old - rollout| in nats, by their names in the table `iterations`."""

    unequal_old_rollout_logprobs: int
    max_abs_old_rollout: float
    unequal_first_ratios: int
    unequal_values: int


def iteration_agreement(
    rollout: Float32, old: Float32, first_ratios: Float32, values: Float32, new_values: Float32
) -> IterationAgreement:
    """Count the bits in which sampler and trainer disagree in an iteration, and the trainer with itself.

    Args:
        rollout: [N] log-probs of the sampler, nats.
        old: [N] log-probs of the trainer, nats.
        first_ratios: [M] ratios of the first minibatch, before any step.
        values: [K] values of the first minibatch before the update; none without a value model.
        new_values: [K] the same values computed again, before any step.
    """
    # not by `statistics.mismatch_metrics`: a run records these numbers, so the difference stays a float32
    with np.errstate(invalid="ignore"):  # infinities of one sign
        largest = float(np.abs(old - rollout).max())
    return IterationAgreement(
        unequal_old_rollout_logprobs=int(unequal_bits(old, rollout).sum()),
        max_abs_old_rollout=largest,
        unequal_first_ratios=int(unequal_bits(first_ratios, np.ones_like(first_ratios)).sum()),
        unequal_values=int(unequal_bits(new_values, values).sum()),
    )


# near log-prob 0 neighbouring float32 are so close that steps say nothing; below this |log-prob| they are not counted
ULP_FLOOR = 1e-2


def has_steps(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return a bool per pair of log-probs: whether float32 steps between them say something."""
    return np.minimum(np.abs(a), np.abs(b)) > ULP_FLOOR


def ulp_distance(a: Float32, b: Float32) -> npt.NDArray[np.int64]:
    """Return the number of float32 steps between finite numbers a and b, int64 [N]; +0 and -0 are one number."""
    bits = [np.ascontiguousarray(x).view(np.int32).astype(np.int64) for x in (a, b)]
    # float32 bits are ordered like positive values, and in reverse for negative values
    ordered = [np.where(x < 0, -(x & 0x7FFFFFFF), x) for x in bits]
    return np.abs(ordered[0] - ordered[1])
