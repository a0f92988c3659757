"""Logits of windows of tokens. Computed ones are remembered, which changes no number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.stock import float64
from ppo_repro.testing.audit.causes.cause import OtherInput, OtherModel, Stage
from ppo_repro.testing.audit.distributions import Chunk
from ppo_repro.testing.audit.forward import Pass, States, has_decoder_apart, pass_over, slices, states
from ppo_repro.testing.audit.search.combination import PLAIN, Combination
from ppo_repro.testing.audit.search.windows import Tokens, Window
from ppo_repro.testing.audit.stack import StackSampling
from ppo_repro.testing.dumps import DumpedResponse

Key = tuple[Combination, Tokens]  # under which computed numbers are remembered


class Logits:
    """Compute logits by window.

    Remembered are all hidden states, which are small; the logits without a cause and with the last causes; and one
    changed model, because two would need more memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        responses: Sequence[DumpedResponse],
        counts: Sequence[Tensor],
        sampling: StackSampling,
    ) -> None:
        self.model, self.responses, self.counts, self.sampling = model, responses, counts, sampling
        self._is_apart = has_decoder_apart(model)
        self._changed: tuple[OtherModel | None, PreTrainedModel] = (None, model)
        self._states: dict[Key, tuple[States, Tensor]] = {}
        self._chunks: dict[Key, list[list[Chunk]]] = {}

    def chunks(self, combination: Combination, tokens: Tokens) -> list[list[Chunk]]:
        """Return the chunks of logits of each window; causes after the logits change nothing here."""
        causes = combination.up_to(Stage.INPUT)
        if (causes, tokens) not in self._chunks:
            self._chunks = {key: chunks for key, chunks in self._chunks.items() if key[0] == PLAIN}
            hidden, targets = self._states_of(causes, tokens)
            with self._precision(causes, tokens):
                logits = hidden.logits(self._model(causes)).to(_dtype(causes, tokens))
            sizes = [w.size for w in tokens.windows]
            parts = zip(tokens.windows, logits.split(sizes), targets.split(sizes), strict=True)
            self._chunks[causes, tokens] = [list(self._cut(w, x, of_window)) for w, x, of_window in parts]
        return self._chunks[causes, tokens]

    def _cut(self, w: Window, logits: Tensor, targets: Tensor) -> Iterator[Chunk]:
        r = self.responses[w.response]
        for at in slices(*logits.shape):
            before = r.response_ids[: w.start + at.start]
            yield Chunk(logits[at], targets[at], r.prompt_ids, before, self.sampling, self.counts[w.response])

    def _states_of(self, causes: Combination, tokens: Tokens) -> tuple[States, Tensor]:
        """Return the states that predict the tokens of all windows, and the targets, which another input may change.

        The rows of window 1 follow those of window 0. What no pass predicts is NaN.
        """
        if (causes, tokens) in self._states:
            return self._states[causes, tokens]
        model = self._model(causes)
        targets = list[int]()
        passes = list[Pass]()
        rows = list[int]()  # where the tokens of the passes are
        for w in tokens.windows:
            for one in self._passes(causes.get(OtherInput), w):
                passes.append(one)
                rows += [len(targets) + token - w.start for token in one.tokens]
            targets += self.responses[w.response].response_ids[w.start : w.end]
        # other weights may be of another class
        is_apart = self._is_apart if isinstance(model, type(self.model)) else has_decoder_apart(model)
        with self._precision(causes, tokens):
            by_pass = dict(states(model, passes, is_apart))
        at = torch.tensor(rows, device=model.device)
        predicted = torch.cat([by_pass[k].values for k in range(len(passes))])
        values = predicted.new_full((len(targets), predicted.shape[-1]), math.nan).index_copy_(0, at, predicted)
        of_passes = torch.tensor([token for one in passes for token in one.targets], device=model.device)
        every = torch.tensor(targets, device=model.device).index_copy_(0, at, of_passes)
        found = replace(by_pass[0], values=values), every
        if by_pass[0].output is not None:  # else they are logits
            self._states[causes, tokens] = found
        return found

    def _passes(self, cause: OtherInput | None, w: Window) -> list[Pass]:
        """Return the forward passes that predict the tokens of a window; another input may need several."""
        r = self.responses[w.response]
        changed = None if cause is None else cause.passes[w.response]
        whole = changed or [pass_over(r.prompt_ids, r.response_ids)]
        return [part for one in whole if (part := one.within(w.start, w.end)) is not None]

    def _precision(self, causes: Combination, tokens: Tokens) -> AbstractContextManager[Any]:
        """Compute the model in float64 while the block runs, unless 16 bits are the cause or float32 suffices."""
        is_narrow = any(cause.rounds("computed") for cause in causes.causes)
        suffices = _dtype(causes, tokens) == torch.float32
        return nullcontext() if is_narrow or suffices else float64(self._model(causes))

    def _model(self, causes: Combination) -> PreTrainedModel:
        cause = causes.get(OtherModel)
        if cause is None:
            return self.model
        if cause is not self._changed[0]:
            self._changed = None, self.model  # frees the last one before another is made
            self._changed = cause, cause.make()
        return self._changed[1]


def _dtype(causes: Combination, tokens: Tokens) -> torch.dtype:
    """Return the format of the logits."""
    return torch.float32 if tokens.is_screening and causes != PLAIN else torch.float64
