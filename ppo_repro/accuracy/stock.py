"""The unmodified transformers model of a policy, in float32 and in float64, without a copy of it."""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

from ppo_repro.accuracy.scores import Float64
from ppo_repro.numerics.device import moved
from ppo_repro.numerics.families import ROTARIES, decoder_layers


def stations(model: nn.Module) -> dict[str, nn.Module]:
    """Decoder layers and the modules outside of them that hold parameters, by name: together all of a model's weights.

    A policy has the same names as its unmodified model.
    """
    layers = {id(layer) for layer in decoder_layers(model)}
    inside = {id(m) for layer in decoder_layers(model) for m in layer.modules()} - layers
    return {
        name: m
        for name, m in model.named_modules()
        if id(m) in layers or (id(m) not in inside and next(m.parameters(recurse=False), None) is not None)
    }


def stock_model(policy: PreTrainedModel) -> PreTrainedModel:
    """The unmodified model with the weights of `policy`, whose memory it shares: nothing may write to them."""
    config = copy.deepcopy(policy.config)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"  # grouped products take no float64
    config.pad_token_id = None  # a prompt may hold it, of which transformers would warn
    with torch.device("meta"):
        model = type(policy)(config)
    model.load_state_dict(policy.state_dict(), assign=True)
    for name, module in list(model.named_modules()):  # what no state holds
        if type(module) in ROTARIES:
            model.set_submodule(name, type(module)(config))
        elif isinstance(module, GemmaTextScaledWordEmbedding):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
    return moved(model, policy.device).eval()


def wide_model(policy: PreTrainedModel) -> PreTrainedModel:
    """The unmodified model in float64, to be called inside `Float64`.

    Each station has weights in float64 while it computes only: 8 bytes for each weight of the largest one.
    """
    model = stock_model(policy)
    with Float64():
        for name, module in list(model.named_modules()):
            if type(module) in ROTARIES:
                model.set_submodule(name, type(module)(model.config).to(policy.device))
    for station in stations(model).values():
        _widen_in_use(station)
    return model


def _widen_in_use(station: nn.Module) -> None:
    tensors = [(x, x.data) for x in chain(station.parameters(), station.buffers())]

    def widen(*_: object) -> None:
        for x, narrow in tensors:
            x.data = narrow.double()

    def restore(*_: object) -> None:
        for x, narrow in tensors:
            x.data = narrow

    station.register_forward_pre_hook(widen)
    station.register_forward_hook(restore)
