"""What the trainer does otherwise than the sampler, on purpose: the section `mismatch.trainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_repro.buffers import Rollout
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.numerics.token_statistics import expand_kept
from ppo_repro.ppo.weights import loss_weights
from ppo_repro.seeding import words
from ppo_repro.stages.prompts import Task

Stream = tuple[int | str, ...]  # the name of a random stream


def training_temperature(config: RunConfig) -> float:
    """What the trainer divides logits by."""
    return config.rollout.temperature if config.mismatch.trainer.temperature_scored else 1.0


def training_eligible(config: RunConfig, kept_tokens: Tensor, vocab_size: int) -> Tensor | None:
    """The tokens over which the trainer normalises, bool [n, V]; None for all. `kept_tokens` [n, W] uint8."""
    return expand_kept(kept_tokens, vocab_size) if config.mismatch.trainer.top_p_scored else None


def training_prompt(config: RunConfig, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens before a response as the trainer has them."""
    faults = config.mismatch.trainer
    before, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        for text in (faults.prompt_before, faults.prompt_after)
    )
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    return (*[padding] * (faults.padding_leak - len(ids)), *before, *ids, *after)


def check_training_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompt_ids: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise UserError where the trainer's prompts are those of the sampler all the same, or have no room."""
    faults = config.mismatch.trainer
    if not faults.prompts_differ:
        return
    by_key = {key: training_prompt(config, tokenizer, ids) for key, ids in prompt_ids.items()}
    for field in ("prompt_before", "prompt_after"):
        text = getattr(faults, field)
        if text and not tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise UserError(f"mismatch.trainer.{field} = {text!r}: has no token in this tokenizer; write another text")
    shortest = min(map(len, prompt_ids.values()))
    if 0 < faults.padding_leak <= shortest:
        raise UserError(
            f"mismatch.trainer.padding_leak = {faults.padding_leak}: the shortest prompt has {shortest} tokens, so "
            "none is padded; set more"
        )
    key, longest = max(by_key.items(), key=lambda item: len(item[1]))
    total = len(longest) + config.rollout.max_response_tokens
    if total > config.numerics.max_context:
        raise UserError(
            f"mismatch.trainer: prompt {key!r} has {len(longest)} tokens in training; with "
            f"rollout.max_response_tokens it exceeds numerics.max_context = {config.numerics.max_context}; raise that"
        )


def as_trained(config: RunConfig, task: Task, rollout: Rollout) -> Rollout:
    """The rollout with the trainer's prompts; the same object where they are the sampler's."""
    if not config.mismatch.trainer.prompts_differ:
        return rollout
    prompts = rollout.prompts
    ids = tuple(training_prompt(config, task.tokenizer, prompt) for prompt in prompts.prompt_ids)
    return replace(rollout, prompts=replace(prompts, prompt_ids=ids))


def dropped(config: RunConfig, hidden: Tensor, tokens: Tensor, stream: Stream) -> Tensor:
    """Hidden states [n, H] of `tokens` [n] after dropout: zeros with probability p, the others over 1 - p.

    What is dropped of a token depends on the seed, the stream and the token's number in its iteration alone.
    """
    p = config.mismatch.trainer.dropout
    if not p:
        return hidden
    width = hidden.shape[1]
    least = np.uint64(int(p * 2.0**64))
    kept = [words(width, "dropout", config.seed, *stream, token) >= least for token in tokens.tolist()]
    factors = torch.from_numpy(np.array(kept).reshape(-1, width)).to(torch.float32) * (1.0 / (1.0 - p))
    return hidden * factors.to(hidden.device)


def training_weights(
    config: RunConfig, lengths: Tensor, finish_reasons: Sequence[str], counted: Tensor | None
) -> Tensor:
    """`loss_weights` of a minibatch [M]; without end tokens in the loss theirs are 0, and those of the rest as alone.

    lengths [S] int64; a response that stopped ends with an end token. `counted` [M] bool: other tokens are in no loss.
    """
    aggregation = config.ppo.aggregation
    if config.mismatch.trainer.eos_in_loss:
        return loss_weights(aggregation, lengths, counted)
    ended = torch.tensor([reason == "stop" for reason in finish_reasons])
    rest = lengths - ended.to(torch.int64)
    weights = torch.zeros(int(lengths.sum()))
    last = torch.zeros(len(weights), dtype=torch.bool)
    last[(lengths.cumsum(0) - 1)[ended]] = True
    if counted is not None:
        return loss_weights(aggregation, lengths, counted & ~last)
    if bool((rest > 0).any()):
        weights[~last] = _of_some(aggregation, rest)
    return weights


def _of_some(aggregation: str, lengths: Tensor) -> Tensor:
    """`loss_weights` where some responses may have no token left; they still count as responses."""
    some = lengths[lengths > 0]
    share = 1.0 if aggregation == "token_mean" else len(some) / len(lengths)
    return loss_weights(aggregation, some) * share
