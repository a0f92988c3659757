"""Lower an unmodified transformers model to the exact numerics, or refuse and say why.

Modules are exchanged, modelling code is not. Every module class must be known: a class outside the tables could
compute anything, so it is refused when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import (
    AccurateGELUActivation,
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    QuickGELUActivation,
    SiLUActivation,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm, GemmaTextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from ppo_repro.errors import UserError
from ppo_repro.numerics.arithmetic.grid import MAX_TERMS
from ppo_repro.numerics.device import moved
from ppo_repro.numerics.gradient_bins import Gradients
from ppo_repro.numerics.layers import families
from ppo_repro.numerics.layers.activations import ExactGELU, ExactGELUTanh, ExactQuickGELU, ExactSiLU
from ppo_repro.numerics.layers.attention import IMPLEMENTATION, attention
from ppo_repro.numerics.layers.embedding import ExactEmbedding, ExactScaledEmbedding
from ppo_repro.numerics.layers.experts import ExactExperts, ExactMixture, ExactRouter
from ppo_repro.numerics.layers.linear import ExactConv1D, ExactLinear, ExactModule
from ppo_repro.numerics.layers.norms import ExactGemmaRMSNorm, ExactLayerNorm, ExactRMSNorm
from ppo_repro.numerics.layers.rotary import ExactRotary, inverse_frequencies
from ppo_repro.numerics.products import PreparedWeight

ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention)


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask: the attention function itself knows which keys are visible."""


ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _no_mask)

# activations by their names in a configuration, and the classes that transformers makes of them
ACTIVATION_NAMES = {
    *("silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate"),
    *("gelu_pytorch_tanh", "gelu_python_tanh", "quick_gelu"),
}
ACTIVATIONS: dict[type[nn.Module], type[nn.Module]] = {
    nn.SiLU: ExactSiLU,
    SiLUActivation: ExactSiLU,
    GELUActivation: ExactGELU,
    NewGELUActivation: ExactGELUTanh,
    FastGELUActivation: ExactGELUTanh,
    AccurateGELUActivation: ExactGELUTanh,
    GELUTanh: ExactGELUTanh,
    QuickGELUActivation: ExactQuickGELU,
}


def check_config(config: PretrainedConfig, max_context: int) -> None:
    """Raise UserError naming the first setting of a model that the exact numerics do not cover."""
    families.check_visibility(config, max_context)
    activation = "activation_function" if hasattr(config, "activation_function") else "hidden_act"
    refusals = {
        activation: getattr(config, activation) not in ACTIVATION_NAMES,
        "vocab_size": config.vocab_size > MAX_TERMS,
        "clip_qkv": getattr(config, "clip_qkv", None) is not None,  # OLMoE clips in place
        "pretraining_tp": getattr(config, "pretraining_tp", 1) not in (None, 1),
    }
    for field, refused in refusals.items():
        if refused:
            raise UserError(
                f"model config {field} = {getattr(config, field)!r}: exact numerics do not support it; "
                "choose another model or numerics.mode = native"
            )
    groups = config.num_attention_heads // families.key_value_heads(config)
    if max_context * groups > MAX_TERMS:  # so many queries may see a key, and its gradient is a sum over them
        raise UserError(
            f"numerics.max_context = {max_context}: with {groups} query heads for each key/value head exact numerics "
            f"allow {MAX_TERMS // groups} at most; choose a smaller context"
        )


def _exact(module: nn.Module, name: str, config: PretrainedConfig, max_context: int) -> nn.Module | None:
    """The replacement of `module`, or None to keep it; UserError if its class is not known."""
    kind = type(module)
    if kind is nn.Linear:
        return ExactLinear(cast(nn.Linear, module), name)
    if kind is Conv1D:
        return ExactConv1D(cast(Conv1D, module), name)
    if kind is nn.Embedding:
        return ExactEmbedding(cast(nn.Embedding, module))
    if kind is GemmaTextScaledWordEmbedding:
        return ExactScaledEmbedding(cast(GemmaTextScaledWordEmbedding, module))
    if kind in families.RMS_NORMS:
        norm = cast(LlamaRMSNorm, module)  # all of them have the same two attributes
        return ExactRMSNorm(norm.weight, norm.variance_epsilon, name)
    if kind is GemmaRMSNorm:
        gemma_norm = cast(GemmaRMSNorm, module)
        return ExactGemmaRMSNorm(gemma_norm.weight, gemma_norm.eps, name)
    if kind is nn.LayerNorm:
        return ExactLayerNorm(cast(nn.LayerNorm, module), name)
    if kind in families.ROTARIES:
        return ExactRotary(*inverse_frequencies(config), max_context)
    if kind in ACTIVATIONS:
        return ACTIVATIONS[kind]()
    if kind is nn.Dropout:
        return nn.Dropout(0.0)  # also in training: sampler and update must see the same distribution
    if kind in families.MIXTURES:
        return ExactMixture(module, name)
    if kind in families.CONTAINERS:
        return None
    raise UserError(
        f"model module '{name}' of class {kind.__name__}: exact numerics do not know it; "
        f"choose a {families.NAMES} model, or numerics.mode = native"
    )


def lower(model: PreTrainedModel, max_context: int) -> PreTrainedModel:
    """Exchange the layers of a float32 model in place and return it.

    Parameters stay the same objects under the same names.
    Raises UserError naming the first module, setting or type that is not supported; the model is then unusable.
    """
    check_config(model.config, max_context)
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise UserError(f"model parameter '{name}' is {parameter.dtype}; exact numerics need float32")
    mixtures = tuple(f"{name}." for name, module in model.named_modules() if type(module) in families.MIXTURES)
    for name, module in list(model.named_modules()):
        if name.startswith(mixtures) and type(module) not in ACTIVATIONS:
            continue  # a part of a mixture, which was exchanged as a whole
        replacement = _exact(module, name, model.config, max_context)
        if replacement is not None:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, replacement)
        if type(module) in families.ATTENTIONS:
            module.max_context = max_context
    # on this model's own config object; nothing global changes
    model.set_attn_implementation(IMPLEMENTATION)
    return moved(model, model.device)  # tables are made on the CPU


def is_exact(model: PreTrainedModel) -> bool:
    """Whether `model` has been lowered."""
    return model.config._attn_implementation == IMPLEMENTATION


def forget_operands(module: nn.Module, but_of: Iterable[nn.Module] = ()) -> None:
    """Free what exact products have prepared of the weights of a module, but not what other modules have in common.

    For a module that rests: its operands are as large as its weights. They are prepared again when they are needed.
    """
    kept = {id(prepared) for other in but_of for prepared in _prepared(other)}
    for prepared in _prepared(module):
        if id(prepared) not in kept:
            prepared.forget()


def _prepared(module: nn.Module) -> list[PreparedWeight]:
    found: list[PreparedWeight] = []
    for layer in families.modules_of(module):
        if isinstance(layer, ExactLinear | ExactConv1D | ExactRouter):
            found.append(layer.prepared)
        if isinstance(layer, ExactExperts):
            found += [*layer.prepared_gate_up, *layer.prepared_down]
    return found


def attach(module: nn.Module, accumulator: Gradients) -> None:
    """Send the gradients of the trained parameters of `module` to `accumulator`; a frozen layer gets none.

    Raises ValueError where a parameter is to be trained (`requires_grad`) and the accumulator does not know it.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, ExactModule):
            trained = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            if any(id(p) not in accumulator.names for p in trained):
                raise ValueError(f"layer '{name}' has a parameter to train that the accumulator does not know")
            layer.accumulator = accumulator if trained else None
