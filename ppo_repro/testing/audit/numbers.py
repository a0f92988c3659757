"""What a side recorded, beside the right log-probs, and which of it is judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.distributions import Chunk


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

    def are_wrong(self, tolerance: float) -> Tensor:
        """Return which tokens [n] are wrong by more than `tolerance` nats."""
        return self.usable & ~((self.recorded - self.reference).abs() <= tolerance)

    def to(self, device: torch.device) -> Numbers:
        """Return the numbers on a device."""
        return Numbers(*(x.to(device) for x in (self.recorded, self.usable, self.counts, self.reference)))


def numbers_of(recorded: Tensor, counts: Tensor, right: Tensor) -> Numbers:
    """Return the numbers of a response; a 0 of a token that is not sure is unusable."""
    numbers = Numbers(recorded, counts & recorded.isfinite(), counts, right)
    return replace(numbers, usable=numbers.usable & ~numbers.unlikely_zeros)


@dataclass(frozen=True)
class RecordedChunk:
    """Logits of k neighbouring tokens, and the numbers of their response."""

    chunk: Chunk
    numbers: Numbers

    @property
    def recorded(self) -> Tensor:
        """Return the recorded numbers [k] of the tokens."""
        return self.numbers.recorded[self.chunk.here]

    @property
    def usable(self) -> Tensor:
        """Return which of the k tokens are judged, bool [k]."""
        return self.numbers.usable[self.chunk.here]
