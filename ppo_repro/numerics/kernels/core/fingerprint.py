"""A number that tells whether any bit of an array has changed."""

from __future__ import annotations

import numpy as np

from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.core.pool import results_of_parts

_STEP, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)  # splitmix64's
_HALF, _ONE = np.uint64(32), np.uint64(1)
_NS = 0.15  # a word, roughly


@kernel
def _sum(words, first):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(words.size):
        factor = (np.uint64(first + i) + _ONE) * _STEP
        factor = (factor ^ (factor >> _HALF)) * _MIX
        total += np.uint64(words[i]) * (factor | _ONE)
    return total


def fingerprint(x: np.ndarray) -> int:
    """sum_i w_i f_i mod 2^64 over the words w of x, C-contiguous float32, with a fixed odd factor f_i for each place.

    One word that changes always shows. Changes of many cancel with a chance of about 2^-40: words that differ in their
    exponents alone differ by multiples of 2^23. It is no protection from someone who chooses them.

    Source: multilinear hashing, Lemire and Kaser, 2014, https://arxiv.org/abs/1202.4961.
    """
    words = x.reshape(-1).view(np.uint32)
    parts = results_of_parts(lambda first, last: int(_sum(words[first:last], first)), len(words), _NS)
    return sum(parts) % 2**64
