"""What a cause of wrong log-probs is: one row, which replaces one stage of the computation of a log-prob.

    weights, input -> logits -> distribution (temperature, penalties, cuts) -> quantity (whose log-prob) -> unit (what
    is recorded)

A row predicts the numbers that a side with this fault records, float64 [n] for each response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.testing.advice import ADVICE, CauseName
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.distributions import Chunk
from ppo_repro.testing.audit.forward import Pass
from ppo_repro.testing.audit.measure import Format
from ppo_repro.testing.audit.stack import StackSampling

Stage = Literal["weights", "input", "distribution", "quantity", "unit"]
Computed = TypeVar("Computed")
RoundedPart = Literal["computed", "weights", "part", "logits"]  # the whole computation, all weights, a module, logits


@dataclass(frozen=True)
class Numbers:
    """Recorded and right log-probs of one response of n tokens: float64 [n] in nats, bool [n]."""

    recorded: Tensor
    usable: Tensor  # finite, and judged
    counts: Tensor
    reference: Tensor  # the log-probs of the model as they should be

    @property
    def unlikely_zeros(self) -> Tensor:
        """Return which tokens [n] that count have a log-prob of exactly 0, and a probability below limits.SURE."""
        return self.counts & (self.recorded == 0) & (self.reference < math.log(limits.SURE))

    def wrong(self, tolerance: float) -> Tensor:
        """Return which tokens [n] are wrong by more than `tolerance` nats."""
        return self.usable & ~((self.recorded - self.reference).abs() <= tolerance)


@dataclass(frozen=True)
class RecordedChunk(Chunk):
    """Logits of k neighbouring tokens, and the recorded numbers of the whole response."""

    numbers: Numbers

    @property
    def here(self) -> slice:
        """Return the positions of the k tokens in the response."""
        return slice(len(self.before), len(self.before) + len(self.targets))

    @property
    def wanted(self) -> Tensor:
        """Return the recorded numbers [k] of the tokens."""
        return self.numbers.recorded[self.here]

    @property
    def usable(self) -> Tensor:
        """Return which of the k tokens are judged, bool [k]."""
        return self.numbers.usable[self.here]


MakeModel = Callable[[], PreTrainedModel]
Passes = Sequence[Sequence[Pass]]  # the forward passes of each response
# (chunk, sampling, values) -> what is computed instead. By stage, values and result are
#   distribution: the chunk's logits [k, V] -> logits whose softmax is the distribution [k, V]
#   quantity: the chunk's log-probs [k, V] -> the quantity of each token [k]
#   unit: the quantity of the whole response [n], NaN where it is not known -> what is recorded [n]
Change = Callable[[RecordedChunk, StackSampling, Tensor], Tensor]
ChangeBy = Callable[[RecordedChunk, StackSampling, Tensor, float], Tensor]  # the same, by the value of a parameter
Proposal = Callable[[Sequence[RecordedChunk], StackSampling], Sequence[float]]


@dataclass(frozen=True)
class Parameter:
    """The number that a cause leaves open, such as a temperature: the value with the smallest error is taken."""

    usual: Sequence[float] = ()  # values to try
    propose: Proposal | None = None  # in place of `usual`: finds the values in the recorded numbers
    is_fitted: bool = False  # least squares improve the best of these values
    in_pairs: int = 0  # so many of these values are tried together with another cause
    is_temperature: bool = False  # all logits are divided by it
    at_one: Cause | None = None  # the row that is the value 1 alone

    def values(self, chunks: Sequence[RecordedChunk], sampling: StackSampling) -> Sequence[float]:
        """Return the values to try on some tokens."""
        return self.usual if self.propose is None else self.propose(chunks, sampling)


@dataclass(frozen=True)
class Rounded:
    """What a cause rounds to a format of 16 bits."""

    what: RoundedPart
    to: Format
    exact: Cause | None = None  # the row that computes the same without rounding; None: the right computation


@dataclass(frozen=True, eq=False)  # two causes are never the same: what one predicts is kept under the cause
class CauseOf(Generic[Computed]):
    """One cause: how the audit says it, what it computes in one stage, and what that presumes.

    `words` may contain {x}, the parameter, and {given}, the user's temperature. `change` depends on the stage:

    | stage | `change` |
    |---|---|
    | weights | `MakeModel`: the model that computes the logits |
    | input | `Passes`: the tokens that the model sees, and their positions |
    | distribution, quantity, unit | `Change`, or with a parameter `ChangeBy`: a function of tensors |
    """

    words: str
    stage: Stage
    name: CauseName  # under which the diagnosis lists it too
    change: Computed
    presumes: Callable[[StackSampling], bool] = lambda sampling: True
    parameter: Parameter | None = None
    rounded: Rounded | None = None
    changes: int = 1  # that the cause consists of
    own_advice: str = ""

    @property
    def advice(self) -> str:
        """Return what to do about the cause."""
        return self.own_advice or ADVICE[self.name].mend

    @property
    def deviations(self) -> float:
        """Return the number of changes; a parameter counts limits.PER_PARAMETER more."""
        return self.changes + limits.PER_PARAMETER * (self.parameter is not None)

    @property
    def is_option(self) -> bool:
        """Return whether an option of the model's architecture is computed otherwise."""
        return self.name == "other_architecture"

    def rounds(self, *what: RoundedPart) -> bool:
        """Return whether the cause rounds one of these to 16 bits."""
        return self.rounded is not None and self.rounded.what in what


Cause = CauseOf[Any]  # of any stage


def option(words: str, advice: str, make: MakeModel, changes: int = 1) -> CauseOf[MakeModel]:
    """Return the cause that computes an option of the model's architecture otherwise."""
    return CauseOf(words, "weights", "other_architecture", make, changes=changes, own_advice=advice)
