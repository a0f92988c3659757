"""Small models of every supported family and their variants, ragged sequences, and comparison of raw bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from ppo_repro.base.mode import Mode
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import ValueModel, make_policy, make_value_model
from ppo_repro.numerics import families
from ppo_repro.numerics.families import CLASSIFIER_OF
from ppo_repro.numerics.interface import Ints, constants

CONTEXT = 64
VOCAB = 89  # not a multiple of 8, so that a bit set has spare bits
SHAPE: dict[str, Any] = {
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
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


def qwen3_config(**changes: Any) -> Qwen3Config:
    """Heads wider than hidden_size / heads, tied embeddings."""
    return Qwen3Config(**{**SHAPE, "head_dim": 16, "tie_word_embeddings": True, **changes})


def qwen2_config(**changes: Any) -> Qwen2Config:
    """Biases on q, k and v, untied embeddings."""
    return Qwen2Config(**{**SHAPE, "tie_word_embeddings": False, **changes})


def llama_config(**changes: Any) -> LlamaConfig:
    """Rotary frequencies of Llama 3."""
    return LlamaConfig(**{**SHAPE, "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE, **changes})


def smollm3_config(**changes: Any) -> SmolLM3Config:
    """A layer without rotary positions, then one with them; tied embeddings."""
    return SmolLM3Config(**{**SHAPE, "no_rope_layers": [0, 1], **changes})


def granite_config(**changes: Any) -> GraniteConfig:
    """Embeddings, scores, results of attention and MLP, and logits are multiplied or divided by numbers."""
    numbers: dict[str, Any] = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2}
    numbers |= {"residual_multiplier": 0.4, "logits_scaling": 0.7}
    return GraniteConfig(**{**SHAPE, "tie_word_embeddings": True, **numbers, **changes})


def seed_oss_config(**changes: Any) -> SeedOssConfig:
    """Heads wider than hidden_size / heads, biases in every linear layer, dropout that must not act."""
    biases = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
    return SeedOssConfig(**{**SHAPE, "head_dim": 16, "residual_dropout": 0.2, **biases, **changes})


def mistral_config(**changes: Any) -> MistralConfig:
    """A window of 6 keys in every layer."""
    return MistralConfig(**{**SHAPE, "tie_word_embeddings": False, "sliding_window": 6, **changes})


def ministral_config(**changes: Any) -> MinistralConfig:
    """Mistral with windows by layer, and heads wider than hidden_size / heads."""
    return MinistralConfig(**{**SHAPE, **WINDOWED, "head_dim": 16, **changes})


def gemma_config(**changes: Any) -> GemmaConfig:
    """One key/value head, heads wider than hidden_size / heads, GELU by tanh, scaled and tied embeddings."""
    return GemmaConfig(**{**SHAPE, "head_dim": 16, "num_key_value_heads": 1, **changes})


WINDOWED: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def gemma2_config(**changes: Any) -> Gemma2Config:
    """Norms before and after attention and MLP, caps of scores and logits, a scale of scores, windows by layer."""
    numbers = {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}
    return Gemma2Config(**{**SHAPE, **WINDOWED, **numbers, "head_dim": 16, "num_key_value_heads": 1, **changes})


def gemma3_config(**changes: Any) -> Gemma3TextConfig:
    """Queries and keys normed by head with an offset, rotary positions and windows by type of layer, no caps."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    }
    numbers = {"query_pre_attn_scalar": 24, "rope_parameters": rope, "head_dim": 16, "num_key_value_heads": 1}
    return Gemma3TextConfig(**{**SHAPE, **WINDOWED, **numbers, **changes})


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.5, 2.0, 1.7, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}


