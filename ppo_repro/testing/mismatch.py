"""The mismatch of sampler and trainer, from a recorded run or from a dump of another training stack.

`delta = trainer - sampler` per token in nats; float64 arithmetic on float32 log-probs. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ppo_repro.testing.dumps import Names, Response, impossible, read_dump

if TYPE_CHECKING:
    import pandas as pd

ZEROS = 0.5  # of the tokens may have a log-prob of exactly 0 on both sides


@dataclass(frozen=True)
class Pairs:
    """Tokens, one entry each in every array."""

    iteration: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    sampler: npt.NDArray[np.float32]
    trainer: npt.NDArray[np.float32]

    def describe(self, index: int) -> str:
        """Which token it is, both values and their float32 bits."""
        sides = (("sampler", self.sampler[index]), ("trainer", self.trainer[index]))
        values = ", ".join(f"{name} {float(value)!r} (bits {bits(value)})" for name, value in sides)
        token = (self.iteration[index], self.sequence[index], self.position[index])
        return "iteration {}, sequence {}, position {}: {}".format(*token, values)


@dataclass(frozen=True)
class Mismatch:
    """Over the tokens with two finite log-probs; the tokens to show are indices."""

    tokens: int
    nonfinite: int  # tokens without two finite log-probs
    mean_abs: float
    max_abs: float
    k3: float  # KL(sampler || trainer), expm1(delta) - delta, token mean (Schulman, 2020)
    frac_unequal: float  # in any bit
    worst: int
    first_unequal: int
    first_nonfinite: int


def bits(value: float | np.float32) -> str:
    """The float32 bit pattern, hexadecimal."""
    return f"{int(np.float32(value).view(np.uint32)):08x}"


def unequal_bits(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Where two float32 arrays differ in any bit."""
    return np.asarray(a.view(np.uint32) != b.view(np.uint32))


def mismatch(pairs: Pairs) -> Mismatch:
    """The mismatch of these tokens; NaN for means over none."""
    finite = np.isfinite(pairs.sampler) & np.isfinite(pairs.trainer)
    a, b = (np.where(finite, side, 0.0).astype(np.float64) for side in (pairs.sampler, pairs.trainer))
    delta, count = b - a, int(finite.sum())
    unequal = finite & unequal_bits(pairs.sampler, pairs.trainer)
    size = np.abs(delta)
    sums = (size.sum(), (np.expm1(delta) - delta).sum(), unequal.sum())
    mean_abs, k3, frac_unequal = (float(total) / count if count else float("nan") for total in sums)
    where = (int(x.argmax()) if len(x) else -1 for x in (np.where(finite, size, -1.0), unequal, ~finite))
    return Mismatch(count, len(a) - count, mean_abs, float(size.max(initial=0.0)), k3, frac_unequal, *where)


def suspicious(pairs: Pairs) -> str:
    """Why these cannot be the log-probs of two sides, in words; "" if they can."""
    for name, side in (("sampler", pairs.sampler), ("trainer", pairs.trainer)):
        if why := impossible(side):
            return f"{name}: {why}"
    both = (pairs.sampler == 0) & (pairs.trainer == 0)
    if both.mean() > ZEROS:
        return f"both log-probs of {both.sum()} of {len(both)} tokens are exactly 0: is padding in it? name the mask"
    return ""


def run_pairs(run_dir: Path | str) -> Pairs:
    """`rollout_logprobs` and `old_logprobs` of a recorded run; UserError where it is damaged."""
    from ppo_repro.records import reader

    columns = ["iteration", "sequence", "position", "rollout_logprobs", "old_logprobs"]
    frame = reader.read_tokens(run_dir, columns=columns)
    iteration, sequence, position = (frame[name].to_numpy().astype(np.int64) for name in columns[:3])
    sampler, trainer = (np.ascontiguousarray(frame[name].to_numpy(), np.float32) for name in columns[3:])
    return Pairs(iteration, sequence, position, sampler, trainer)


def dump_pairs(source: Path | pd.DataFrame, names: Names | str | None = None) -> Pairs:
    """The tokens of a dump that count; the sequence is the row of the response, from 0. UserError names the row."""
    return joined(read_dump(source, names))


def joined(responses: Iterable[Response]) -> Pairs:
    """The tokens of responses that count."""
    columns: list[list[Any]] = [[], [], [], [], []]
    for r in responses:
        positions = np.flatnonzero(r.counts)
        ones = np.ones(len(positions), np.int64)
        row = (ones * r.iteration, ones * (r.row - 1), positions, r.sampler[positions], r.trainer[positions])
        for column, values in zip(columns, row, strict=True):
            column.append(values)
    types = (np.int64, np.int64, np.int64, np.float32, np.float32)
    return Pairs(*(np.concatenate([np.empty(0, t), *c]).astype(t) for c, t in zip(columns, types, strict=True)))
