"""Lower an unmodified transformers model to the exact numerics, or refuse and say why.

Modules are exchanged, modelling code is not. Every module class must be known: a class that is not in the
tables below could compute anything, so it raises at load time.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from ppo_repro.errors import UserError
from ppo_repro.numerics.attention import IMPLEMENTATION, attention
from ppo_repro.numerics.elementwise import power
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.grid import OPERAND_BITS
from ppo_repro.numerics.layers import (
    ExactEmbedding,
    ExactLinear,
    ExactModule,
    ExactRMSNorm,
    ExactRotary,
    ExactSiLU,
)

ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)


def _no_mask(*_: Any, **__: Any) -> None:
    """Visibility goes to the attention function as it is; no mask is made from it."""


ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _no_mask)

CAUSAL_MODELS = (qwen3.Qwen3ForCausalLM, qwen2.Qwen2ForCausalLM, llama.LlamaForCausalLM)
_TRUNKS = (qwen3.Qwen3Model, qwen2.Qwen2Model, llama.LlamaModel)
_LAYERS = (qwen3.Qwen3DecoderLayer, qwen2.Qwen2DecoderLayer, llama.LlamaDecoderLayer)
_ATTENTIONS = (qwen3.Qwen3Attention, qwen2.Qwen2Attention, llama.LlamaAttention)
_MLPS = (qwen3.Qwen3MLP, qwen2.Qwen2MLP, llama.LlamaMLP)
_NORMS = (qwen3.Qwen3RMSNorm, qwen2.Qwen2RMSNorm, llama.LlamaRMSNorm)
_ROTARIES = (qwen3.Qwen3RotaryEmbedding, qwen2.Qwen2RotaryEmbedding, llama.LlamaRotaryEmbedding)
_CONTAINERS = (*CAUSAL_MODELS, *_TRUNKS, *_LAYERS, *_ATTENTIONS, *_MLPS, nn.ModuleList)

# Widths up to which a gradient of a layer still fits its grids; see grid.operand_bits
MAX_VOCABULARY = 1 << 23


def check_config(config: PretrainedConfig, max_context: int) -> None:
    """Raise UserError naming the first setting of a model that the exact numerics do not cover."""
    refusals = {
        "hidden_act": config.hidden_act not in {"silu", "swish"},
        "attention_dropout": bool(config.attention_dropout),
        "layer_types": set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"},
        "vocab_size": config.vocab_size > MAX_VOCABULARY,
        "pretraining_tp": getattr(config, "pretraining_tp", 1) not in (None, 1),
    }
    for field, refused in refusals.items():
        if refused:
            raise UserError(
                f"model config {field} = {getattr(config, field)!r}: exact numerics do not support it; "
                "choose another model or numerics.mode = native"
            )
    if max_context > config.max_position_embeddings:
        raise UserError(
            f"numerics.max_context = {max_context}: the model has {config.max_position_embeddings} positions; "
            "choose a smaller context"
        )


def inverse_frequencies(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Rotary frequencies theta^(-2i/D), float64 [D/2], and the attention scaling.

    Types `default`, `linear` (position interpolation) and `llama3`; UserError names any other.
    """
    rope = config.rope_parameters
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"model config partial_rotary_factor = {rope['partial_rotary_factor']}: must be 1 in exact numerics"
        )
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequencies = 1.0 / power(float(rope["rope_theta"]), exponents)
    kind = rope["rope_type"]
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / rope["factor"], 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        wavelengths = 2 * math.pi / frequencies
        turns = rope["original_max_position_embeddings"] / wavelengths
        smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * smooth + (frequencies / rope["factor"]) * (1.0 - smooth), 1.0
    raise UserError(f"model config rope_type = '{kind}': must be default, linear or llama3 in exact numerics")


def _exact(module: nn.Module, name: str, config: PretrainedConfig, max_context: int, bits: int) -> nn.Module | None:
    """The module to put in place of `module`, or None to keep it; UserError if it is not known."""
    if type(module) is nn.Linear:
        return ExactLinear(module, name, bits)
    if type(module) is nn.Embedding:
        return ExactEmbedding(module)
    if type(module) in _NORMS:
        norm = cast(llama.LlamaRMSNorm, module)  # all three have the same two attributes
        return ExactRMSNorm(norm.weight, norm.variance_epsilon, name)
    if type(module) in _ROTARIES:
        return ExactRotary(*inverse_frequencies(config), max_context)
    if type(module) is nn.SiLU or type(module).__name__ == "SiLUActivation":
        return ExactSiLU()
    if type(module) in _CONTAINERS:
        return None
    raise UserError(
        f"model module '{name}' of class {type(module).__name__}: exact numerics do not know it; "
        "choose a Qwen2, Qwen3 or Llama model, or numerics.mode = native"
    )


def lower(model: PreTrainedModel, max_context: int, bits: int = OPERAND_BITS) -> PreTrainedModel:
    """Exchange the layers of a float32 model in place and return it.

    `bits` are the operand bits of its linear layers. Parameters stay the same objects under the same names.
    Raises UserError naming the first module, setting or type that is not supported; the model must then be
    thrown away.
    """
    check_config(model.config, max_context)
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise UserError(f"model parameter '{name}' is {parameter.dtype}; exact numerics need float32")
    for name, module in list(model.named_modules()):
        replacement = _exact(module, name, model.config, max_context, bits)
        if replacement is not None:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, replacement)
        if type(module) in _ATTENTIONS:
            module.max_context = max_context
    # set on this model's own config object only; nothing global changes
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def is_exact(model: PreTrainedModel) -> bool:
    """Whether `model` has been lowered."""
    return model.config._attn_implementation == IMPLEMENTATION


def attach(module: nn.Module, accumulator: GradientAccumulator) -> None:
    """Send the parameter gradients of every lowered layer in `module` to `accumulator`."""
    for layer in module.modules():
        if isinstance(layer, ExactModule):
            layer.accumulator = accumulator