def phi3_config(**changes: Any) -> Phi3Config:
    """Joined matrices, three quarters of each head rotate by the short factors of longrope, and a window of 6 keys."""
    shape: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 4 * CONTEXT}
    rope: dict[str, Any] = {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": CONTEXT}
    return Phi3Config(**{**SHAPE, **shape, **rope, "sliding_window": 6, "resid_pdrop": 0.1, **changes})


def gpt2_config(**changes: Any) -> GPT2Config:
    """Learned positions, layer norms, transposed linear layers, tied embeddings, dropout that must not act."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": CONTEXT,
        "n_inner": 72,
    }
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dtype": "float32"}
    return GPT2Config(**{**shape, **tokens, **changes})


def gpt_neox_config(**changes: Any) -> GPTNeoXConfig:
    """Half of each head rotates, parallel residual, GELU by erf, biases, untied, dropout that must not act."""
    dropout: dict[str, Any] = {"rotary_pct": 0.5, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    shape = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    return GPTNeoXConfig(**{**shape, "tie_word_embeddings": False, **dropout, **changes})


def olmo2_config(**changes: Any) -> Olmo2Config:
    """Norms after attention and MLP and none before; queries and keys normed whole; untied embeddings."""
    return Olmo2Config(**{**SHAPE, "tie_word_embeddings": False, **changes})


def olmo3_config(**changes: Any) -> Olmo3Config:
    """OLMo 2 with windows by layer."""
    return Olmo3Config(**{**SHAPE, **WINDOWED, "tie_word_embeddings": False, **changes})


# the class's own code: torch's grouped products take no float64
OWN_EXPERTS: dict[str, Any] = {"experts_implementation": "eager"}


def qwen3_moe_config(**changes: Any) -> Qwen3MoeConfig:
    """A dense layer and a mixture, 3 of 6 experts with renormalised weights."""
    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}
    return Qwen3MoeConfig(**{**SHAPE, "head_dim": 16, "mlp_only_layers": [0], **experts, **OWN_EXPERTS, **changes})


def mixtral_config(**changes: Any) -> MixtralConfig:
    """2 of 4 experts in every layer, whose weights are always renormalised, and a window of 6 keys."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 28}
    return MixtralConfig(**{**SHAPE, "sliding_window": 6, **experts, **OWN_EXPERTS, **changes})


def olmoe_config(**changes: Any) -> OlmoeConfig:
    """3 of 8 experts in every layer with weights as the softmax gives them; queries and keys normed whole."""
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16}
    return OlmoeConfig(**{**SHAPE, "tie_word_embeddings": False, **experts, **OWN_EXPERTS, **changes})


