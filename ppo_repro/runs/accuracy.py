"""Measure how far log-probs of a policy, and of stock transformers, are from the unmodified model in float64.

A run measures its own policy at its start. The reference is the transformers class in float64, which computes each
sequence alone, with the model's own masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.config.numerics import RunNumericsConfig
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import policy_logits
from ppo_repro.models.stock import float64, stock_model
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.records.notes import Accuracy

LENGTH = 64  # tokens of a sequence that a run measures


@dataclass(frozen=True)
class Text:
    """Token ids of some prompts and of a response to each. The n response tokens are scored in order."""

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]

    def tokens(self) -> int:
        """Return the number of response tokens, n."""
        return sum(map(len, self.responses))


@dataclass(frozen=True)
class Scores:
    """Logits [n, V] that predict the response tokens, and the tokens' log-probs [n] in nats, in the model's dtype."""

    logits: Tensor
    logprobs: Tensor


@torch.no_grad()
def stock_scores(model: PreTrainedModel, text: Text) -> Scores:
    """Score a text by the unmodified model in its dtype, each sequence alone, with a softmax in float32 or float64."""
    logits, logprobs = [], []
    for prompt, response in zip(text.prompts, text.responses, strict=True):
        ids = torch.tensor([[*prompt, *response[:-1]]], device=model.device)
        logits.append(model(input_ids=ids, use_cache=False).logits[0][len(prompt) - 1 :])
        wide = logits[-1].to(torch.promote_types(logits[-1].dtype, torch.float32))
        logprobs.append(wide.log_softmax(-1).gather(-1, torch.tensor(response, device=model.device)[:, None])[:, 0])
    return Scores(torch.cat(logits), torch.cat(logprobs))


def bfloat16_scores(model: PreTrainedModel, text: Text) -> Scores:
    """Score a text by the unmodified model in mixed precision: torch's autocast to bfloat16."""
    with torch.autocast(model.device.type, torch.bfloat16, cache_enabled=False):
        return stock_scores(model, text)


def reference_scores(model: PreTrainedModel, text: Text) -> Scores:
    """Score a text by the unmodified model in float64."""
    with float64(model):
        return stock_scores(model, text)


@torch.no_grad()
def policy_scores(policy: PreTrainedModel, text: Text) -> Scores:
    """Score a text by a policy in deterministic numerics."""
    batch = lay_out(text.prompts, text.responses, "right")
    logits = policy_logits(policy, batch)
    return Scores(logits, token_statistics(logits, batch.targets, 1.0, None, "deterministic")[0])


def spacing(x: Tensor) -> Tensor:
    """Return the distance between neighbouring float32 numbers at each x, in float64 and the shape of x."""
    return torch.from_numpy(np.spacing(x.abs().to(torch.float32).numpy()).astype(np.float64))


@dataclass(frozen=True)
class Error:
    """Largest, rms and mean absolute error of some numbers, in their unit."""

    largest: float
    rms: float
    mean: float


@dataclass(frozen=True)
class Errors:
    """Errors of the same numbers in both numerics.

    `resolution` is the error of the reference after rounding to float32.
    """

    deterministic: Error
    stock: Error
    resolution: Error

    def ratio(self, kind: str) -> float:
        """Return deterministic / stock error, for `kind` = `largest`, `rms` or `mean`.

        The stock error is at least the resolution, because a float32 result can be closer only by luck.
        """
        stock = max(getattr(self.stock, kind), getattr(self.resolution, kind))
        return float(getattr(self.deterministic, kind)) / stock if stock else float("nan")


def error(numbers: Tensor, reference: Tensor) -> Error:
    """Return the error of numbers of any shape. The reference is float64."""
    distance = (numbers.to(torch.float64) - reference).abs()
    return Error(float(distance.max()), float(distance.square().mean().sqrt()), float(distance.mean()))


def errors(deterministic: Tensor, stock: Tensor, reference: Tensor) -> Errors:
    """Return the errors of the same numbers by two kinds of numerics."""
    gaps = spacing(reference)
    # rounding is off by half a spacing at most, by spacing / sqrt(12) in the rms and spacing / 4 in the mean
    resolution = Error(float(gaps.max()) / 2, float(gaps.square().mean().sqrt()) / 12**0.5, float(gaps.mean()) / 4)
    return Errors(error(deterministic, reference), error(stock, reference), resolution)


def text_of(prompt_ids: Mapping[str, Sequence[int]], sequences: int, max_context: int) -> Text:
    """Make sequences of 64 tokens, or of `max_context` if that is shorter. Short prompts are joined, sorted by key.

    The first token of each sequence is its prompt. All other tokens are scored.
    """
    length = min(LENGTH, max_context)
    prompts = cycle(prompt_ids[key] for key in sorted(prompt_ids))
    texts: list[list[int]] = [[] for _ in range(sequences)]
    for tokens in texts:
        while len(tokens) < length:
            tokens += next(prompts)
    return Text([tokens[:1] for tokens in texts], [tokens[1:length] for tokens in texts])


def policy_accuracy(
    numerics: RunNumericsConfig, prompt_ids: Mapping[str, Sequence[int]], policy: PreTrainedModel
) -> Accuracy | None:
    """Measure how far a policy's log-probs are from float64 on a run's prompts; None if the run measures nothing."""
    if numerics.mode == "native" or not numerics.accuracy_sequences:
        return None
    text = text_of(prompt_ids, numerics.accuracy_sequences, numerics.max_context)
    return measure(policy, text, "float32" if numerics.precision == "highest" else "bfloat16")


@torch.no_grad()
def measure(policy: PreTrainedModel, text: Text, peer: str = "float32") -> Accuracy:
    """Compare the log-probs of `text` by a deterministic policy and by its unmodified model with those in float64.

    The unmodified model computes in `peer`, float32 or bfloat16. The policy does not change. Memory holds the logits
    of one sequence at a time.
    """
    stock, peer_scores = stock_model(policy), stock_scores if peer == "float32" else bfloat16_scores
    columns = []
    for prompt, response in zip(text.prompts, text.responses, strict=True):
        sequence = Text([prompt], [response])
        scores = policy_scores(policy, sequence), peer_scores(stock, sequence), reference_scores(stock, sequence)
        columns.append([s.logprobs.cpu() for s in scores])
    measured = errors(*(torch.cat(column) for column in zip(*columns, strict=True)))
    return Accuracy(
        tokens=text.tokens(),
        deterministic_rms=measured.deterministic.rms,
        deterministic_max=measured.deterministic.largest,
        stock_rms=measured.stock.rms,
        stock_max=measured.stock.largest,
        ratio=measured.ratio("rms"),
        stock=peer,
    )
