"""Tiny models of many families, each with the options of architecture that its family has."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.models import VOCAB, seeded
from tests.testing.audit.material import Material, material

SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None},
    **{"bos_token_id": None, "eos_token_id": None},
}
NO_KEYS = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
WINDOWED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {**SHAPE, **WINDOWED, "head_dim": 16, "query_pre_attn_scalar": 24,
                          "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}),
    "gemma3": ("gemma3_text", {**SHAPE, **WINDOWED, "head_dim": 16, "query_pre_attn_scalar": 24, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}}),
    "granite": ("granite", {**SHAPE, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
                            "attention_multiplier": 0.2}),
    "cohere": ("cohere", {**SHAPE, "logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**SHAPE, **WINDOWED, "logit_scale": 0.25}),
    "llama3": ("llama", {**SHAPE, "rope_parameters": LLAMA3, "attention_bias": True, "tie_word_embeddings": False}),
    "yarn": ("llama", {**SHAPE, "rope_parameters": YARN}),
    "linear": ("llama", {**SHAPE, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3": ("qwen3", {**SHAPE, "head_dim": 16}),
    "qwen2": ("qwen2", SHAPE),
    "olmo2": ("olmo2", SHAPE),
    "gpt_neox": ("gpt_neox", {**NO_KEYS, "rotary_pct": 0.5, "hidden_act": "gelu"}),
    "gpt_oss": ("gpt_oss", {**SHAPE, **WINDOWED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {**SHAPE, **EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**SHAPE, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "deepseek": ("deepseek_v3", {
        **SHAPE, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}),
    "mixtral": ("mixtral", {**SHAPE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "mistral": ("mistral", {**SHAPE, "sliding_window": 5}),
    "phi": ("phi", {**SHAPE, "partial_rotary_factor": 0.5, "num_key_value_heads": 4, "qk_layernorm": True}),
    "stablelm": ("stablelm", {**SHAPE, "partial_rotary_factor": 0.5, "use_parallel_residual": True}),
    "gpt2": ("gpt2", {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64,
                      "scale_attn_by_inverse_layer_idx": True, "bos_token_id": None, "eos_token_id": None}),
    "falcon": ("falcon", NO_KEYS),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4, "pad_token_id": None}),
    "xglm": ("xglm", {"vocab_size": VOCAB, "d_model": 48, "ffn_dim": 72, "num_layers": 2, "attention_heads": 4}),
    "opt": ("opt", {**NO_KEYS, "ffn_dim": 72, "word_embed_proj_dim": 48}),
}  # fmt: skip


@cache
def made(family: str) -> Material:
    return material(built(family))


def built(family: str) -> PreTrainedModel:
    kind, fields = FAMILIES[family]
    config = AutoConfig.for_model(kind, **fields)
    any_model: Any = AutoModelForCausalLM
    with torch.random.fork_rng():  # GPT-OSS draws its vectors
        torch.manual_seed(3)
        model = any_model.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    generator = seeded(3)
    with torch.no_grad():
        for name, parameter in model.state_dict(keep_vars=True).items():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                size = 0.3 if "embed" in name or "wte" in name else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(size * noise)
            else:
                parameter.add_(0.3 * noise)
    return model
