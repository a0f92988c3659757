"""Define the supported families of models, one row of `FAMILIES` each, and read numbers of their configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import modeling_auto
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ppo_repro.numerics.interface import constants


class FamilyNames(NamedTuple):
    """Names of a family for the parts of its trunk and for fields of its config. The defaults are Llama's names."""

    layers: str = "layers"
    embedding: str = "embed_tokens"
    norm1: str | None = "input_layernorm"  # before attention; None: a layer has no such norm
    norm1_after: str | None = None
    norm2: str | None = "post_attention_layernorm"  # before the MLP
    norm2_after: str | None = None
    last_norm: str = "norm"
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


_LLAMA = FamilyNames()


@dataclass(frozen=True)
class Family:
    """A family of models in transformers: its names, and its differences from Llama, the default."""

    name: str  # in messages
    names: FamilyNames = _LLAMA
    norm: int = constants.NORM_RMS
    windows: Literal["no layer", "every layer", "by layer_types"] = "no layer"  # which layers may have a sliding window
    mixture: type[nn.Module] | None = None  # a router and its experts
    learned_positions: str | None = None  # the name of their table; None: rotary positions
    # which layers rotate, and how
    rotary: Literal["every layer", "by no_rope_layers", "by layer_types"] = "every layer"
    rotates_part: bool = False  # partial_rotary_factor may be below 1
    gated: bool = True  # the MLP is down(act(gate) up), not down(act(up))
    joins_heads: bool = False  # query, key and value of a head lie together in the matrix qkv
    may_be_parallel: bool = False  # use_parallel_residual: attention and MLP have the same input
    scales_embedding: bool = False  # by the root of hidden_size
    embedding_scale: str | None = None  # here and below: the config's field of this number, if the family has it
    residual_scale: str | None = None
    score_cap: str | None = None
    logit_cap: str | None = None
    logit_divisor: str | None = None

    def __post_init__(self) -> None:
        n = self.names
        for first, second in ((n.norm1, n.norm2), (n.norm1_after, n.norm2_after)):
            assert (first is None) == (second is None), (
                f"{self.name}: the kernels need both norms of a layer, or neither"
            )


_GPT2 = FamilyNames(
    layers="h",
    embedding="wte",
    norm1="ln_1",
    norm2="ln_2",
    last_norm="ln_f",
    eps="layer_norm_epsilon",
    activation="activation_function",
    attention="attn",
    qkv=("c_attn",),
    out="c_proj",
    up=("c_fc",),
    down="c_proj",
)
_PHI3 = FamilyNames(qkv=("qkv_proj",), up=("gate_up_proj",))
_GPT_NEOX = FamilyNames(
    embedding="embed_in",
    last_norm="final_layer_norm",
    eps="layer_norm_eps",
    attention="attention",
    qkv=("query_key_value",),
    out="dense",
    up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)
_OLMO2 = FamilyNames(
    norm1=None, norm1_after="post_attention_layernorm", norm2=None, norm2_after="post_feedforward_layernorm"
)
_GEMMA2 = FamilyNames(
    norm1_after="post_attention_layernorm",
    norm2="pre_feedforward_layernorm",
    norm2_after="post_feedforward_layernorm",
    activation="hidden_activation",
)
FAMILIES = {  # by model_type
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2", windows="by layer_types"),
    "qwen3": Family("Qwen3", windows="by layer_types"),
    "smollm3": Family("SmolLM3", windows="by layer_types", rotary="by no_rope_layers"),
    "granite": Family(
        "Granite",
        embedding_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        logit_divisor="logits_scaling",
    ),
    "seed_oss": Family("Seed-OSS"),
    "phi3": Family("Phi-3", _PHI3, windows="every layer", rotates_part=True),
    "mistral": Family("Mistral", windows="every layer"),
    "ministral": Family("Ministral", windows="by layer_types"),
    "gemma": Family("Gemma", norm=constants.NORM_RMS_OFFSET, scales_embedding=True),
    "gemma2": Family(
        "Gemma 2",
        _GEMMA2,
        norm=constants.NORM_RMS_OFFSET,
        windows="by layer_types",
        scales_embedding=True,
        score_cap="attn_logit_softcapping",
        logit_cap="final_logit_softcapping",
    ),
    "gemma3_text": Family(
        "Gemma 3",
        _GEMMA2,
        norm=constants.NORM_RMS_OFFSET,
        windows="by layer_types",
        rotary="by layer_types",
        scales_embedding=True,
        logit_cap="final_logit_softcapping",
    ),
    "gpt2": Family("GPT-2", _GPT2, norm=constants.NORM_LAYER, learned_positions="wpe", gated=False),
    "gpt_neox": Family(
        "GPT-NeoX",
        _GPT_NEOX,
        norm=constants.NORM_LAYER,
        rotates_part=True,
        gated=False,
        joins_heads=True,
        may_be_parallel=True,
    ),
    "olmo2": Family("OLMo 2", _OLMO2),
    "olmo3": Family("OLMo 3", _OLMO2, windows="by layer_types"),
    "qwen3_moe": Family("Qwen3-MoE", windows="every layer", mixture=Qwen3MoeSparseMoeBlock),
    "mixtral": Family("Mixtral", windows="every layer", mixture=MixtralSparseMoeBlock),
    "olmoe": Family("OLMoE", mixture=OlmoeSparseMoeBlock),
}


