"""Tiny models of the three supported architectures, ragged sequences, and comparison of raw bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ppo_repro.models.layout import lay_out
from ppo_repro.models.networks import ValueModel, make_policy, make_value_model

CONTEXT = 64
VOCAB = 89  # not a multiple of 8, so that a bit set has spare bits
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def qwen3_config(**changes: object) -> Qwen3Config:
    """Heads wider than hidden_size / heads, tied embeddings."""
    return Qwen3Config(**{**SHAPE, "head_dim": 16, "tie_word_embeddings": True, **changes})


def qwen2_config(**changes: object) -> Qwen2Config:
    """Biases on q, k and v, untied embeddings."""
    return Qwen2Config(**{**SHAPE, "tie_word_embeddings": False, **changes})


def llama_config(**changes: object) -> LlamaConfig:
    """Rotary frequencies of Llama 3."""
    return LlamaConfig(**{**SHAPE, "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE, **changes})


MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(qwen3_config()),
    "qwen2": lambda: Qwen2ForCausalLM(qwen2_config()),
    "llama": lambda: LlamaForCausalLM(llama_config()),
}
ARCHITECTURES = tuple(MAKERS)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights: norms near 1, biases near 0, matrices by fan-in, embeddings that give peaked logits."""
    generator = seeded(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.1 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.2 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (1.5 / math.sqrt(parameter.shape[1])))


def source_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """An unmodified transformers model with random weights, in evaluation mode."""
    model = MAKERS[architecture]().eval()
    fill(model, seed)
    return model


@cache
def policy(architecture: str, mode: str, seed: int = 0) -> PreTrainedModel:
    """A policy made from `source_model`; shared between tests, which must not change it."""
    return make_policy(source_model(architecture, seed), mode, CONTEXT)


@cache
def value_model(architecture: str, mode: str, seed: int = 0) -> ValueModel:
    """A value model with a large head; shared between tests, which must not change it."""
    model = make_value_model(source_model(architecture, seed), mode, CONTEXT, seed)
    fill(model.head, seed + 1)
    return model


def ragged(count: int, seed: int, prompt: int = 9, response: int = 7) -> tuple[list[list[int]], list[list[int]]]:
    """`count` prompts of 1..prompt tokens and responses of 1..response tokens."""
    generator = seeded(seed)

    def tokens(longest: int) -> list[int]:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    return [tokens(prompt) for _ in range(count)], [tokens(response) for _ in range(count)]


def scored(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    padding: str,
    micro_batch: int,
    score: Callable[..., Tensor],
) -> Tensor:
    """`score(batch, first, last)` of each micro-batch, joined; first..last are indices of the [n] tokens."""
    parts, first = [], 0
    for start in range(0, len(prompts), micro_batch or len(prompts)):
        end = start + (micro_batch or len(prompts))
        batch = lay_out(prompts[start:end], responses[start:end], padding)
        last = first + len(batch.targets)
        parts.append(score(batch, first, last))
        first = last
    return torch.cat(parts)


def bits(x: Tensor) -> Tensor:
    """The bit patterns: unlike `==` they tell -0.0 from 0.0, and equal NaNs are equal."""
    return x.detach().contiguous().view({4: torch.int32, 8: torch.int64}[x.element_size()])


def unequal(a: Tensor, b: Tensor) -> int:
    """How many elements differ in any bit."""
    assert a.shape == b.shape and a.dtype == b.dtype
    return int((bits(a) != bits(b)).sum())
