"""Add deliberate faults to the trainer, which the section `mismatch.trainer` configures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_repro.base.errors import UserError
from ppo_repro.base.seeding import words
from ppo_repro.buffers import Rollout
from ppo_repro.config.mismatch import TrainerFaults
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import HiddenHook, Stream, unchanged


def received(faults: TrainerFaults, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Return the rollout as the trainer gets it: changed by the faults, or `rollout` itself without faults."""
    prompts = rollout.prompts
    if faults.prompts_differ:
        ids = tuple(training_prompt(faults, tokenizer, prompt) for prompt in prompts.prompt_ids)
        rollout = replace(rollout, prompts=replace(prompts, prompt_ids=ids))
    if not faults.temperature_scored:
        rollout = replace(rollout, temperature=1.0)
    if not faults.top_p_scored:
        rollout = replace(rollout, kept_tokens=rollout.kept_tokens[:, :0])
    return with_loss_mask(faults, rollout)


def with_loss_mask(faults: TrainerFaults, rollout: Rollout) -> Rollout:
    """Unless `faults.eos_in_loss`, leave the end token of each stopped response out of the losses."""
    if faults.eos_in_loss:
        return rollout
    in_losses = torch.ones(len(rollout.response_ids), dtype=torch.bool)
    ended = torch.tensor([reason == "stop" for reason in rollout.finish_reason])
    in_losses[(rollout.lengths.cumsum(0) - 1)[ended]] = False
    return replace(rollout, in_losses=in_losses)


def training_prompt(faults: TrainerFaults, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[int, ...]:
    """Return the token ids before a response as the trainer sees them: `ids` with the faults applied."""
    before, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        for text in (faults.prompt_before, faults.prompt_after)
    )
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    return (*[padding] * (faults.padding_leak - len(ids)), *before, *ids, *after)


def check_training_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompt_ids: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise UserError if a fault leaves the trainer's prompts unchanged, or makes them too long."""
    faults = config.mismatch.trainer
    if not faults.prompts_differ:
        return
    by_key = {key: training_prompt(faults, tokenizer, ids) for key, ids in prompt_ids.items()}
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


def dropout(probability: float, seed: int) -> HiddenHook:
    """Return a hook for hidden states [n, H]: a number becomes 0 with `probability` p, else it is divided by 1 - p.

    The zeros of a token depend only on the seed, the stream and the token's number in its iteration.
    """
    if not probability:
        return unchanged

    def dropped(hidden: Tensor, tokens: Tensor, stream: Stream) -> Tensor:
        width, least = hidden.shape[1], np.uint64(int(probability * 2.0**64))
        stays = [words(width, "dropout", seed, *stream, token) >= least for token in tokens.tolist()]
        factors = torch.from_numpy(np.array(stays).reshape(-1, width)).to(torch.float32) * (1.0 / (1.0 - probability))
        return hidden * factors.to(hidden.device)

    return dropped
