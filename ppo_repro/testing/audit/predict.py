"""The numbers that causes predict at some tokens: stage by stage, of which causes replace some."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.testing.audit.causes.cause import RecordedChunk
from ppo_repro.testing.audit.combination import CauseAt, Combination
from ppo_repro.testing.audit.distributions import Processing, target_logprobs
from ppo_repro.testing.audit.logits import Logits, Source, Tokens
from ppo_repro.testing.audit.stack import StackSampling


@dataclass(frozen=True)
class Softmax:
    """A distribution: the logits of a source, and the cause between logits and softmax."""

    source: Source
    cause: CauseAt | None


def source_of(combination: Combination, tokens: Tokens) -> Source:
    """Return the model and the input that some causes compute logits from."""
    weights, inputs = combination.at("weights"), combination.at("input")
    return Source(None if weights is None else weights.cause, None if inputs is None else inputs.cause, tokens)


class Predictor:
    """Predict numbers from the logits of some responses; `definition` is the right distribution of their log-probs.

    Remembered are all log-probs of targets, and the last ones of all tokens, which are large.
    """

    def __init__(self, logits: Logits, sampling: StackSampling, definition: Processing) -> None:
        self.logits, self.sampling, self.definition = logits, sampling, definition
        self._of_targets: dict[Softmax, list[Tensor]] = {}
        self._of_all: tuple[Softmax | None, list[list[Tensor]]] = (None, [])

    def __call__(self, combination: Combination, tokens: Tokens) -> list[Tensor]:
        """Return the predicted numbers of each window, float64; NaN for tokens without a prediction."""
        unit = combination.at("unit")
        is_unit_alone = all(of is unit for of in combination.causes)
        parts = None if is_unit_alone else self._quantities(combination, tokens)
        as_it_is = self.logits.chunks(Source(None, None, tokens)) if unit else []
        found = []
        for k, w in enumerate(tokens.windows):
            values, at = self.logits.numbers[w.response].reference, slice(w.start, w.end)
            if parts is not None:
                values = torch.full_like(values, math.nan)
                values[at] = parts[k]
            if unit is not None:
                values = unit.applied(as_it_is[k][0], self.sampling, values)
            found.append(values[at])
        return found

    def _quantities(self, combination: Combination, tokens: Tokens) -> list[Tensor]:
        """Return the quantity of each token, by window; without a cause in this stage its log-prob."""
        softmax = Softmax(source_of(combination, tokens), combination.at("distribution"))
        quantity = combination.at("quantity")
        if quantity is None:
            return self._logprobs_of_targets(softmax)
        found = []
        windows, of_all = self.logits.chunks(softmax.source), self._logprobs_of_all(softmax)
        for chunks, logprobs in zip(windows, of_all, strict=True):
            pairs = zip(chunks, logprobs, strict=True)
            found.append(torch.cat([quantity.applied(chunk, self.sampling, logp).double() for chunk, logp in pairs]))
        return found

    def _logprobs_of_targets(self, softmax: Softmax) -> list[Tensor]:
        """Return the log-probs of the targets, by window."""
        if softmax not in self._of_targets:
            self._of_targets[softmax] = [
                torch.cat([target_logprobs(chunk.targets, self._scaled(softmax, chunk)).double() for chunk in chunks])
                for chunks in self.logits.chunks(softmax.source)
            ]
        return self._of_targets[softmax]

    def _logprobs_of_all(self, softmax: Softmax) -> list[list[Tensor]]:
        """Return the log-probs of all tokens, by window and chunk."""
        if self._of_all[0] != softmax:
            windows = self.logits.chunks(softmax.source)
            logprobs = [[self._scaled(softmax, chunk).log_softmax(-1) for chunk in chunks] for chunks in windows]
            self._of_all = softmax, logprobs
        return self._of_all[1]

    def _scaled(self, softmax: Softmax, chunk: RecordedChunk) -> Tensor:
        change = self.definition if softmax.cause is None else softmax.cause.applied
        return change(chunk, self.sampling, chunk.logits)