SLIDING: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"],
}
CLASSES: dict[type[PretrainedConfig], type[PreTrainedModel]] = {
    Qwen3Config: Qwen3ForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    LlamaConfig: LlamaForCausalLM,
    SmolLM3Config: SmolLM3ForCausalLM,
    GraniteConfig: GraniteForCausalLM,
    SeedOssConfig: SeedOssForCausalLM,
    MistralConfig: MistralForCausalLM,
    MinistralConfig: MinistralForCausalLM,
    GemmaConfig: GemmaForCausalLM,
    Gemma2Config: Gemma2ForCausalLM,
    Gemma3TextConfig: Gemma3ForCausalLM,
    Phi3Config: Phi3ForCausalLM,
    GPT2Config: GPT2LMHeadModel,
    GPTNeoXConfig: GPTNeoXForCausalLM,
    Olmo2Config: Olmo2ForCausalLM,
    Olmo3Config: Olmo3ForCausalLM,
    Qwen3MoeConfig: Qwen3MoeForCausalLM,
    MixtralConfig: MixtralForCausalLM,
    OlmoeConfig: OlmoeForCausalLM,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": qwen3_config,
    "qwen2": qwen2_config,
    "llama": llama_config,
    "smollm3": smollm3_config,
    "granite": granite_config,
    "seed_oss": seed_oss_config,
    "mistral": mistral_config,
    "ministral": ministral_config,
    "gemma": gemma_config,
    "gemma2": gemma2_config,
    "gemma3_text": gemma3_config,
    "phi3": phi3_config,
    "gpt2": gpt2_config,
    "gpt_neox": gpt_neox_config,
    "olmo2": olmo2_config,
    "olmo3": olmo3_config,
    "qwen2 sliding": lambda: qwen2_config(**SLIDING),
}
# mixtures of experts
MIXTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3_moe": qwen3_moe_config,
    "mixtral": mixtral_config,
    "olmoe": olmoe_config,
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights: factors of norms near 1, biases near 0, matrices by fan-in, embeddings for peaked logits."""
    generator = seeded(seed)
    config = getattr(model, "config", None)
    family = families.FAMILIES.get(getattr(config, "model_type", ""))
    offset = 0.0 if family is not None and family.norm == constants.NORM_RMS_OFFSET else 1.0  # factors are 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.copy_(offset + 0.1 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.2 * noise)
            elif any(part in name for part in ("embed_tokens", "embed_in", "wte", "wpe")):
                parameter.copy_(0.3 * noise)
            else:
                # GPT-2 stores [in, out]
                fan_in = parameter.shape[0 if isinstance(config, GPT2Config) and ".c_" in name else -1]
                parameter.copy_(noise * (1.5 / math.sqrt(fan_in)))


def small_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """The unmodified class of `config` with random weights, in evaluation mode, and with the caps of its scores."""
    model = CLASSES[type(config)](config).eval()
    model.set_attn_implementation(families.attention_of(config))
    fill(model, seed)
    return model


def random_sequences(seed: int, count: int, response: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of 1..count tokens and as many responses of `response` tokens each, for models of `CONFIGS`."""
    generator = seeded(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    return [tokens(i + 1) for i in range(count)], [tokens(response) for _ in range(count)]


ARCHITECTURES = tuple(CONFIGS)
# for parametrize: RMS norms, layer norms, experts, norms after, norms before and after; all
# others wait for the slow tests
QUICK = ("qwen3", "gpt2", "qwen3_moe", "olmo2", "gemma3_text")


def marked(architectures: Iterable[str]) -> list[Any]:
    return [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in architectures]


FAMILIES, EVERY_FAMILY = marked(ARCHITECTURES), marked((*ARCHITECTURES, *MIXTURES))
CLASSIFIED = marked(a for a in ARCHITECTURES if CLASSES[type(CONFIGS[a]())] in CLASSIFIER_OF)
# settings of these families that change what is computed; compared with float64 only
VARIANTS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3 sliding, untied, biases": lambda: qwen3_config(**SLIDING, tie_word_embeddings=False, attention_bias=True),
    "qwen2 tied": lambda: qwen2_config(tie_word_embeddings=True),
    "llama tied, biases, gelu": lambda: llama_config(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, hidden_act="gelu"
    ),
    "smollm3 sliding, untied, biases": lambda: smollm3_config(
        **SLIDING, no_rope_layers=[1, 0], tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "granite untied, biases": lambda: granite_config(
        tie_word_embeddings=False, attention_bias=True, mlp_bias=True, residual_multiplier=1.0, logits_scaling=8.0
    ),
    "seed_oss tied, no biases, gelu": lambda: seed_oss_config(
        tie_word_embeddings=True, attention_bias=False, attention_out_bias=False, mlp_bias=False, hidden_act="gelu"
    ),
    "mistral without window, tied": lambda: mistral_config(sliding_window=None, tie_word_embeddings=True),
    "gemma untied, biases": lambda: gemma_config(tie_word_embeddings=False, attention_bias=True),
    "gemma2 without caps and windows, untied": lambda: gemma2_config(
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=["full_attention"] * 2,
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    "gemma3_text capped logits, untied": lambda: gemma3_config(final_logit_softcapping=4.0, tie_word_embeddings=False),
    "olmo3 llama3, tied, biases": lambda: olmo3_config(
        rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True, attention_bias=True
    ),
    "olmo3 yarn": lambda: olmo3_config(rope_parameters=YARN_ROPE),
    "phi3 without window and longrope, tied": lambda: phi3_config(
        sliding_window=None, rope_parameters=None, tie_word_embeddings=True, num_attention_heads=4
    ),
    "gpt2 untied, scaled by layer": lambda: gpt2_config(
        tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True
    ),
    "gpt2 unscaled, gelu_fast": lambda: gpt2_config(scale_attn_weights=False, activation_function="gelu_fast"),
    "gpt_neox sequential, tied, no biases": lambda: gpt_neox_config(
        use_parallel_residual=False, tie_word_embeddings=True, attention_bias=False
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
def policy(architecture: str, mode: Mode, seed: int = 0) -> PreTrainedModel:
    """A policy made from `source_model`; shared between tests, which must not change it."""
    return make_policy(source_model(architecture, seed), mode, CONTEXT)


@cache
def value_model(architecture: str, mode: Mode, seed: int = 0) -> ValueModel:
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
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return int((bits(a) != bits(b)).sum())
