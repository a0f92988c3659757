"""What real models hold, in bytes, for comparison with the memory plan."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import hidden_states
from ppo_repro.numerics.families import trunk_of
from tests.support.models import CLASSES, CONFIGS, MIXTURES, fill

CONFIG_OF = {**CONFIGS, **MIXTURES}


def distinct(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind some tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def resized(architecture: str, layers: int) -> PretrainedConfig:
    """A configuration of that many layers whose widths are all different; a mixture's experts as a run has them."""
    config = CONFIG_OF[architecture.removesuffix(" dense")]()
    if architecture in MIXTURES:
        config._experts_implementation = "eager"
    if architecture.endswith(" dense"):
        config.mlp_only_layers = list(range(layers))
    if architecture == "gpt2":
        config.n_layer, config.n_embd, config.n_inner, config.n_head = layers, 40, 88, 5
    else:
        config.num_hidden_layers, config.hidden_size, config.intermediate_size = layers, 40, 88
        config.num_attention_heads = 5
        config.num_key_value_heads = 5 if architecture == "gpt_neox" else 1
        config.head_dim = 12 if architecture.startswith(("qwen3", "gemma")) else 8
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    return config


def whole_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model of a configuration with drawn weights."""
    model = CLASSES[type(config)](config).eval()
    fill(model, 0)
    return model


def saved_bytes(policy: PreTrainedModel) -> int:
    """What the forward pass over 87 tokens in three rows keeps for its backward pass, without weights and tables."""
    own = {t.untyped_storage().data_ptr() for t in (*policy.parameters(), *policy.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    batch = lay_out([[3] * 20] * 3, [[5] * 10] * 3, "right")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden_states(trunk_of(policy), batch)
    return distinct(x for place, x in kept.items() if place not in own)
