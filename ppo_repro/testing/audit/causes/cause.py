"""What a cause of wrong log-probs is: another model, input, distribution, quantity or unit.

A log-prob is computed in stages, and a cause replaces one of them:

    model, input -> logits -> distribution (temperature, penalties, cuts) -> quantity (whose log-prob) -> unit (what is
    recorded)

With its cause, the computation predicts the numbers that a side with this fault records, float64 [n] for each response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import ClassVar, Literal

from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.testing.advice import ADVICE, CauseName
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.distributions import Chunk, Definition
from ppo_repro.testing.audit.forward import Pass
from ppo_repro.testing.audit.measure import Format
from ppo_repro.testing.audit.numbers import RecordedChunk
from ppo_repro.testing.audit.stack import StackSampling


class Stage(IntEnum):
    """The stages of a log-prob that a cause may replace, in their order."""

    MODEL = 1
    INPUT = 2
    DISTRIBUTION = 3
    QUANTITY = 4
    UNIT = 5


RoundedPart = Literal["computed", "weights", "part", "logits"]  # the whole computation, all weights, a module, logits


@dataclass(frozen=True)
class Parameter:
    """The number that a cause leaves open, such as a temperature: the value with the smallest error is taken."""

    usual: Sequence[float] = ()  # values to try
    propose: Callable[[Sequence[RecordedChunk]], Sequence[float]] | None = None  # in place of `usual`: finds the values
    is_fitted: bool = False  # least squares improve the best of these values
    in_pairs: int = 0  # so many of these values are tried together with another cause
    # for a temperature: the cause that computes the same numbers as temperature 1
    temperature_1: OtherDistribution | None = None

    def values(self, chunks: Sequence[RecordedChunk]) -> Sequence[float]:
        """Return the values to try on some tokens."""
        return self.usual if self.propose is None else self.propose(chunks)


@dataclass(frozen=True)
class Rounded:
    """What a cause rounds to a format of 16 bits."""

    what: RoundedPart
    to: Format
    exact: OtherDistribution | None = None  # which computes the same without rounding; None: the right computation


@dataclass(frozen=True, eq=False)  # two causes are never the same: what one predicts is kept under the cause
class Cause:
    """A cause has words and deviations; the subclass of each stage has what is computed."""

    stage: ClassVar[Stage]
    words: str
    name: CauseName  # under which the diagnosis lists it too
    _: KW_ONLY
    parameter: Parameter | None = None
    rounded: Rounded | None = None
    changes: int = 1  # that the cause consists of
    own_advice: str = ""
    is_option: bool = False  # of the model's architecture

    def said(self, sampling: StackSampling, x: float | None) -> str:
        """Return the words of the cause at the value x of its parameter."""
        return self.words

    @property
    def advice(self) -> str:
        """Return what to do about the cause."""
        return self.own_advice or ADVICE[self.name].mend

    @property
    def deviations(self) -> float:
        """Return the number of changes; a parameter counts limits.PER_PARAMETER more."""
        return self.changes + limits.PER_PARAMETER * (self.parameter is not None)

    def rounds(self, *what: RoundedPart) -> bool:
        """Return whether the cause rounds one of these to 16 bits."""
        return self.rounded is not None and self.rounded.what in what


MakeModel = Callable[[], PreTrainedModel]


@dataclass(frozen=True, eq=False)
class OtherModel(Cause):
    """Another model computes the logits."""

    stage = Stage.MODEL
    make: MakeModel


def option(words: str, advice: str, make: MakeModel, changes: int = 1) -> OtherModel:
    """Return the cause that computes an option of the model's architecture otherwise."""
    return OtherModel(words, "other_architecture", make, changes=changes, own_advice=advice, is_option=True)


@dataclass(frozen=True, eq=False)
class OtherInput(Cause):
    """The model sees other tokens, or other positions."""

    stage = Stage.INPUT
    passes: Sequence[Sequence[Pass] | None]  # of each response; None: the input of the dump


# (chunk, input of the stage, value of the parameter or NaN if the cause has none) -> output of the stage
Formula = Callable[[Chunk, Tensor, float], Tensor]


@dataclass(frozen=True, eq=False)
class OtherFormula(Cause):
    """A stage after the logits has another formula.

    The words may contain {x}, the value of the parameter, and {given}, the user's temperature.
    """

    formula: Formula
    _: KW_ONLY
    presumes: Callable[[StackSampling], bool] = lambda sampling: True

    def applied(self, chunk: Chunk, values: Tensor, x: float | None) -> Tensor:
        """Return what the stage computes from its input `values`, at the value x of the parameter."""
        return self.formula(chunk, values, math.nan if x is None else x)

    def said(self, sampling: StackSampling, x: float | None) -> str:
        """Return the words of the cause at the value x of its parameter."""
        return self.words.format(x=x, given=f"{sampling.temperature:.4g}")


@dataclass(frozen=True, eq=False)
class OtherDistribution(OtherFormula):
    """The formula computes, from logits [k, V], logits [k, V] whose softmax is the distribution of the k tokens."""

    stage = Stage.DISTRIBUTION
    _: KW_ONLY
    definition: Definition | None = None  # that has the formula


@dataclass(frozen=True, eq=False)
class OtherQuantity(OtherFormula):
    """The formula computes, from the log-probs [k, V] of all tokens, the quantity [k] of the k tokens."""

    stage = Stage.QUANTITY


@dataclass(frozen=True, eq=False)
class OtherUnit(OtherFormula):
    """The formula computes, from the quantity [n] of the whole response, what is recorded [n].

    The quantity is NaN where it is not known. The chunk is the first one of the window.
    """

    stage = Stage.UNIT


def fixed(formula: Callable[[Chunk, Tensor], Tensor]) -> Formula:
    """Return a formula without a parameter."""
    return lambda chunk, values, x: formula(chunk, values)
