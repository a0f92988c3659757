"""Small models of every supported family and their variants, ragged sequences, and comparison of raw bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import ValueModel, make_policy, make_value_model
from ppo_repro.numerics.structs import Ints
from tests.support.small_models import (
    CLASSES,
    CONFIGS,
    CONTEXT,
    LLAMA3_ROPE,
    MIXTURES,
    SLIDING,
    VOCAB,
    fill,
    gemma_config,
    gpt2_config,
    gpt_neox_config,
    llama_config,
    mistral_config,
    mixtral_config,
    olmoe_config,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    seeded,
    small_model,
)

__all__ = ["CLASSES", "LLAMA3_ROPE"]  # the package's, for tests that take them from here

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
ARCHITECTURES = tuple(CONFIGS)
# for parametrize: RMS norms, layer norms, experts; all others wait for the slow tests
QUICK = ("qwen3", "gpt2", "qwen3_moe")
FAMILIES = [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in ARCHITECTURES]
EVERY_FAMILY = [*FAMILIES, *(a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in MIXTURES)]
# settings of these families that change what is computed; compared with float64 only
VARIANTS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3 sliding, untied, biases": lambda: qwen3_config(**SLIDING, tie_word_embeddings=False, attention_bias=True),
    "qwen2 tied": lambda: qwen2_config(tie_word_embeddings=True),
    "llama tied, biases, gelu": lambda: llama_config(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, hidden_act="gelu"
    ),
    "llama yarn": lambda: llama_config(rope_parameters=YARN),
    "mistral without window, tied": lambda: mistral_config(sliding_window=None, tie_word_embeddings=True),
    "gemma untied, biases": lambda: gemma_config(tie_word_embeddings=False, attention_bias=True),
    "gpt2 untied, scaled by layer": lambda: gpt2_config(
        tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True
    ),
    "gpt2 unscaled, gelu_fast": lambda: gpt2_config(scale_attn_weights=False, activation_function="gelu_fast"),
    "gpt_neox sequential, tied, no biases": lambda: gpt_neox_config(
        use_parallel_residual=False, tie_word_embeddings=True, attention_bias=False, hidden_act="quick_gelu"
    ),
    "qwen3_moe sparse, not renormalised, window": lambda: qwen3_moe_config(
        mlp_only_layers=[], norm_topk_prob=False, use_sliding_window=True, sliding_window=5, num_experts_per_tok=1
    ),
    "mixtral without window, all experts": lambda: mixtral_config(sliding_window=None, num_experts_per_tok=4),
    "olmoe renormalised, gelu": lambda: olmoe_config(norm_topk_prob=True, hidden_act="gelu"),
    "gpt_neox linear": lambda: gpt_neox_config(
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    ),
}


def source_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """An unmodified transformers model with random weights, in evaluation mode."""
    return small_model({**CONFIGS, **MIXTURES, **VARIANTS}[architecture](), seed)


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
    slots: Callable[[range], Ints] | None = None,
) -> Tensor:
    """`score(batch, first, last)` of each micro-batch, joined; first..last are indices of the [n] tokens.

    `slots` gives those of some sequences, for passes with gradients.
    """
    parts, first = [], 0
    for start in range(0, len(prompts), micro_batch or len(prompts)):
        end = min(start + (micro_batch or len(prompts)), len(prompts))
        own = None if slots is None else slots(range(start, end))
        batch = lay_out(prompts[start:end], responses[start:end], padding, slots=own)
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
