"""Read transformers' models into the arrays of the definition.

`numerics.description` maps parameters to matrices. This is the only file of the definition that needs torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_repro.numerics.definition.elementary import Array
from ppo_repro.numerics.definition.model import Layer, Matrix, Model, NormWeights, rotary_tables
from ppo_repro.numerics.description import LayerParts, describe
from ppo_repro.numerics.interface import names
from ppo_repro.numerics.rotary import inverse_frequencies

NORMS, QK_NORMS = names("NormKind", "NORM_"), names("QkNormKind", "QK_NORM_")
ACTIVATIONS = names("ActivationKind", "ACT_")
SAME = (
    *("heads", "kv_heads", "head_dim", "eps", "embedding_scale", "gated", "parallel"),
    *("padding", "chosen", "normalised", "q_at", "q_step", "k_at", "k_step", "v_at", "v_step"),
)


def array(x: Tensor) -> Array:
    """Copy a tensor to float32 in NumPy."""
    return x.detach().float().numpy().copy()


def _bias(module: Any) -> Array | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else array(bias)


def _norm(module: Any) -> NormWeights:
    return NormWeights(array(module.weight), _bias(module))


def _matrix(layers: tuple[Any, ...]) -> Matrix:
    """Join the weights of linear layers whose outputs are consecutive."""
    weights = [array(layer.weight).T if isinstance(layer, Conv1D) else array(layer.weight) for layer in layers]
    biases = [bias for layer in layers if (bias := _bias(layer)) is not None]
    return Matrix(np.concatenate(weights), np.concatenate(biases) if biases else None)


def _layer(parts: LayerParts) -> Layer:
    weights: dict[str, Any] = {name: _norm(module) for name, module in parts.norms.items()}
    weights |= {name: _matrix(layers) for name, layers in parts.matrices.items()}
    weights |= {name: tuple(Matrix(array(w)) for w in stacked) for name, stacked in parts.experts.items()}
    return Layer(**weights, window=parts.window, scale=parts.scale)


def model_from(trunk: PreTrainedModel, positions: int) -> Model:
    """Read the weights and numbers of a transformers trunk; rotary tables have `positions` rows."""
    d = describe(trunk)
    more: dict[str, Any] = {name: d.numbers[name] for name in SAME}
    if d.positions is None:
        tables = rotary_tables(inverse_frequencies(trunk.config).numpy(), positions)
        more |= dict(zip(("cosine", "sine"), tables, strict=True))
    return Model(
        **more,
        embedding=array(d.embedding),
        positions=None if d.positions is None else array(d.positions),
        layers=tuple(_layer(parts) for parts in d.layers),
        last_norm=_norm(d.last_norm),
        norm=NORMS[int(d.numbers["norm"])],  # type: ignore[arg-type]
        qk_norm=QK_NORMS[int(d.numbers["qk_norm"])],  # type: ignore[arg-type]
        activation=ACTIVATIONS[int(d.numbers["activation"])],
    )
