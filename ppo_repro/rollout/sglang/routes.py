"""Routes through mixtures of experts as SGLang returns them: base64 of int32, one row of all layers for each token."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.numerics.families import decoder_layers, mixture_layers


@dataclass(frozen=True)
class RoutedLayers:
    """The shape of the routes of a model: SGLang has a place for every layer, and zeros where it is dense."""

    layers: int
    mixtures: tuple[int, ...]  # the layers with a router
    experts: int  # of each router
    per_token: int


def routed_layers(policy: PreTrainedModel) -> RoutedLayers:
    """Of a mixture of experts."""
    config = policy.config
    experts = config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts
    return RoutedLayers(
        len(decoder_layers(policy)), tuple(mixture_layers(policy)), int(experts), int(config.num_experts_per_tok)
    )


def read_routes(text: Any, inputs: int, routed: RoutedLayers) -> Tensor:
    """[inputs, M k] int32 as in `Completion.routes`; ValueError where this is not the routes of so many tokens."""
    if not isinstance(text, str):
        raise ValueError("returned no routed_experts; start the server with --enable-return-routed-experts")
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"returned routed_experts that are no base64 of int32 ({error})") from error
    if flat.size != inputs * routed.layers * routed.per_token:
        raise ValueError(f"returned {flat.size} routed_experts for {inputs} tokens, {routed.layers} layers")
    found = flat.reshape(inputs, routed.layers, routed.per_token)[:, list(routed.mixtures)]
    rises = bool((np.diff(found, axis=-1) > 0).all())
    if not rises or found.min(initial=0) < 0 or found.max(initial=0) >= routed.experts:
        raise ValueError(f"returned routed_experts that are not {routed.per_token} of {routed.experts} by rising index")
    return torch.from_numpy(found.reshape(inputs, len(routed.mixtures) * routed.per_token).astype(np.int32))
