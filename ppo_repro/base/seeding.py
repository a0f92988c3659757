"""Counter-based random streams: every draw is a pure function of the run seed and the stream's name.

Only raw generator words are used, because NumPy guarantees their bits across versions, but not the bits of its
distributions.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def _digest(name: tuple[int | str, ...], size: int) -> bytes:
    text = "\x1f".join(f"{type(item).__name__}:{item}" for item in name)
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def words(count: int, *name: int | str) -> NDArray[np.uint64]:
    """Return `count` random 64-bit words of the stream called `name` (Philox 4x64)."""
    key = np.frombuffer(_digest(name, 16), dtype="<u8")
    return np.random.Philox(key=key).random_raw(count).astype(np.uint64, copy=False)


def permutation(size: int, *name: int | str) -> NDArray[np.int64]:
    """Return a permutation of 0..size-1: the order that sorts `size` random words."""
    return np.argsort(words(size, *name), kind="stable").astype(np.int64)


def bell(count: int, *name: int | str) -> NDArray[np.float64]:
    """Return `count` bell-shaped draws of mean 0 and variance 1: the centred sum of four 16-bit uniform numbers.

    A draw takes integer sums and one multiplication, so its bits do not depend on the machine.
    """
    raw = words(count, *name)
    total = sum(((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48))
    centred = 2 * np.asarray(total, dtype=np.int64) - 4 * 0xFFFF
    # each uniform number in 0..65535 has variance (65536^2 - 1) / 12, and doubling quadruples it
    return centred.astype(np.float64) * (1.0 / np.sqrt(4 * 4 * (65536.0**2 - 1) / 12))


def sample_seed(run_seed: int, iteration: int, prompt_key: str, sample_index: int) -> int:
    """Return the sampler's seed of one response, in [0, 2^63). Every response of a run has another seed.

    Args:
        run_seed: the seed of the run.
        iteration: from 0 on.
        prompt_key: names the prompt.
        sample_index: number of the response among the responses to this prompt in this iteration.
    """
    return int.from_bytes(_digest(("sample", run_seed, iteration, prompt_key, sample_index), 8), "little") >> 1
