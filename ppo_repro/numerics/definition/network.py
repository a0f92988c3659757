"""Compute a decoder-only language model, forward and backward, for one sequence; and the gradients of a minibatch.

Start here to follow a token: `forward` embeds it and runs the layers, `backward` turns the gradient of the hidden
states into one sequence's addends for each parameter, and `gradients` sums these addends over a minibatch (rule 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.definition.attention import AttentionPart, attention_part, attention_part_backward
from ppo_repro.numerics.definition.elementary import Array, F
from ppo_repro.numerics.definition.experts import Mixture, mixture, mixture_backward
from ppo_repro.numerics.definition.gradients import Contributions, join_slots, row_addends, slot_sums
from ppo_repro.numerics.definition.mlp import Mlp, mlp, mlp_backward
from ppo_repro.numerics.definition.model import Model, NormWeights, parameters
from ppo_repro.numerics.definition.rounding import rounded
from ppo_repro.numerics.definition.rows import Normed, layer_norm, norm_backward


@dataclass(frozen=True)
class LayerActivations:
    """Activations of one layer, for its backward pass."""

    normed1: Normed | None
    attention: AttentionPart
    normed1_after: Normed | None
    normed2: Normed | None
    mlp: Mlp | Mixture
    normed2_after: Normed | None


@dataclass(frozen=True)
class Activations:
    """Activations of a sequence's forward pass. `hidden` [T, H] are the hidden states after the last norm."""

    ids: Array
    layers: tuple[LayerActivations, ...]
    last: Normed

    @property
    def hidden(self) -> Array:
        return self.last.y


def embed(model: Model, ids: Array) -> Array:
    """Return rows of the embedding times its scale, plus rows of learned positions; [T, H]. Kernel: `embedding_row`."""
    x = model.embedding[ids] * F(model.embedding_scale)
    if model.positions is not None:
        x = x + model.positions[: len(ids)]
    return rounded(model.rounding.activations, x, scaled=False)


def add(model: Model, x: Array, y: Array) -> Array:
    """Return x + residual_scale y, rounded to the format of activations after each operation."""
    form = model.rounding.activations
    return rounded(form, x + (y if model.residual_scale == 1 else rounded(form, y * F(model.residual_scale))))


def _normed(model: Model, x: Array, weights: NormWeights | None) -> tuple[Array, Normed | None]:
    """Apply a norm that the layer may have to rows of the residual stream, or to what will be added to these rows."""
    if weights is None:
        return x, None
    normed = layer_norm(model, x, weights)
    return normed.y, normed


def _normed_backward(
    grads: Contributions, name: str, model: Model, weights: NormWeights | None, dy: Array, of: Normed | None
) -> Array:
    """Return the gradient of x in `_normed`.

    Args:
        grads: receives the addends of the weights.
        name: name of the norm, a prefix in `grads`.
        model: its kind of norm.
        weights: of the norm, None if the layer has no such norm.
        dy: [T, H].
        of: the result of `_normed`.
    """
    if weights is None or of is None:
        return dy
    return norm_backward(grads, name, model.norm, weights, dy, of, np.arange(len(dy)))


def forward(model: Model, ids: Sequence[int], routes: Array | None = None) -> Activations:
    """Run one sequence: in each layer x2 = x + attention(x), then x2 + mlp(x2), or x2 + mlp(x) if parallel.

    Attention and MLP may each have a norm before and a norm after. `add` computes the sums. Kernel: `model_forward`.

    Args:
        model: the weights.
        ids: [T], token ids.
        routes: [layers with experts, T, k], the experts of each token, by rising index; None: routers choose.
    """
    x, layers, given = embed(model, np.asarray(ids)), [], iter(() if routes is None else routes)
    for layer in model.layers:
        read, normed1 = _normed(model, x, layer.norm1)
        attended, attention = attention_part(model, layer, read)
        attended, normed1_after = _normed(model, attended, layer.norm1_after)
        after = add(model, x, attended)
        read, normed2 = _normed(model, x if model.parallel else after, layer.norm2)
        inside: Mlp | Mixture
        if layer.router is not None:
            raised, inside = mixture(model, layer, read, next(given, None))
        else:
            assert layer.up is not None
            assert layer.down is not None
            raised, inside = mlp(model, layer.up, layer.down, read)
        raised, normed2_after = _normed(model, raised, layer.norm2_after)
        x = add(model, after, raised)
        layers.append(LayerActivations(normed1, attention, normed1_after, normed2, inside, normed2_after))
    return Activations(np.asarray(ids), tuple(layers), layer_norm(model, x, model.last_norm))


def backward(model: Model, of: Activations, d_hidden: Array) -> Contributions:
    """Return one sequence's addends to the gradient of every parameter; d_hidden [T, H]. Kernel: `model_backward`.

    Let d be the gradient of a layer's output, and s the residual scale. The MLP and its norms receive d s. Their
    gradient plus d is d2, the gradient of x2, or of x without attention's part if parallel. Attention and its norms
    receive d2 s, or d s if parallel. Their gradient plus d2 is the gradient of the layer's input.
    """
    grads, scale = Contributions(), F(model.residual_scale)
    position = np.arange(len(of.ids))
    d = norm_backward(grads, "last_norm", model.norm, model.last_norm, d_hidden, of.last, position)
    for index in reversed(range(len(model.layers))):
        name, layer, seen = f"layers.{index}", model.layers[index], of.layers[index]
        dh = _normed_backward(grads, f"{name}.norm2_after", model, layer.norm2_after, d * scale, seen.normed2_after)
        if isinstance(seen.mlp, Mixture):
            dh = mixture_backward(grads, name, model, layer, dh, seen.mlp, position)
        else:
            assert layer.up is not None
            assert layer.down is not None
            names = (f"{name}.up", f"{name}.down")
            dh = mlp_backward(grads, names, model, layer.up, layer.down, dh, seen.mlp, position)
        d2 = d + _normed_backward(grads, f"{name}.norm2", model, layer.norm2, dh, seen.normed2)
        dh = (d if model.parallel else d2) * scale
        dh = _normed_backward(grads, f"{name}.norm1_after", model, layer.norm1_after, dh, seen.normed1_after)
        dh = attention_part_backward(grads, name, model, layer, dh, seen.attention, position)
        d = d2 + _normed_backward(grads, f"{name}.norm1", model, layer.norm1, dh, seen.normed1)
    if model.positions is not None:
        grads["positions"] = row_addends(d, position)
    trained = np.flatnonzero(of.ids != model.padding)
    grads["embedding"] = row_addends(d[trained] * F(model.embedding_scale), of.ids[trained])
    return grads


def gradients(
    model: Model, sequences: Sequence[Activations], d_hidden: Sequence[Array], slots: int = 8
) -> dict[str, Array]:
    """Compute rule 2: the gradient of every parameter for a minibatch, by the parameter's path.

    A sequence without an addend for a parameter (an expert that none of its tokens chose) does not change the slot's
    sum.

    Args:
        model: the weights.
        sequences: the result of `forward` for each sequence.
        d_hidden: [T, H] for each sequence, gradients of its hidden states.
        slots: number of slots, a power of two.
    """
    parts = [backward(model, of, d) for of, d in zip(sequences, d_hidden, strict=True)]
    return {
        name: join_slots(slot_sums(w.shape, [part[name] for part in parts], slots))
        for name, w in parameters(model).items()
    }
