"""The accuracy of a run's own policy on its own prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import torch
from transformers import PreTrainedModel

from ppo_repro.accuracy.distances import errors
from ppo_repro.accuracy.scores import Float64, Text, policy_scores, stock_scores
from ppo_repro.accuracy.stock import stock_model, wide_model
from ppo_repro.config.run import RunConfig
from ppo_repro.records.accuracy import Accuracy

LENGTH = 64  # tokens of a sequence


def text_of(prompt_ids: Mapping[str, Sequence[int]], sequences: int, max_context: int) -> Text:
    """Sequences of 64 tokens, or of the whole context: prompts by key, strung together where they are shorter.

    The first token of each is its prompt, all others are scored.
    """
    length = min(LENGTH, max_context)
    prompts = cycle(prompt_ids[key] for key in sorted(prompt_ids))
    found: list[list[int]] = []
    for _ in range(sequences):
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += next(prompts)
        found.append(tokens[:length])
    return Text([tokens[:1] for tokens in found], [tokens[1:] for tokens in found])


def policy_accuracy(
    config: RunConfig, prompt_ids: Mapping[str, Sequence[int]], policy: PreTrainedModel
) -> Accuracy | None:
    """How far a policy's log-probs are from float64 on a run's prompts; None where nothing is to be measured."""
    numerics = config.numerics
    if numerics.mode == "native" or not numerics.accuracy_sequences:
        return None
    return measure(policy, text_of(prompt_ids, numerics.accuracy_sequences, numerics.max_context))


@torch.no_grad()
def measure(policy: PreTrainedModel, text: Text) -> Accuracy:
    """Log-probs of `text` by a deterministic policy, by its unmodified model in float32, and by that in float64.

    The policy is not changed. Logits of one sequence at a time are in memory.
    """
    stock, wide = stock_model(policy), wide_model(policy)
    columns = []
    for prompt, response in zip(text.prompts, text.responses, strict=True):
        one = Text([prompt], [response])
        with Float64():
            reference = stock_scores(wide, one).logprobs
        columns.append((policy_scores(policy, one).logprobs, stock_scores(stock, one).logprobs, reference))
    found = errors(*(torch.cat(column) for column in zip(*columns, strict=True)))
    return Accuracy(
        tokens=text.tokens(),
        deterministic_rms=found.deterministic.rms,
        deterministic_max=found.deterministic.largest,
        stock_rms=found.stock.rms,
        stock_max=found.stock.largest,
        ratio=found.ratio("rms"),
    )