def _classes(names: Mapping[str, object]) -> dict[str, type[PreTrainedModel]]:
    """Return by family its class among transformers' classes of one task, for families with such a class."""
    return {kind: getattr(transformers, str(names[kind])) for kind in FAMILIES if kind in names}


*_FIRST, _LAST = (family.name for family in FAMILIES.values())
NAMES = f"{', '.join(_FIRST)} or {_LAST}"
_CAUSAL = _classes(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_CLASSIFIERS = _classes(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
CAUSAL_MODELS, CLASSIFIERS = tuple(_CAUSAL.values()), tuple(_CLASSIFIERS.values())
CLASSIFIER_OF = {_CAUSAL[name]: kind for name, kind in _CLASSIFIERS.items()}  # OLMoE and Granite have none
TRUNKS = tuple(_classes(modeling_auto.MODEL_MAPPING_NAMES).values())
MIXTURES = tuple(family.mixture for family in FAMILIES.values() if family.mixture is not None)


def trunk_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformer below the head. Families name it `model`, `transformer` or `gpt_neox`."""
    return cast(PreTrainedModel, model.base_model)


def head_of(model: PreTrainedModel) -> nn.Module:
    """Return the language-model head of a causal model. Families name it `lm_head` or `embed_out`."""
    return cast(nn.Module, model.get_output_embeddings())


def head_dim(config: PretrainedConfig) -> int:
    """Return the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def number_of(config: PretrainedConfig, field: str | None, default: float) -> float:
    """Return the number in a field of a config; the default if the family has no such field, or the model no number."""
    value = None if field is None else getattr(config, field)
    return default if value is None else float(value)


def attention_of(config: PretrainedConfig) -> str:
    """Return transformers' name of the attention for a stock model: torch's fused attention has no soft cap."""
    return "eager" if number_of(config, FAMILIES[config.model_type].score_cap, 0.0) else "sdpa"


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


def windows_of(config: PretrainedConfig) -> list[int]:
    """Return for each layer the number of keys that a query sees, its own included; 0 for all keys up to it."""
    windows, window = FAMILIES[config.model_type].windows, int(getattr(config, "sliding_window", None) or 0)
    if windows == "by layer_types":
        return [window if kind == "sliding_attention" else 0 for kind in config.layer_types]
    return [window if windows == "every layer" else 0] * config.num_hidden_layers


def ropes_of(config: PretrainedConfig) -> list[dict[str, Any] | None]:
    """Return for each layer the parameters of its rotary positions; None for a layer without them."""
    family, layers = FAMILIES[config.model_type], config.num_hidden_layers
    if family.learned_positions:
        return [None] * layers
    if family.rotary == "by layer_types":
        return [config.rope_parameters[kind] for kind in config.layer_types]
    rotates = config.no_rope_layers[:layers] if family.rotary == "by no_rope_layers" else [1] * layers
    return [config.rope_parameters if each else None for each in rotates]


def positions_of(config: PretrainedConfig) -> int:
    """Return the length up to which the frequencies of a model's positions do not depend on a sequence's length."""
    ropes = [rope for rope in ropes_of(config) if rope and rope["rope_type"] == "longrope"]
    return min([config.max_position_embeddings, *(rope["original_max_position_embeddings"] for rope in ropes)])
