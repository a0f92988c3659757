"""The mismatch of sampler and trainer, from a recorded run or from a file of another training stack.

`delta = trainer - sampler` per token in nats; float64 arithmetic on float32 log-probs. Never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ppo_repro.errors import UserError
from ppo_repro.json_lines import read_lines
from ppo_repro.output import shown

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Names:
    """The names in a file of both sides' log-probs and of the mask of tokens that count."""

    sampler: str
    trainer: str
    mask: str


KNOWN = {
    "verl": Names("rollout_log_probs", "old_log_probs", "response_mask"),
    "prime-rl": Names("inference_logprobs", "trainer_logprobs", "loss_mask"),
    "TRL": Names("sampling_per_token_logps", "old_per_token_logps", "completion_mask"),
}


@dataclass(frozen=True)
class Pairs:
    """The tokens of some responses, one entry each in every array."""

    iteration: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    sampler: npt.NDArray[np.float32]
    trainer: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Token:
    """One token and its log-prob on either side."""

    iteration: int
    sequence: int
    position: int
    sampler: float
    trainer: float

    def describe(self) -> str:
        """Which token it is, both values and their float32 bits."""
        sides = (("sampler", self.sampler), ("trainer", self.trainer))
        values = (f"{name} {value!r} (bits {bits(value)})" for name, value in sides)
        token = f"iteration {self.iteration}, sequence {self.sequence}, position {self.position}"
        return f"{token}: {', '.join(values)}"


@dataclass(frozen=True)
class Mismatch:
    """Sums over all tokens with two finite log-probs, and some tokens to show."""

    tokens: int = 0  # with two finite log-probs
    nonfinite: int = 0  # all others
    unequal: int = 0  # in any bit
    abs_sum: float = 0.0
    max_abs: float = 0.0
    k3_sum: float = 0.0
    worst: Token | None = None  # with the largest |delta|
    first_unequal: Token | None = None
    first_nonfinite: Token | None = None

    @property
    def frac_unequal(self) -> float:
        return self.unequal / self.tokens if self.tokens else math.nan

    @property
    def mean_abs(self) -> float:
        """Mean |delta|, token mean."""
        return self.abs_sum / self.tokens if self.tokens else math.nan

    @property
    def k3(self) -> float:
        """KL(sampler || trainer), k3 = expm1(delta) - delta, token mean (Schulman, 2020)."""
        return self.k3_sum / self.tokens if self.tokens else math.nan


def bits(value: float) -> str:
    """The float32 bit pattern, hexadecimal."""
    return f"{int(np.float32(value).view(np.uint32)):08x}"


def token_at(pairs: Pairs, index: int) -> Token:
    """The token at one index."""
    return Token(
        iteration=int(pairs.iteration[index]),
        sequence=int(pairs.sequence[index]),
        position=int(pairs.position[index]),
        sampler=float(pairs.sampler[index]),
        trainer=float(pairs.trainer[index]),
    )


