"""Transformers' models, read into the arrays of the definition: every family is data.

Which parameter is which matrix comes from the package; `test_definition.py` compares the result with transformers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_repro.numerics.description import LayerParts, describe
from ppo_repro.numerics.rotary import inverse_frequencies
from tests.numerics.definition import Layer, Matrix, Model, NormWeights, rotary_tables

NORMS, QK_NORMS = ("rms", "rms_offset", "layer"), ("none", "head", "whole")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
SAME = (
    *("heads", "kv_heads", "head_dim", "eps", "embedding_scale", "gated", "parallel"),
    *("padding", "chosen", "normalised"),
)
PLACES = ("q_at", "q_step", "k_at", "k_step", "v_at", "v_step")


def array(x: Tensor) -> np.ndarray:
    """A copy in float32."""
    return x.detach().float().numpy().copy()


def _bias(module: Any) -> np.ndarray | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else array(bias)


def _norm(module: Any) -> NormWeights | None:
    return None if module is None else NormWeights(array(module.weight), _bias(module))


def _matrix(layers: tuple[Any, ...]) -> Matrix | None:
    if not layers:
        return None
    weights = [array(layer.weight).T if isinstance(layer, Conv1D) else array(layer.weight) for layer in layers]
    biases = [bias for layer in layers if (bias := _bias(layer)) is not None]
    return Matrix(np.concatenate(weights), np.concatenate(biases) if biases else None)


def _layer(of: LayerParts) -> Layer:
    return Layer(
        **{name: _norm(of.norms.get(name)) for name in ("norm1", "norm2", "q_norm", "k_norm")},
        **{name: _matrix(of.matrices.get(name, ())) for name in ("qkv", "out", "up", "down", "router")},
        **{name: tuple(Matrix(array(w)) for w in of.experts.get(name, ())) for name in ("expert_up", "expert_down")},
        window=of.window,
        scale=of.scale,
    )


def model_from(trunk: PreTrainedModel, positions: int) -> Model:
    """The weights and shape of a transformers trunk, with rotary tables of `positions` rows."""
    d = describe(trunk)
    numbers = {name: d.numbers[name] for name in (*SAME, *PLACES)}
    tables = {}
    if d.positions is None:
        frequencies = inverse_frequencies(trunk.config).numpy()
        tables = dict(zip(("cosine", "sine"), rotary_tables(frequencies, positions), strict=True))
    return Model(
        **numbers,
        **tables,
        embedding=array(d.embedding),
        positions=None if d.positions is None else array(d.positions),
        layers=tuple(_layer(layer) for layer in d.layers),
        last_norm=_norm(d.last_norm),
        norm=NORMS[int(d.numbers["norm"])],
        qk_norm=QK_NORMS[int(d.numbers["qk_norm"])],
        activation=ACTIVATIONS[int(d.numbers["activation"])],
    )
