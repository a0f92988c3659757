"""Logits of windows of tokens. Computed ones are remembered, which changes no number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.stock import float64
from ppo_repro.testing.audit.causes.cause import CauseOf, MakeModel, Numbers, Passes, RecordedChunk
from ppo_repro.testing.audit.forward import Pass, States, has_decoder_apart, pass_over, slices, states
from ppo_repro.testing.dumps import DumpedResponse


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `end` of the response with index `response`."""

    response: int
    start: int
    end: int


@dataclass(frozen=True)
class Tokens:
    """Windows of tokens; for screening, other models and inputs are computed in float32, which suffices."""

    windows: tuple[Window, ...]
    is_screening: bool = False


@dataclass(frozen=True)
class Source:
    """What logits are computed from: which model, which input, and at which tokens."""

    weights: CauseOf[MakeModel] | None
    inputs: CauseOf[Passes] | None
    tokens: Tokens

    @property
    def is_changed(self) -> bool:
        """Return whether the model or its input is another."""
        return self.weights is not None or self.inputs is not None

    @property
    def dtype(self) -> torch.dtype:
        """Return the format of the logits."""
        return torch.float32 if self.tokens.is_screening and self.is_changed else torch.float64


class Logits:
    """Compute logits by window.

    Remembered are all hidden states, which are small; the logits of the model as it is and of the last other source;
    and one changed model, because two would need more memory.
    """

    def __init__(self, model: PreTrainedModel, responses: Sequence[DumpedResponse], numbers: Sequence[Numbers]) -> None:
        self.model, self.responses, self.numbers = model, responses, numbers
        self._is_apart = has_decoder_apart(model)
        self._changed: tuple[CauseOf[MakeModel] | None, PreTrainedModel] = (None, model)
        self._hidden: dict[Source, list[tuple[States, Tensor]]] = {}
        self._chunks: dict[Source, list[list[RecordedChunk]]] = {}

    def chunks(self, source: Source) -> list[list[RecordedChunk]]:
        """Return the chunks of logits of each window."""
        if source not in self._chunks:
            self._chunks = {of: chunks for of, chunks in self._chunks.items() if not of.is_changed}
            hidden, windows = self._hidden_of(source), source.tokens.windows
            joined = replace(hidden[0][0], values=torch.cat([of_window.values for of_window, _ in hidden]))
            with self._precision(source):
                logits = joined.logits(self._model(source.weights))
            by_window = logits.to(source.dtype).split([w.end - w.start for w in windows])
            triples = zip(windows, by_window, hidden, strict=True)
            self._chunks[source] = [list(self._cut(w, x, targets)) for w, x, (_, targets) in triples]
        return self._chunks[source]

    def _cut(self, w: Window, logits: Tensor, targets: Tensor) -> Iterator[RecordedChunk]:
        r = self.responses[w.response]
        for at in slices(*logits.shape):
            before = r.response_ids[: w.start + at.start]
            yield RecordedChunk(logits[at], targets[at], r.prompt_ids, before, self.numbers[w.response])

    def _hidden_of(self, source: Source) -> list[tuple[States, Tensor]]:
        """Return the states that predict each window's tokens, and the targets, which another input may change.

        Two responses of 3 tokens, with windows 0 to 3 and 1 to 3, have states [3, H] and [2, H]. If an input computes
        the first response in two passes, both fill its window. What no pass predicts is NaN.
        """
        if source in self._hidden:
            return self._hidden[source]
        windows, numbered = source.tokens.windows, list[tuple[int, Pass]]()
        for k, w in enumerate(windows):
            r = self.responses[w.response]
            plain = [pass_over(r.prompt_ids, r.response_ids)]
            for one in plain if source.inputs is None else source.inputs.change[w.response]:
                if (part := one.within(w.start, w.end)) is not None:
                    numbered.append((k, part))
        model = self._model(source.weights)
        is_apart = self._is_apart if isinstance(model, type(self.model)) else has_decoder_apart(model)
        with self._precision(source):
            of_passes = dict(states(model, [part for _, part in numbered], is_apart))
        first, hidden = of_passes[0], []
        for w in windows:
            size = w.end - w.start, first.values.shape[-1]
            targets = torch.tensor(self.responses[w.response].response_ids[w.start : w.end], device=model.device)
            hidden.append((replace(first, values=first.values.new_full(size, math.nan)), targets))
        for number, (k, part) in enumerate(numbered):
            at = [t - windows[k].start for t in part.tokens]
            hidden[k][0].values[at] = of_passes[number].values
            hidden[k][1][at] = torch.tensor(part.targets, device=model.device)
        if first.output is not None:  # else they are logits
            self._hidden[source] = hidden
        return hidden

    def _precision(self, source: Source) -> AbstractContextManager[Any]:
        """Compute the model in float64 while the block runs, unless 16 bits are the cause or float32 suffices."""
        is_narrow = source.weights is not None and source.weights.rounds("computed")
        return nullcontext() if is_narrow or source.dtype == torch.float32 else float64(self._model(source.weights))

    def _model(self, weights: CauseOf[MakeModel] | None) -> PreTrainedModel:
        if weights is None:
            return self.model
        if weights is not self._changed[0]:
            self._changed = None, self.model  # frees the last one before another is made
            self._changed = weights, weights.change()
        return self._changed[1]
