"""Define the supported model families: their transformers classes, and settings whose meaning differs by family."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ppo_repro.base.errors import UserError
from ppo_repro.numerics.ranges import check_ranges

NAMES = "Llama, Qwen2, Qwen3, Mistral, Gemma, GPT-2, GPT-NeoX, Qwen3-MoE, Mixtral or OLMoE"
_FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "GPT2", "GPTNeoX", "Qwen3Moe", "Mixtral", "Olmoe")


def _classes(*ends: str) -> dict[str, type[PreTrainedModel]]:
    """Return by family the class with the family's name and one of the ends, for families with this class."""
    found = ((family, getattr(transformers, family + end, None)) for family in _FAMILIES for end in ends)
    return {family: kind for family, kind in found if kind is not None}


_CAUSAL, _CLASSIFIERS = _classes("ForCausalLM", "LMHeadModel"), _classes("ForSequenceClassification")
CAUSAL_MODELS, CLASSIFIERS = tuple(_CAUSAL.values()), tuple(_CLASSIFIERS.values())
CLASSIFIER_OF = {_CAUSAL[family]: kind for family, kind in _CLASSIFIERS.items()}  # OLMoE has none
TRUNKS = tuple(_classes("Model").values())
MIXTURES = (Qwen3MoeSparseMoeBlock, MixtralSparseMoeBlock, OlmoeSparseMoeBlock)  # a router and its experts

_WINDOWED = {"mistral", "mixtral", "qwen3_moe"}  # families with one window for all layers
_TYPED_LAYERS = {"qwen2", "qwen3"}  # families whose `layer_types` say which layers have a sliding window


def trunk_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformer below the head; families name it `model`, `transformer` or `gpt_neox`."""
    return cast(PreTrainedModel, model.base_model)


def head_of(model: PreTrainedModel) -> nn.Module:
    """Return the language-model head of a causal model; families name it `lm_head` or `embed_out`."""
    return cast(nn.Module, model.get_output_embeddings())


def head_dim(config: PretrainedConfig) -> int:
    """Return the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def key_value_heads(config: PretrainedConfig) -> int:
    """Return the number of heads of keys and values."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model's mixtures of experts, in the order of its layers; empty for a dense model."""
    return [cast(nn.Module, m.gate) for m in model.modules() if isinstance(m, MIXTURES)]


def mixture_layers(model: nn.Module) -> list[int]:
    """Return the indices of the decoder layers with a router, rising; empty for a dense model."""
    return [index for index, layer in enumerate(decoder_layers(model)) if routers(layer)]


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the layers of a transformer, in order."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def refuse(config: PretrainedConfig, refusals: dict[str, bool], reason: str) -> None:
    """Raise UserError for the first refused setting of a model, with the reason and the remedy."""
    for name, refused in refusals.items():
        if refused:
            raise UserError(f"model config {name} = {getattr(config, name)!r}: {reason}")


def check_visibility(config: PretrainedConfig, max_context: int) -> None:
    """Raise UserError unless each query sees only its own past, all of it or a window, up to `max_context` tokens.

    The batch layouts and the key/value caches assume this visibility, in both numerics. All numbers must be in their
    ranges.
    """
    check_ranges(vars(config), "model config")
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    known = {"full_attention", "sliding_attention"} if config.model_type in _TYPED_LAYERS else {"full_attention"}
    refusals = {
        "layer_types": not types <= known,
        "sliding_window": "sliding_attention" in types and config.sliding_window is None,
        "is_causal": not getattr(config, "is_causal", True),
        "use_bidirectional_attention": bool(getattr(config, "use_bidirectional_attention", False)),
        "add_cross_attention": bool(getattr(config, "add_cross_attention", False)),
    }
    refuse(config, refusals, "not supported; choose a model whose tokens see only their own past")
    if max_context > config.max_position_embeddings:
        raise UserError(
            f"numerics.max_context = {max_context}: the model has {config.max_position_embeddings} positions; "
            "choose a smaller context"
        )


def stock_masks(config: PretrainedConfig, visible: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
    """Return the mask, or the masks by type of layer, for `attention_mask` of the stock model's forward.

    `visible(window)` is the bool mask [R, 1, I, J] of a layer whose queries see the last `window` keys, or all (None).
    """
    if config.model_type in _TYPED_LAYERS:
        windows = {"full_attention": None, "sliding_attention": config.sliding_window}
        return {kind: visible(windows[kind]) for kind in sorted(set(config.layer_types))}
    return visible(config.sliding_window if config.model_type in _WINDOWED else None)


def windows_of(config: PretrainedConfig) -> list[int]:
    """Return for each layer the number of keys that a query sees, its own included; 0 for all keys up to it."""
    window = int(getattr(config, "sliding_window", None) or 0)
    if config.model_type in _TYPED_LAYERS:
        return [window if kind == "sliding_attention" else 0 for kind in config.layer_types]
    return [window if config.model_type in _WINDOWED else 0] * config.num_hidden_layers
