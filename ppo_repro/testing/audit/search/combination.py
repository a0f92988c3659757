"""Causes that are tried together, with the value of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import Cause, Parameter, Stage
from ppo_repro.testing.audit.stack import StackSampling

AnyCause = TypeVar("AnyCause", bound=Cause)


@dataclass(frozen=True)
class Combination:
    """Causes in the order of their stages, at most one for each stage, and at most one with a parameter.

    The computation of a stage without a cause is right.
    """

    causes: tuple[Cause, ...] = ()
    value: float | None = None  # of the parameter

    def get(self, kind: type[AnyCause]) -> AnyCause | None:
        """Return the cause of one kind, such as `OtherModel`; None if there is none."""
        return next((cause for cause in self.causes if isinstance(cause, kind)), None)

    @property
    def parameter(self) -> Parameter | None:
        """Return the parameter of the cause that has one."""
        return next((cause.parameter for cause in self.causes if cause.parameter is not None), None)

    def value_of(self, cause: Cause) -> float | None:
        """Return the value of a cause's parameter; None if the cause has no parameter."""
        return None if cause.parameter is None else self.value

    def up_to(self, last: Stage) -> Combination:
        """Return the causes up to a stage."""
        some = Combination(tuple(cause for cause in self.causes if cause.stage <= last))
        return some if some.parameter is None else Combination(some.causes, self.value)

    @property
    def temperature(self) -> float | None:
        """Return the value if all logits are divided by it."""
        return self.value if self.parameter is not None and self.parameter.temperature_1 is not None else None

    @property
    def without_value(self) -> Combination:
        """Return the causes alone. A cause that computes the same as the value 1 stands for that value."""
        is_one = self.value is not None and abs(self.value - 1.0) <= limits.SAME_VALUE
        return Combination(tuple(_at_1(cause) if is_one else cause for cause in self.causes))

    def words(self, sampling: StackSampling) -> list[str]:
        """Return the words of each cause."""
        return [cause.said(sampling, self.value_of(cause)) for cause in self.causes]


def _at_1(cause: Cause) -> Cause:
    """Return the cause without a parameter that computes the same as a temperature of 1; another cause as it is."""
    return cause if cause.parameter is None else cause.parameter.temperature_1 or cause


PLAIN = Combination()
