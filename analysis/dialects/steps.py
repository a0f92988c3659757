"""The common parts of the dialects: an iteration's steps as arrays, and means over tokens, responses and steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.clipping.update_rows import Float64, IterationRows, column, policy_rows, steps_of


@dataclass(frozen=True)
class Step:
    """One policy step as arrays over its tokens; log-probs in nats."""

    epoch: int
    minibatch: int
    sequence: npt.NDArray[np.int64]  # response of each token, dense from 0
    rollout: Float64
    old: Float64
    new: Float64
    advantages: Float64
    new_entropies: Float64


def policy_steps(item: IterationRows) -> Iterator[Step]:
    """The steps that the policy took, in order."""
    rows = policy_rows(item)
    names = ("rollout_logprobs", "old_logprobs", "new_logprobs", "advantages", "new_entropies")
    for (epoch, minibatch), indices in sorted(steps_of(rows).items()):
        frame = rows.iloc[indices]
        yield Step(epoch, minibatch, _dense_sequences(frame), *(column(frame, name) for name in names))


@dataclass(frozen=True)
class ValueStep:
    """One step of the value model as arrays over its tokens; values in units of the reward."""

    sequence: npt.NDArray[np.int64]
    old: Float64
    new: Float64
    returns: Float64


def value_steps(item: IterationRows) -> Iterator[ValueStep]:
    """The steps that the value model took, in order."""
    rows = item.rows[item.rows["new_values"].notna()]
    for _, indices in sorted(steps_of(rows).items()):
        frame = rows.iloc[indices]
        names = ("values", "new_values", "returns")
        yield ValueStep(_dense_sequences(frame), *(column(frame, name) for name in names))


@dataclass(frozen=True)
class Responses:
    """The iteration's tokens before any step, as arrays; log-probs in nats."""

    sequence: npt.NDArray[np.int64]
    rollout: Float64
    old: Float64
    ref: Float64


def responses(item: IterationRows) -> Responses:
    """All tokens of the iteration."""
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs")
    return Responses(_dense_sequences(item.tokens), *(column(item.tokens, name) for name in names))


def _dense_sequences(frame: pd.DataFrame) -> npt.NDArray[np.int64]:
    return np.unique(frame["sequence"].to_numpy(), return_inverse=True)[1].astype(np.int64)


def by_response(values: Float64, sequence: npt.NDArray[np.int64]) -> tuple[Float64, Float64]:
    """Sums and means of each response, float64."""
    sums = np.asarray(np.bincount(sequence, values), dtype=np.float64)
    return sums, sums / np.bincount(sequence)


def exp(values: Float64) -> Float64:
    """exp in float64; infinite where it overflows."""
    with np.errstate(over="ignore"):
        return np.exp(values)


def mean(values: list[float]) -> float:
    """Mean over steps; NaN without one."""
    return float(np.mean(values)) if values else float("nan")


def one_row(item: IterationRows, numbers: dict[str, float]) -> pd.DataFrame:
    """A row per iteration."""
    return pd.DataFrame([{"iteration": item.iteration, **numbers}])


def step_rows(item: IterationRows, numbers_of_steps: list[tuple[Step, dict[str, float]]]) -> pd.DataFrame:
    """A row per policy step."""
    keyed = [
        {"iteration": item.iteration, "epoch": s.epoch, "minibatch": s.minibatch, **numbers}
        for s, numbers in numbers_of_steps
    ]
    return pd.DataFrame(keyed)
