"""Hidden states of forward passes, and logits of a few tokens at a time by the model's own forward.

Logits of a large vocabulary need more time and memory than the layers below. So the decoder computes once, and the rest
of the model's forward computes logits from the decoder's output where they are needed.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ppo_repro.base.output import say
from ppo_repro.testing.audit.patches import patched

TOGETHER = 4096  # tokens that are computed together
CHUNK = 1 << 21  # logits that are computed with at once: larger blocks cost the system more than the arithmetic
EVERY = 10.0  # seconds between two lines of progress


@dataclass(frozen=True)
class Pass:
    """One forward pass: `ids` at `positions` (None: from 0); the output at `at[k]` predicts `targets[k]`.

    The log-prob of `targets[k]` is compared with the recorded log-prob of response token `tokens[k]`.
    """

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    at: tuple[int, ...]
    targets: tuple[int, ...]
    positions: tuple[int, ...] | None = None

    def within(self, start: int, end: int) -> Pass | None:
        """Return the pass for response tokens `start` to `end` (exclusive) only; None if it predicts none of them."""
        some = [k for k, token in enumerate(self.tokens) if start <= token < end]
        if not some:
            return None
        length = self.at[some[-1]] + 1
        tokens, at, targets = (tuple(column[k] for k in some) for column in (self.tokens, self.at, self.targets))
        return Pass(self.ids[:length], tokens, at, targets, None if self.positions is None else self.positions[:length])


def pass_over(before: tuple[int, ...], response: tuple[int, ...], positions: tuple[int, ...] | None = None) -> Pass:
    """Return one pass over `before` and the response; if `before` is empty, the first token has no prediction."""
    tokens = tuple(range(0 if before else 1, len(response)))
    at = tuple(len(before) - 1 + t for t in tokens)
    targets = tuple(response[t] for t in tokens)
    return Pass((*before, *response[:-1]), tokens, at, targets, positions)


@dataclass(frozen=True)
class States:
    """Outputs that predict n tokens: hidden states [n, H] of the decoder, or logits [n, V] of a model without one."""

    values: Tensor
    output: Any = None  # the decoder's, of which `values` are the last hidden states; None: `values` are logits

    def logits(self, model: PreTrainedModel, start: int = 0, end: int | None = None) -> Tensor:
        """Return the logits [end - start, V] of tokens `start` to `end`."""
        values = self.values[start:end]
        return values if self.output is None else _head(model, model.get_decoder(), self.output, values[None])[0]


class Progress:
    """Print the progress of a long computation, with an estimate of the seconds left."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.began = self.said = time.monotonic()

    def step(self, done: int = 1) -> None:
        """Count `done` more steps, and print a line if the last line is old."""
        self.done += done
        now = time.monotonic()
        if now - self.said >= EVERY and self.done < self.total:
            seconds = (now - self.began) / self.done * (self.total - self.done)
            say(f"audit: {self.what}: {self.done:,} of {self.total:,}, about {seconds:,.0f} s left")
            self.said = now


def states(
    model: PreTrainedModel, passes: Sequence[Pass], is_apart: bool, is_padded: bool = False
) -> Iterator[tuple[int, States]]:
    """Compute passes, in batches of one length; yield the index of each pass and the states that predict its targets.

    Args:
        model: the model, or a copy of it that a cause changes.
        passes: the passes, of any lengths.
        is_apart: whether the model has a decoder apart (`has_decoder_apart`).
        is_padded: whether a batch may have passes of any length, padded on the right, unless its length changes the
            model.
    """
    is_padded = is_padded and not _rotates_by_length(model)
    order = sorted(range(len(passes)), key=lambda k: (passes[k].positions is None, len(passes[k].ids)))
    for _, alike in groupby(order, lambda k: (passes[k].positions is None, is_padded or len(passes[k].ids))):
        some: list[int] = []
        for k in alike:
            if some and (len(some) + 1) * len(passes[k].ids) > TOGETHER:
                yield from zip(some, _states(model, [passes[k] for k in some], is_apart), strict=True)
                some = []
            some.append(k)
        yield from zip(some, _states(model, [passes[k] for k in some], is_apart), strict=True)


def _rotates_by_length(model: PreTrainedModel) -> bool:
    """Return whether rotary positions depend on the longest row of a batch."""
    # `dynamic` depends on it only above max_position_embeddings, and the audit refuses such lengths
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return any(
        isinstance(scaling, dict) and scaling.get("rope_type") == "longrope" for scaling in (rope, *rope.values())
    )


def slices(length: int, vocabulary: int) -> Iterator[slice]:
    """Split `length` tokens into slices of at most CHUNK logits."""
    size = max(1, CHUNK // vocabulary)
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _states(model: PreTrainedModel, passes: Sequence[Pass], is_apart: bool) -> list[States]:
    length, device = max(len(one.ids) for one in passes), model.device

    def filled(column: Callable[[Pass], Sequence[int]]) -> Tensor:
        rows = [[*column(one), *[column(one)[-1]] * (length - len(one.ids))] for one in passes]
        return torch.tensor(rows, device=device)

    there = torch.tensor([[k < len(one.ids) for k in range(length)] for one in passes], device=device).long()
    options: dict[str, Any] = {"input_ids": filled(lambda one: one.ids), "attention_mask": there, "use_cache": False}
    if passes[0].positions is not None:
        options["position_ids"] = filled(lambda one: one.positions or ())
    first = min(min(one.at) for one in passes)
    if is_apart:
        with _outputs(model.get_decoder()) as found:
            model(**options, **_keeping(model, 1))
        hidden, output = found[0].last_hidden_state, replace(found[0], last_hidden_state=None)
        return [States(x[list(one.at)], output) for x, one in zip(hidden, passes, strict=True)]
    logits = model(**options, **_keeping(model, length - first)).logits[:, first - length :]
    return [States(x[[a - first for a in one.at]]) for x, one in zip(logits, passes, strict=True)]


def _keeping(model: PreTrainedModel, last: int) -> dict[str, int]:
    return {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


@contextmanager
def _outputs(decoder: nn.Module) -> Iterator[list[Any]]:
    """Yield a list that collects the decoder's outputs while the block runs."""
    found: list[Any] = []
    handle = decoder.register_forward_hook(lambda module, given, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()


def _head(model: PreTrainedModel, decoder: Any, output: Any, hidden: Tensor) -> Tensor:
    """Run the model's forward on an output of its decoder: logits [1, n, V] of hidden states [1, n, H]."""
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with patched(decoder, "forward", lambda *args, **options: replace(output, last_hidden_state=hidden)):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def has_decoder_apart(model: PreTrainedModel) -> bool:
    """Return whether the output of a part, the decoder, determines the logits; a trial on three tokens decides."""
    decoder = model.get_decoder()
    if decoder is model:
        return False
    with _outputs(decoder) as found:
        logits = model(input_ids=torch.tensor([[0, 1, 0]], device=model.device), use_cache=False).logits
    if len(found) != 1 or not isinstance(found[0], ModelOutput) or "last_hidden_state" not in found[0]:
        return False
    return torch.equal(_head(model, decoder, found[0], found[0]["last_hidden_state"]), logits)
