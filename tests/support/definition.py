"""Compare arrays with the definition's, and read transformers' models into them.

`numerics.description` maps parameters to matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_repro.numerics.definition.elementary import Array, F
from ppo_repro.numerics.definition.model import Layer, Matrix, Model, NormWeights, Rotary
from ppo_repro.numerics.definition.product import Precision
from ppo_repro.numerics.definition.rotary import (
    frequencies,
    llama3_frequencies,
    longrope_attention_factor,
    rotary_tables,
    yarn_attention_factor,
    yarn_frequencies,
)
from ppo_repro.numerics.description import LayerParts, describe
from ppo_repro.numerics.families import head_dim
from ppo_repro.numerics.interface import names

NORMS, QK_NORMS = names("NormKind", "NORM_"), names("QkNormKind", "QK_NORM_")
ACTIVATIONS = names("ActivationKind", "ACT_")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def assert_same(found: Array, expected: Array, what: str) -> None:
    """Equal shapes and bits."""
    assert found.shape == expected.shape, what
    pairs = [np.ascontiguousarray(x, F).view(np.int32) for x in (found, expected)]
    assert np.array_equal(*pairs), f"{what}: {(pairs[0] != pairs[1]).sum()} of {found.size} differ"


def array(x: Tensor) -> Array:
    """A copy in float32."""
    return x.detach().float().numpy().copy()


def _bias(module: Any) -> Array | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else array(bias)


def _known(kind: Any, numbers: Mapping[str, float]) -> dict[str, Any]:
    """The numbers of which the definition has a field of the same name."""
    return {field.name: numbers[field.name] for field in fields(kind) if field.name in numbers}


def _norm(module: Any) -> NormWeights:
    return NormWeights(array(module.weight), _bias(module))


def _matrix(layers: tuple[Any, ...], precision: Precision) -> Matrix:
    """The weights of linear layers whose outputs are consecutive."""
    weights = [array(layer.weight).T if isinstance(layer, Conv1D) else array(layer.weight) for layer in layers]
    biases = [bias for layer in layers if (bias := _bias(layer)) is not None]
    return Matrix(np.concatenate(weights), np.concatenate(biases) if biases else None, precision)


def _layer(parts: LayerParts, rotary: Rotary | None, precision: Precision) -> Layer:
    weights: dict[str, Any] = {name: _norm(module) for name, module in parts.norms.items()}
    weights |= {name: _matrix(layers, precision) for name, layers in parts.matrices.items()}
    for name, stacked in parts.experts.items():
        weights[name] = tuple(Matrix(array(w), None, precision) for w in stacked)
    return Layer(**weights, **_known(Layer, parts.numbers), rotary=rotary)


def rotary_of(config: PretrainedConfig, rope: dict[str, Any], positions: int) -> Rotary:
    """The cosines and sines of a layer's rotary parameters."""
    found = frequencies(rope["rope_theta"], int(head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        found = found / rope["factor"]
    if rope["rope_type"] == "llama3":
        found = llama3_frequencies(found, *(rope[name] for name in LLAMA3))
    factor, context = 1.0, rope.get("original_max_position_embeddings", 0)
    if rope["rope_type"] == "yarn":
        found = yarn_frequencies(found, rope["rope_theta"], rope["factor"], 32, 1, context)
        factor = yarn_attention_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        found = found / np.array(rope["short_factor"])
        factor = longrope_attention_factor(config.max_position_embeddings / context, context)
    return Rotary(*rotary_tables(found, positions, factor))


def model_from(trunk: PreTrainedModel, positions: int, precision: Precision = "highest") -> Model:
    """The weights and numbers of a transformers trunk; rotary tables have `positions` rows."""
    d = describe(trunk)
    rotary = [None if parts.rope is None else rotary_of(trunk.config, parts.rope, positions) for parts in d.layers]
    layers = tuple(_layer(parts, tables, precision) for parts, tables in zip(d.layers, rotary, strict=True))
    kinds = {
        "norm": NORMS[int(d.numbers["norm"])],
        "qk_norm": QK_NORMS[int(d.numbers["qk_norm"])],
        "head_norm": NORMS[int(d.numbers["head_norm"])],
        "activation": ACTIVATIONS[int(d.numbers["activation"])],
    }
    return Model(
        **(_known(Model, d.numbers) | kinds | {"layers": layers}),
        embedding=array(d.embedding),
        positions=None if d.positions is None else array(d.positions),
        last_norm=_norm(d.last_norm),
    )
