"""The log-probs that causes predict at some tokens. Computed logits are remembered: they change no number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.stock import float64
from ppo_repro.testing.audit.causes.cause import UNCHANGED, Cause, Numbers, RecordedChunk, Stage
from ppo_repro.testing.audit.distributions import Processing, target_logprobs
from ppo_repro.testing.audit.forward import Pass, States, pass_over, slices, states
from ppo_repro.testing.audit.stack import StackSampling
from ppo_repro.testing.dumps import DumpedResponse

Combination = tuple[tuple[Cause, float], ...]  # causes of different stages, each with the value of its parameter


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
class _Softmax:
    """The distributions of some tokens: by which model and input, and with which cause between logits and softmax."""

    weights: Cause
    inputs: Cause
    tokens: Tokens
    cause: Cause
    x: float  # its parameter


class Predictor:
    """Predict numbers by the stages of a log-prob, of which causes replace some.

    It remembers the logits of the model as it is and of the last changed model, and one other model, because two would
    need more memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        responses: Sequence[DumpedResponse],
        numbers: Sequence[Numbers],
        sampling: StackSampling,
        definition: Processing,
    ) -> None:
        self.model, self.responses, self.numbers = model, responses, numbers
        self.sampling, self.definition = sampling, definition
        self._made: tuple[Cause, PreTrainedModel] = (UNCHANGED, model)
        self._states: dict[tuple[Cause, Cause, Tokens], list[tuple[States, Tensor]]] = {}
        self._chunks: dict[tuple[Cause, Cause, Tokens], list[list[RecordedChunk]]] = {}  # by window, in chunks
        self._logprobs: dict[_Softmax, list[Tensor]] = {}  # log-probs of the targets, by window
        self._logp: tuple[_Softmax | None, list[list[Tensor]]] = (None, [])  # of all tokens, the last ones

    def __call__(self, combination: Combination, tokens: Tokens) -> list[Tensor]:
        """Return the predicted numbers of each window, float64; NaN for tokens without a prediction."""
        stage = {cause.stage: (cause, x) for cause, x in combination}
        unit, x = stage.pop("unit", (UNCHANGED, 0.0))
        parts = self._quantities(stage, tokens) if stage else None
        found = []
        for k, w in enumerate(tokens.windows):
            values, at = self.numbers[w.response].reference, slice(w.start, w.end)
            if parts is not None:
                values = torch.full_like(values, math.nan)
                values[at] = parts[k]
            if unit.change is not None:
                values = unit.change(self.chunks(UNCHANGED, UNCHANGED, tokens)[k][0], self.sampling, values, x)
            found.append(values[at])
        return found

    def _quantities(self, stage: Mapping[Stage, tuple[Cause, float]], tokens: Tokens) -> list[Tensor]:
        """Return the quantity of each token, by window; without a cause in this stage its log-prob."""
        weights, _ = stage.get("weights", (UNCHANGED, 0.0))
        inputs, _ = stage.get("input", (UNCHANGED, 0.0))
        softmax = _Softmax(weights, inputs, tokens, *stage.get("distribution", (UNCHANGED, 0.0)))
        wanted, x = stage.get("quantity", (UNCHANGED, 0.0))
        if wanted.change is None:
            return self._of_targets(softmax)
        found = []
        for chunks, logprobs in zip(self.chunks(weights, inputs, tokens), self._of_all(softmax), strict=True):
            pairs = zip(chunks, logprobs, strict=True)
            found.append(torch.cat([wanted.change(chunk, self.sampling, logp, x).double() for chunk, logp in pairs]))
        return found

    def _of_targets(self, softmax: _Softmax) -> list[Tensor]:
        """Return the log-probs of the targets, by window."""
        if softmax not in self._logprobs:
            windows = self.chunks(softmax.weights, softmax.inputs, softmax.tokens)
            self._logprobs[softmax] = [
                torch.cat([target_logprobs(chunk.targets, self._scaled(softmax, chunk)).double() for chunk in chunks])
                for chunks in windows
            ]
        return self._logprobs[softmax]

    def _of_all(self, softmax: _Softmax) -> list[list[Tensor]]:
        """Return the log-probs of all tokens, by window and chunk; they are large, so only the last ones are kept."""
        windows = self.chunks(softmax.weights, softmax.inputs, softmax.tokens)
        if self._logp[0] != softmax:
            logprobs = [[self._scaled(softmax, chunk).log_softmax(-1) for chunk in chunks] for chunks in windows]
            self._logp = softmax, logprobs
        return self._logp[1]

    def _scaled(self, softmax: _Softmax, chunk: RecordedChunk) -> Tensor:
        change = softmax.cause.change or self.definition
        return change(chunk, self.sampling, chunk.logits, softmax.x)

    def chunks(self, weights: Cause, inputs: Cause, tokens: Tokens) -> list[list[RecordedChunk]]:
        """Return the chunks of logits of each window."""
        key = weights, inputs, tokens
        if key not in self._chunks:
            for other in [k for k in self._chunks if k[:2] != (UNCHANGED, UNCHANGED)]:
                del self._chunks[other]
            of_windows, windows = self._hidden(weights, inputs, tokens), tokens.windows
            joined = replace(of_windows[0][0], values=torch.cat([x.values for x, _ in of_windows]))
            with self._as_computed(weights, inputs, tokens):
                logits = joined.logits(self._of(weights))
            by_window = logits.to(_precision(weights, inputs, tokens)).split([w.end - w.start for w in windows])
            triples = zip(windows, by_window, of_windows, strict=True)
            self._chunks[key] = [list(self._cut(w, x, targets)) for w, x, (_, targets) in triples]
        return self._chunks[key]

    def _cut(self, w: Window, logits: Tensor, targets: Tensor) -> Iterator[RecordedChunk]:
        r = self.responses[w.response]
        for at in slices(*logits.shape):
            before = r.response_ids[: w.start + at.start]
            yield RecordedChunk(logits[at], targets[at], r.prompt_ids, before, self.numbers[w.response])

    def _hidden(self, weights: Cause, inputs: Cause, tokens: Tokens) -> list[tuple[States, Tensor]]:
        """Return the states that predict each window's tokens, and the targets, which another input may change."""
        key = weights, inputs, tokens
        if key in self._states:
            return self._states[key]
        model, windows, passes = self._of(weights), list[int](), list[Pass]()
        for k, w in enumerate(tokens.windows):
            r = self.responses[w.response]
            for one in inputs.passes[w.response] if inputs.passes else [pass_over(r.prompt_ids, r.response_ids)]:
                if (part := one.within(w.start, w.end)) is not None:
                    windows.append(k)
                    passes.append(part)
        with self._as_computed(weights, inputs, tokens):
            of_passes = dict(states(model, passes))
        first, found = of_passes[0], []
        for w in tokens.windows:
            size = w.end - w.start, first.values.shape[-1]
            targets = torch.tensor(self.responses[w.response].response_ids[w.start : w.end], device=model.device)
            found.append((replace(first, values=first.values.new_full(size, math.nan)), targets))
        for number, (k, one) in enumerate(zip(windows, passes, strict=True)):
            at = [t - tokens.windows[k].start for t in one.tokens]
            found[k][0].values[at] = of_passes[number].values
            found[k][1][at] = torch.tensor(one.targets, device=model.device)
        if first.output is not None:  # else they are logits
            self._states[key] = found
        return found

    def _as_computed(self, weights: Cause, inputs: Cause, tokens: Tokens) -> AbstractContextManager[Any]:
        """Compute the model in float64 while the block runs, unless 16 bits are the cause or float32 suffices."""
        is_narrow = weights.rounds("computed") or _precision(weights, inputs, tokens) == torch.float32
        return nullcontext() if is_narrow else float64(self._of(weights))

    def _of(self, weights: Cause) -> PreTrainedModel:
        if weights.make is None:
            return self.model
        if weights is not self._made[0]:
            self._made = UNCHANGED, self.model
            self._made = weights, weights.make()
        return self._made[1]


def _precision(weights: Cause, inputs: Cause, tokens: Tokens) -> torch.dtype:
    is_changed = (weights, inputs) != (UNCHANGED, UNCHANGED)
    return torch.float32 if tokens.is_screening and is_changed else torch.float64
