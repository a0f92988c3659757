"""Causes that are tried together, with the value of a parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.causes.cause import (
    Cause,
    OtherDistribution,
    OtherInput,
    OtherModel,
    OtherQuantity,
    OtherUnit,
    Parameter,
)
from ppo_repro.testing.audit.stack import StackSampling


@dataclass(frozen=True)
class Combination:
    """The cause of each stage, None where the computation is right. At most one cause has a parameter."""

    model: OtherModel | None = None
    input: OtherInput | None = None
    distribution: OtherDistribution | None = None
    quantity: OtherQuantity | None = None
    unit: OtherUnit | None = None
    value: float | None = None  # of the parameter

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Return the causes in the order of the stages."""
        stages = (self.model, self.input, self.distribution, self.quantity, self.unit)
        return tuple(cause for cause in stages if cause is not None)

    @property
    def parameter(self) -> Parameter | None:
        """Return the parameter of the cause that has one."""
        return next((cause.parameter for cause in self.causes if cause.parameter is not None), None)

    def value_of(self, cause: Cause) -> float | None:
        """Return the value of a cause's parameter; None if the cause has no parameter."""
        return None if cause.parameter is None else self.value

    @property
    def to_logits(self) -> Combination:
        """Return the causes up to the logits."""
        return Combination(self.model, self.input)

    @property
    def to_softmax(self) -> Combination:
        """Return the causes up to the softmax."""
        value = None if self.distribution is None else self.value_of(self.distribution)
        return Combination(self.model, self.input, self.distribution, value=value)

    @property
    def temperature(self) -> float | None:
        """Return the value if all logits are divided by it."""
        return self.value if self.parameter is not None and self.parameter.temperature_1 is not None else None

    @property
    def without_value(self) -> Combination:
        """Return the causes alone. A cause that computes the same as the value 1 stands for that value."""
        at_one = None if self.parameter is None else self.parameter.temperature_1
        is_one = self.value is not None and abs(self.value - 1.0) <= limits.SAME_VALUE
        return replace(self, value=None, distribution=at_one if at_one and is_one else self.distribution)

    def words(self, sampling: StackSampling) -> list[str]:
        """Return the words of each cause."""
        return [cause.said(sampling, self.value_of(cause)) for cause in self.causes]


PLAIN = Combination()


def together(*causes: Cause) -> Combination:
    """Return causes of different stages as one combination."""
    found = PLAIN
    for cause in causes:
        match cause:
            case OtherModel():
                found = replace(found, model=cause)
            case OtherInput():
                found = replace(found, input=cause)
            case OtherDistribution():
                found = replace(found, distribution=cause)
            case OtherQuantity():
                found = replace(found, quantity=cause)
            case OtherUnit():
                found = replace(found, unit=cause)
            case _:
                raise TypeError(f"{type(cause).__name__} has no stage")
    return found