def unequal_bits(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Where two float32 arrays differ in any bit."""
    return np.asarray(a.view(np.uint32) != b.view(np.uint32))


def mismatch(chunks: Iterable[Pairs]) -> Mismatch:
    """The mismatch over all chunks; tokens without two finite log-probs are only counted."""
    total = Mismatch()
    for pairs in chunks:
        total = _with(total, pairs)
    return total


def _with(total: Mismatch, pairs: Pairs) -> Mismatch:
    finite = np.isfinite(pairs.sampler) & np.isfinite(pairs.trainer)
    a, b = (np.where(finite, side, 0.0).astype(np.float64) for side in (pairs.sampler, pairs.trainer))
    delta = b - a
    size, unequal = np.abs(delta), finite & unequal_bits(pairs.sampler, pairs.trainer)
    largest = float(size.max(initial=0.0))
    worst = total.worst
    if len(size) and (worst is None or largest > total.max_abs):
        worst = token_at(pairs, int(size.argmax())) if finite.any() else worst
    return replace(
        total,
        tokens=total.tokens + int(finite.sum()),
        nonfinite=total.nonfinite + int((~finite).sum()),
        unequal=total.unequal + int(unequal.sum()),
        abs_sum=total.abs_sum + float(size.sum()),
        max_abs=max(total.max_abs, largest),
        k3_sum=total.k3_sum + float((np.expm1(delta) - delta).sum()),
        worst=worst,
        first_unequal=total.first_unequal or _first(pairs, unequal),
        first_nonfinite=total.first_nonfinite or _first(pairs, ~finite),
    )


def _first(pairs: Pairs, where: npt.NDArray[np.bool_]) -> Token | None:
    indices = np.flatnonzero(where)
    return token_at(pairs, int(indices[0])) if indices.size else None


def run_pairs(run_dir: Path | str) -> Iterator[Pairs]:
    """`rollout_logprobs` and `old_logprobs` of a recorded run, by iteration; UserError where it is damaged."""
    from ppo_repro.records import reader

    columns = ["sequence", "position", "rollout_logprobs", "old_logprobs"]
    for iteration in range(len(reader.open_manifest(run_dir).iterations)):
        frame = reader.read_tokens(run_dir, iterations=[iteration], columns=columns)
        sequence, position = (frame[name].to_numpy().astype(np.int64) for name in columns[:2])
        a, b = (np.ascontiguousarray(frame[name].to_numpy(), np.float32) for name in columns[2:])
        yield Pairs(np.full(len(frame), iteration), sequence, position, a, b)


def file_pairs(path: Path, names: Names | None = None) -> Iterator[Pairs]:
    """Read one response per line: lists of log-probs and of the mask, with the names of a known stack or `names`.

    The sequence is the line, from 0; the iteration is the field `step`, 0 without it; null is NaN, and a log-prob may
    be written NaN or Infinity. UserError names line and field.
    """
    for line in read_lines("the dump", path, constants=True):
        yield _response(line.where, line.number - 1, line.fields, names)


def frame_pairs(frame: pd.DataFrame, names: Names | None = None) -> Iterator[Pairs]:
    """One row per token: columns of both sides' log-probs, with the names of a recorded run, a known stack or `names`.

    A column of the mask drops its rows of 0; `iteration`, `sequence` and `position` name a token where they are there,
    and else its row does. UserError names a column that is missing or holds no numbers.
    """
    where = "the frame"
    ours = Names("rollout_logprobs", "old_logprobs", "response_mask")
    has_ours = {ours.sampler, ours.trainer} <= set(frame.columns)
    used = names or (ours if has_ours else _known(where, dict.fromkeys(map(str, frame.columns))))
    for name in (used.sampler, used.trainer):
        if name not in frame.columns:
            raise UserError(f"{where}: has no column '{name}'; there are {', '.join(map(str, frame.columns))}")
    rows = np.arange(len(frame))
    if used.mask in frame.columns:
        if not frame[used.mask].isin([0, 1]).all():
            raise UserError(f"{where}: {used.mask}: must hold 0 and 1, or false and true")
        rows = np.flatnonzero(frame[used.mask].to_numpy().astype(bool))
    kept = frame.iloc[rows]
    try:
        a, b = (np.ascontiguousarray(kept[name].to_numpy(), np.float32) for name in (used.sampler, used.trainer))
        places = [
            kept[name].to_numpy().astype(np.int64) if name in frame.columns else default
            for name, default in (
                ("iteration", np.zeros_like(rows)),
                ("sequence", np.zeros_like(rows)),
                ("position", rows),
            )
        ]
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {used.sampler}, {used.trainer} and the places must be numbers ({error})") from error
    yield Pairs(places[0], places[1], places[2], a, b)


def _response(where: str, number: int, entry: Mapping[str, Any], names: Names | None) -> Pairs:
    used = names or _known(where, entry)
    columns = [_numbers(where, entry, name) for name in (used.sampler, used.trainer, used.mask)]
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise UserError(f"{where}: {used.sampler}, {used.trainer} and {used.mask} have lengths {sorted(lengths)}")
    if not np.isin(columns[2], (0, 1)).all():
        raise UserError(f"{where}: {used.mask}: must hold 0 and 1, or false and true")
    positions = np.flatnonzero(columns[2])
    step = entry.get("step", 0)
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 63:
        raise UserError(f"{where}: step = {shown(repr(step))}: must be a whole number from 0")
    with np.errstate(over="ignore"):  # beyond float32 is infinite, which is counted
        a, b = (column[positions].astype(np.float32) for column in columns[:2])
    return Pairs(np.full(len(positions), step), np.full(len(positions), number), positions, a, b)


def _known(where: str, entry: Mapping[str, Any]) -> Names:
    """The names of the one known stack whose log-probs the entry has; UserError for none or several."""
    fits = [names for names in KNOWN.values() if {names.sampler, names.trainer} <= set(entry)]
    if len(fits) != 1:
        known = "; ".join(f"{names.sampler} and {names.trainer} ({stack})" for stack, names in KNOWN.items())
        raise UserError(f"{where}: has not the log-probs of one known stack: {known}; say which with names=Names(...)")
    return fits[0]


def _numbers(where: str, entry: Mapping[str, Any], name: str) -> npt.NDArray[np.float64]:
    if name not in entry:
        raise UserError(f"{where}: has no field '{name}'; there are {', '.join(sorted(entry))}")
    values = entry[name]
    if not isinstance(values, list) or not all(v is None or isinstance(v, int | float) for v in values):
        raise UserError(f"{where}: {name}: must be a list of numbers")
    try:
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    except OverflowError as error:
        raise UserError(f"{where}: {name}: holds a whole number beyond float64") from error
