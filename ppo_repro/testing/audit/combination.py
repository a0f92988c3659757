"""Causes that are tried together, with the value of a parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause, Parameter, RecordedChunk, Stage
from ppo_repro.testing.audit.stack import StackSampling


@dataclass(frozen=True)
class CauseAt:
    """A cause at a value of its parameter, None if it has no parameter."""

    cause: Cause
    value: float | None = None

    def words(self, sampling: StackSampling) -> str:
        """Return the words of the cause with the value and the user's temperature."""
        if self.cause.stage in ("weights", "input"):  # whose words may have other braces, as of a folder's name
            return self.cause.words
        return self.cause.words.format(x=self.value, given=f"{sampling.temperature:.4g}")

    @property
    def row(self) -> Cause:
        """Return the row that the cause is at this value: its own, unless another row is this value alone."""
        if self.value is None or self.cause.parameter is None or abs(self.value - 1.0) > limits.SAME_VALUE:
            return self.cause
        return self.cause.parameter.at_one or self.cause

    def applied(self, chunk: RecordedChunk, sampling: StackSampling, values: Tensor) -> Tensor:
        """Return what a cause after the logits makes of values."""
        of_value = () if self.value is None else (self.value,)
        return self.cause.change(chunk, sampling, values, *of_value)


@dataclass(frozen=True)
class Combination:
    """Causes, of which at most one has a parameter; none: the computation is right."""

    causes: tuple[CauseAt, ...] = ()

    @property
    def parameter(self) -> Parameter | None:
        """Return the parameter of the cause that has one."""
        return next((of.cause.parameter for of in self.causes if of.cause.parameter is not None), None)

    @property
    def value(self) -> float | None:
        """Return the value of the parameter."""
        return next((of.value for of in self.causes if of.value is not None), None)

    @property
    def temperature(self) -> float | None:
        """Return the value if all logits are divided by it."""
        return self.value if self.parameter is not None and self.parameter.is_temperature else None

    def with_value(self, value: float) -> Combination:
        """Return the combination with another value of the parameter."""
        return Combination(
            tuple(replace(of, value=value) if of.cause.parameter is not None else of for of in self.causes)
        )

    def at(self, stage: Stage) -> CauseAt | None:
        """Return the cause that replaces a stage, the last one if two do; None: the stage is as it should be."""
        return {of.cause.stage: of for of in self.causes}.get(stage)
