"""The numbers that causes predict at some tokens: stage by stage, of which causes replace some."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.testing.audit.causes.cause import UNCHANGED, Cause, Numbers, Stage
from ppo_repro.testing.audit.logits import Logits, LogProbs, Softmax, Source, Tokens
from ppo_repro.testing.audit.stack import StackSampling

Combination = tuple[tuple[Cause, float], ...]  # causes of different stages, each with the value of its parameter


@dataclass(frozen=True)
class Predictor:
    """Predict numbers from the logits and log-probs of some responses."""

    logits: Logits
    logprobs: LogProbs  # of these logits
    numbers: Sequence[Numbers]
    sampling: StackSampling

    def __call__(self, combination: Combination, tokens: Tokens) -> list[Tensor]:
        """Return the predicted numbers of each window, float64; NaN for tokens without a prediction."""
        stage = {cause.stage: (cause, x) for cause, x in combination}
        unit, x = stage.pop("unit", (UNCHANGED, 0.0))
        parts = self._quantities(stage, tokens) if stage else None
        as_it_is = self.logits.chunks(Source(UNCHANGED, UNCHANGED, tokens)) if unit.change else []
        found = []
        for k, w in enumerate(tokens.windows):
            values, at = self.numbers[w.response].reference, slice(w.start, w.end)
            if parts is not None:
                values = torch.full_like(values, math.nan)
                values[at] = parts[k]
            if unit.change is not None:
                values = unit.change(as_it_is[k][0], self.sampling, values, x)
            found.append(values[at])
        return found

    def _quantities(self, stage: Mapping[Stage, tuple[Cause, float]], tokens: Tokens) -> list[Tensor]:
        """Return the quantity of each token, by window; without a cause in this stage its log-prob."""
        weights, _ = stage.get("weights", (UNCHANGED, 0.0))
        inputs, _ = stage.get("input", (UNCHANGED, 0.0))
        softmax = Softmax(Source(weights, inputs, tokens), *stage.get("distribution", (UNCHANGED, 0.0)))
        wanted, x = stage.get("quantity", (UNCHANGED, 0.0))
        if wanted.change is None:
            return self.logprobs.of_targets(softmax)
        found = []
        windows, of_all = self.logits.chunks(softmax.source), self.logprobs.of_all(softmax)
        for chunks, logprobs in zip(windows, of_all, strict=True):
            pairs = zip(chunks, logprobs, strict=True)
            found.append(torch.cat([wanted.change(chunk, self.sampling, logp, x).double() for chunk, logp in pairs]))
        return found
