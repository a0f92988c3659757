"""The types of the audit's causes: numbers and logits of a response, and the variant of one stage of a log-prob.

A log-prob is computed in stages, and a variant replaces one stage:

    weights, input -> logits -> distribution (temperature, penalties, cuts) -> quantity (whose log-prob) -> unit (what
    is recorded)

A prediction is float64 [n] for each response. Some variants have a parameter: `candidates` proposes values from the
numbers, and with `refine` the best value is improved by least squares. `search` decides by the size of the remaining
error which variant is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.testing.audit.forward import Pass
from ppo_repro.testing.audit.rounding import Format
from ppo_repro.testing.audit.subject import StackSampling
from ppo_repro.testing.causes import CAUSES, Cause

Stage = Literal["weights", "input", "distribution", "quantity", "unit"]
Rounding = Literal["", "computed", "weights", "part", "logits"]


@dataclass(frozen=True)
class Numbers:
    """Recorded and right log-probs of one response of n tokens: float64 [n] in nats, bool [n]."""

    recorded: Tensor
    usable: Tensor  # finite, and judged
    counts: Tensor
    reference: Tensor  # the log-probs of the model as they should be


@dataclass(frozen=True)
class Piece:
    """Logits of k neighbouring tokens of one response."""

    logits: Tensor  # [k, V]
    targets: Tensor  # [k]
    prompt: tuple[int, ...]  # the ids before the response
    before: tuple[int, ...]  # the response's ids before the first target

    @cached_property
    def seen(self) -> Tensor:
        """Count how often each token occurs before each target, in prompt and response, int32 [k, V]."""
        return self.seen_in_response + self._counted(self.prompt)

    @cached_property
    def seen_in_response(self) -> Tensor:
        """Count how often each token occurs before each target in the response, int32 [k, V]."""
        counts = torch.zeros_like(self.logits, dtype=torch.int32)
        counts[range(1, len(counts)), self.targets[:-1]] = 1
        return counts.cumsum(0, dtype=torch.int32) + self._counted(self.before)

    def _counted(self, ids: tuple[int, ...]) -> Tensor:
        on = torch.tensor(ids, dtype=torch.long, device=self.logits.device)
        return torch.bincount(on, minlength=self.logits.shape[-1]).int()


@dataclass(frozen=True)
class RecordedPiece(Piece):
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


# of the piece's logits [k, V]: logits whose softmax is the distribution; of its log-probs [k, V]: the quantity [k]; of
# the quantity of the whole response [n], NaN where it is not known: what is recorded [n]. The number is the parameter
Replacement = Callable[[RecordedPiece, StackSampling, Tensor, float], Tensor]
Candidates = Callable[[Sequence[RecordedPiece], StackSampling], Sequence[float]]


@dataclass(frozen=True, eq=False)  # two variants are never the same: what one predicts is kept under the variant
class Variant:
    """One cause: in one stage, what is computed instead, what that presumes, and how it is said.

    `words` may contain {x}, the parameter, and {given}, the user's temperature.
    """

    words: str
    stage: Stage
    cause: Cause
    change: Replacement | None = None  # of a distribution, a quantity or a unit
    make: Callable[[], PreTrainedModel] | None = None  # weights: the model that computes the logits
    passes: Sequence[Sequence[Pass]] = ()  # input: the forward passes of each response
    candidates: Candidates | None = None
    refine: bool = False
    is_temperature: bool = False  # the parameter is what all logits are divided by
    presumes: Callable[[StackSampling], bool] = lambda sampling: True
    in_pairs: int = 0  # so many of its candidates are tried together with another cause
    rounding: Rounding = ""  # what is rounded to `format`
    format: Format | None = None
    count: int = 1  # of changes that the cause consists of
    option_advice: str = ""  # of an option of the model's architecture, else the advice of the cause

    @property
    def advice(self) -> str:
        """Return what to do about the cause."""
        return self.option_advice or CAUSES[self.cause].mend

    @property
    def deviations(self) -> float:
        """Return the number of changes; a fitted parameter counts half a change more."""
        return self.count + 0.5 * (self.candidates is not None)
