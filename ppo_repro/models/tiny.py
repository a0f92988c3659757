"""A small dense model or mixture of experts, made from scratch: configuration, tokenizer and initial weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
)

from ppo_repro.base.errors import UserError
from ppo_repro.base.seeding import bell
from ppo_repro.config.model import TinyModel
from ppo_repro.numerics.families import FAMILIES, attention_of
from ppo_repro.numerics.interface import constants
from ppo_repro.tasks.problems import Problem
from ppo_repro.tasks.tokenizer import decode, train_tokenizer


def make_tokenizer(problems: Sequence[Problem], vocab_size: int, kind: str = "bpe") -> PreTrainedTokenizerBase:
    """Train a tokenizer on prompt and solution of the training problems, in the order of their keys.

    `kind` is `model.tokenizer` of the configuration. Raises UserError if it needs more than `vocab_size` tokens.
    """
    corpus = [p.prompt + p.solution for p in sorted(problems, key=lambda p: p.key)]
    tokenizer = train_tokenizer(kind, corpus, vocab_size)
    if len(tokenizer) > vocab_size:
        needed_by = "words and characters" if kind == "words" else "characters alone"
        raise UserError(
            f"model.vocab_size = {vocab_size}: the task's {needed_by} need {len(tokenizer)} tokens; raise it"
        )
    return tokenizer


def check_spelling(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> None:
    """Raise UserError if a prompt has characters that the tokenizer cannot spell."""
    for problem, ids in zip(problems, tokenizer([p.prompt for p in problems])["input_ids"], strict=True):
        if decode(tokenizer, ids) != problem.prompt:
            raise UserError(
                f"prompt {problem.key!r}: has characters that the tokenizer, trained on the training prompts, "
                "cannot spell; use characters that occur there"
            )


def tiny_config(model: TinyModel, vocab_size: int, max_context: int, eos_token_id: int | None) -> PretrainedConfig:
    """Return the transformers configuration of the model that `make_model` makes.

    Args:
        vocab_size: tokens of the tokenizer, unused ones included.
        max_context: positions.
        eos_token_id: the end token, None if there is none.
    """
    heads: dict[str, Any] = {"head_dim": model.hidden_size // model.num_attention_heads}
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    experts = model.experts
    if experts is None:
        return AutoConfig.for_model(model.family, **shape, **heads)
    shape["num_experts_per_tok"] = experts.per_token
    if experts.family == "qwen3_moe":
        shape |= {"moe_intermediate_size": model.intermediate_size, "norm_topk_prob": True}
        return Qwen3MoeConfig(**shape, **heads, num_experts=experts.count)
    if experts.family == "mixtral":
        return MixtralConfig(**shape, **heads, num_local_experts=experts.count)
    return OlmoeConfig(**shape, num_experts=experts.count)


def make_model(config: TinyModel, vocab_size: int, max_context: int, eos_token_id: int, seed: int) -> PreTrainedModel:
    """Make a float32 model with the weights of `draw_weights`.

    Args:
        vocab_size: tokens of its tokenizer.
        max_context: longest prompt plus response, tokens.
    """
    source = tiny_config(config, vocab_size, max_context, eos_token_id)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        source, trust_remote_code=False, attn_implementation=attention_of(source)
    )
    draw_weights(model, seed)
    return model


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Fill a model with weights that are a pure function of `seed`, the same bits on every machine.

    Matrices are bell-shaped with standard deviation 1/sqrt(fan-in), embeddings with 0.1. Factors of norms are 1,
    biases 0.
    """
    has_offset = FAMILIES[model.config.model_type].norm == constants.NORM_RMS_OFFSET  # factors are 1 + weight
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if has_offset or name.endswith("bias") else 1.0)
            continue
        std = 0.1 if "embed_tokens" in name else 1.0 / math.sqrt(parameter.shape[-1])  # experts are [E, N, K]
        draws = bell(parameter.numel(), "weights", seed, name) * std
        parameter.copy_(torch.from_numpy(draws).view(parameter.shape))
