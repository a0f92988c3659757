"""Predict the numbers of some tokens, stage by stage: a stage is as it should be, or as its cause says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_repro.testing.audit.causes.cause import OtherDistribution, OtherQuantity, OtherUnit, Stage
from ppo_repro.testing.audit.distributions import Chunk, Definition, target_logprobs
from ppo_repro.testing.audit.search.combination import PLAIN, Combination
from ppo_repro.testing.audit.search.logits import Key, Logits
from ppo_repro.testing.audit.search.windows import Tokens


class Predictor:
    """Predict numbers from the logits of some responses; `right` are their log-probs by the right `definition`.

    Remembered are all log-probs of targets, and the last ones of all tokens, which are large.
    """

    def __init__(self, logits: Logits, definition: Definition, right: Sequence[Tensor]) -> None:
        self.logits, self.definition, self.right = logits, definition, right
        self._of_targets: dict[Key, list[Tensor]] = {}
        self._of_all: tuple[Key | None, list[list[Tensor]]] = (None, [])

    def __call__(self, combination: Combination, tokens: Tokens) -> list[Tensor]:
        """Return the predicted numbers of each window, float64; NaN for tokens without a prediction."""
        unit = combination.get(OtherUnit)
        if unit is None:
            return self._quantities(combination, tokens)
        first = [chunks[0] for chunks in self.logits.chunks(PLAIN, tokens)]
        wholes = self._whole_responses(combination, tokens)
        triples = zip(first, wholes, tokens.windows, strict=True)
        return [unit.applied(chunk, whole, combination.value_of(unit))[w.here] for chunk, whole, w in triples]

    def _whole_responses(self, combination: Combination, tokens: Tokens) -> list[Tensor]:
        """Return the quantity of all tokens of each window's response, NaN outside the window unless it is right."""
        right = [self.right[w.response] for w in tokens.windows]
        if len(combination.causes) == 1:
            return right
        wholes = [torch.full_like(of_response, math.nan) for of_response in right]
        for whole, w, values in zip(wholes, tokens.windows, self._quantities(combination, tokens), strict=True):
            whole[w.here] = values
        return wholes

    def _quantities(self, combination: Combination, tokens: Tokens) -> list[Tensor]:
        """Return the quantity of each token, by window; without a cause in this stage its log-prob."""
        if combination == PLAIN:
            return [self.right[w.response][w.here] for w in tokens.windows]
        causes = combination.up_to(Stage.DISTRIBUTION)
        quantity = combination.get(OtherQuantity)
        if quantity is None:
            return self._logprobs_of_targets(causes, tokens)
        quantities = []
        value = combination.value_of(quantity)
        windows = zip(self.logits.chunks(causes, tokens), self._logprobs_of_all(causes, tokens), strict=True)
        for chunks, logprobs in windows:
            pairs = zip(chunks, logprobs, strict=True)
            quantities.append(torch.cat([quantity.applied(chunk, logp, value).double() for chunk, logp in pairs]))
        return quantities

    def _logprobs_of_targets(self, causes: Combination, tokens: Tokens) -> list[Tensor]:
        """Return the log-probs of the targets, by window."""
        if (causes, tokens) not in self._of_targets:
            self._of_targets[causes, tokens] = [
                torch.cat([self._of_target(causes, chunk).double() for chunk in chunks])
                for chunks in self.logits.chunks(causes, tokens)
            ]
        return self._of_targets[causes, tokens]

    def _logprobs_of_all(self, causes: Combination, tokens: Tokens) -> list[list[Tensor]]:
        """Return the log-probs of all tokens, by window and chunk."""
        if self._of_all[0] != (causes, tokens):
            windows = self.logits.chunks(causes, tokens)
            logprobs = [[self._scaled(causes, chunk).log_softmax(-1) for chunk in chunks] for chunks in windows]
            self._of_all = (causes, tokens), logprobs
        return self._of_all[1]

    def _of_target(self, causes: Combination, chunk: Chunk) -> Tensor:
        if causes.get(OtherDistribution) is None:
            return self.definition.target_logprobs(chunk)
        return target_logprobs(chunk.targets, self._scaled(causes, chunk))

    def _scaled(self, causes: Combination, chunk: Chunk) -> Tensor:
        """Return logits [k, V] whose softmax is the distribution."""
        distribution = causes.get(OtherDistribution)
        if distribution is None:
            return self.definition.logits(chunk)
        return distribution.applied(chunk, chunk.logits, causes.value)
