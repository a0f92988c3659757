"""A whole forward pass over a batch, and its backward into the gradient accumulators, without modules.

It computes what modules and autograd would, in the same order and by the same law, so every bit is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.numerics.kernels import layer_parts
from ppo_repro.numerics.kernels.attention.keys import Saved
from ppo_repro.numerics.layers import fused_attention
from ppo_repro.numerics.layers.attention import visible_keys
from ppo_repro.numerics.layers.fused_attention import Reach
from ppo_repro.numerics.layers.norms import rms_norm_backward
from ppo_repro.numerics.products import NO_BIAS, array
from ppo_repro.numerics.products import operand as prepare_operand
from ppo_repro.numerics.trunk import programs
from ppo_repro.numerics.trunk.layer import (
    Activations,
    Attended,
    LinearInput,
    NormResult,
    Rotary,
    layer_forward,
    normalise,
    rotary_at,
)
from ppo_repro.numerics.trunk.weights import Layer, LinearWeights, NormWeights, Trunk


@dataclass(frozen=True)
class _Batch:
    """The T tokens of a pass."""

    ids: Tensor  # [T] int64
    rotary: Rotary
    reaches: dict[int | None, Reach]  # by window, what each query sees
    predictors: Tensor  # [n], rows whose hidden states are wanted


def hidden_states(
    trunk: Trunk,
    input_ids: Tensor,
    position_ids: Tensor,
    first_key: Tensor,
    predictors: Tensor,
    recompute: bool = False,
) -> Tensor:
    """Final hidden states [n, H] float32 at the flat positions `predictors` [n] int64, all of them different.

    input_ids, position_ids, first_key [R, L] int64 as in `TokenBatch`. Differentiable: a backward pass sends the
    gradients of what is trained to the accumulators of the layers, once; with `recompute` only the inputs of layers
    are kept for it. Raises NumericsError where a number is not finite or a query sees more keys than max_context,
    IndexError for a position beyond it.
    """
    own = torch.arange(first_key.shape[1]).expand_as(first_key)
    windows = {layer.window: layer.max_context for layer in trunk.layers}
    reaches = {
        window: fused_attention.reach_of(*visible_keys(first_key, own, window, context))
        for window, context in windows.items()
    }
    rotary = rotary_at(trunk, array(position_ids.reshape(-1)))
    batch = _Batch(input_ids.reshape(-1), rotary, reaches, predictors)
    trained = next((p for p in _parameters(trunk) if p.requires_grad), None)
    if trained is None or not torch.is_grad_enabled():
        return torch.from_numpy(_forward(trunk, batch, None))
    return _Pass.apply(trained, trunk, batch, recompute)


def _parameters(trunk: Trunk) -> list[Tensor]:
    """All parameters. Which of them are trained, `requires_grad` says."""
    parameters = [trunk.embedding, trunk.final_norm.weight]
    for layer in trunk.layers:
        parameters += [norm.weight for norm in layer.norms]
        for linear in layer.linears:
            parameters += [p for p in (linear.weight, linear.bias) if p is not None]
    return parameters


class _Pass(Function):
    """Autograd is shown one of the trained parameters; the gradients of all of them go to the accumulators."""

    @staticmethod
    def forward(ctx: Any, trained: Tensor, trunk: Trunk, batch: _Batch, recompute: bool) -> Tensor:
        kept: list[Any] = []  # of each layer its activations, or its input; then the result of the final norm
        hidden = _forward(trunk, batch, kept, recompute)
        ctx.trunk, ctx.batch, ctx.kept = trunk, batch, kept
        return torch.from_numpy(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        if not ctx.kept:
            raise RuntimeError("a second backward through one pass: its activations were freed")
        _backward(ctx.trunk, ctx.batch, ctx.kept, array(grad))
        return None, None, None, None


def _forward(trunk: Trunk, batch: _Batch, kept: list[Any] | None, recompute: bool = False) -> np.ndarray:
    """Hidden states [n, H]; appends to `kept` what the backward needs."""
    x = array(trunk.embedding)[batch.ids.numpy()]
    for layer in trunk.layers:
        if kept is None:
            x = _layer_forward(layer, x, trunk, batch)[0]
            continue
        layer_input = x
        x, activations = _layer_forward(layer, layer_input, trunk, batch)
        kept.append(layer_input if recompute else activations)
    final = normalise(trunk.final_norm, x)
    if kept is not None:
        kept.append(final)
    return final.y


def _layer_forward(layer: Layer, x: np.ndarray, trunk: Trunk, batch: _Batch) -> tuple[np.ndarray, Activations]:
    rows = batch.predictors.numpy() if layer is trunk.layers[-1] else None

    def attend(layer: Layer, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> Attended:
        flat = query.reshape(-1), key.reshape(-1), value.reshape(-1)
        return Attended(*fused_attention.forward(*flat, batch.reaches[layer.window], layer.spec))

    found = programs.forward(layer, x, batch.rotary, attend, rows) if programs.run_as_programs(layer) else None
    return layer_forward(layer, x, batch.rotary, attend, rows) if found is None else found


def _backward(trunk: Trunk, batch: _Batch, kept: list[Any], grad: np.ndarray) -> None:
    """Empties `kept` on the way, so that each layer's memory is free for the one before it."""
    final: NormResult = kept.pop()
    dx = _norm_backward(trunk.final_norm, final, grad)
    for layer in reversed(trunk.layers):
        state = kept.pop()
        if not isinstance(state, Activations):
            state = _layer_forward(layer, state, trunk, batch)[1]
        dx = _layer_backward(layer, state, dx, batch)
    if trunk.embedding_accumulator is not None:
        if trunk.padding_idx is not None:  # as in nn.Embedding, this row takes no gradient
            dx[(batch.ids == trunk.padding_idx).numpy()] = 0.0
        trunk.embedding_accumulator.add_rows(trunk.embedding, torch.from_numpy(dx), batch.ids)


def _layer_backward(layer: Layer, a: Activations, grad: np.ndarray, batch: _Batch) -> np.ndarray:
    if programs.run_as_programs(layer):
        found = programs.backward(layer, a, grad, batch.rotary, lambda d: _attention_backward(layer, a, d, batch))
        if found is not None:
            for linear, x, dy in found.of_results:
                _add_gradients(linear, x, dy)
            return found.x
    return _layer_backward_in_steps(layer, a, grad, batch)


def _layer_backward_in_steps(layer: Layer, a: Activations, grad: np.ndarray, batch: _Batch) -> np.ndarray:
    """Kernel after kernel; NumericsError names the first operation whose gradient is not finite."""
    d_gated = _linear_backward(layer.down, a.down_input, grad)
    d_gate, d_up = layer_parts.silu_times_backward(d_gated, a.gate, a.up)
    d_normed = layer_parts.add(
        _linear_backward(layer.up, a.mlp_input, d_up), _linear_backward(layer.gate, a.mlp_input, d_gate)
    )
    d_middle = layer_parts.add(grad, _norm_backward(layer.mlp_norm, a.mlp_norm, d_normed))
    d_attended = _linear_backward(layer.out, a.out_input, d_middle)
    if a.rows is not None:
        d_middle, d_attended = (programs.among_all(d, a.rows, len(batch.ids)) for d in (d_middle, d_attended))
    dq, dk, dv = _attention_backward(layer, a, d_attended, batch)
    for states in (dq, dk):
        layer_parts.rotate(
            states, batch.rotary.cosine, batch.rotary.sine, batch.rotary.positions, layer.spec.dim, back=True
        )
    dq = _head_norm_backward(layer.query_norm, a.query_norm, dq)
    dk = _head_norm_backward(layer.key_norm, a.key_norm, dk)
    shared = a.attention_input
    # in the order in which autograd adds the three
    d_normed = layer_parts.add(_linear_backward(layer.value, shared, dv), _linear_backward(layer.key, shared, dk))
    d_normed = layer_parts.add(d_normed, _linear_backward(layer.query, shared, dq))
    return layer_parts.add(d_middle, _norm_backward(layer.attention_norm, a.attention_norm, d_normed))


def _attention_backward(
    layer: Layer, a: Activations, grad: np.ndarray, batch: _Batch
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of the rotated query and key, and of value, given that of the result of attention."""
    assert a.attended.largest is not None and a.attended.total is not None
    q, k, v, out, d_out = (x.reshape(-1) for x in (a.query, a.key, a.value, a.attended.values, grad))
    saved = Saved(q, k, v, out, d_out, a.attended.largest, a.attended.total)
    gradients = fused_attention.backward(saved, batch.reaches[layer.window], layer.spec)
    dq, dk, dv = (d.reshape(x.shape) for d, x in zip(gradients, (a.query, a.key, a.value), strict=True))
    return dq, dk, dv


def _norm_backward(norm: NormWeights, result: NormResult, grad: np.ndarray) -> np.ndarray:
    return rms_norm_backward(grad, result.x, norm.weight, norm.values, result.inverse, norm.accumulator)


def _head_norm_backward(norm: NormWeights | None, result: NormResult | None, grad: np.ndarray) -> np.ndarray:
    if norm is None or result is None:
        return grad
    return _norm_backward(norm, result, grad.reshape(result.x.shape)).reshape(grad.shape)


def _linear_backward(layer: LinearWeights, x: LinearInput, dy: np.ndarray) -> np.ndarray:
    """dy W; the weight and bias gradients go to the accumulator."""
    operand = prepare_operand(dy)
    dx = layer.prepared.product(operand, layer.weight, 0, NO_BIAS)
    _add_gradients(layer, x, LinearInput(dy, operand.exponents))
    return dx


def _add_gradients(layer: LinearWeights, x: LinearInput, dy: LinearInput) -> None:
    """The gradients of weight and bias to the accumulator, given that of the result."""
    if layer.accumulator is None:
        return
    gradient, exponents = torch.from_numpy(dy.values), torch.from_numpy(dy.exponents)
    if layer.weight.requires_grad:
        name = layer.accumulator.names[id(layer.weight)]
        values, input_exponents = torch.from_numpy(x.values), torch.from_numpy(x.exponents)
        layer.accumulator.add_measured(name, values, input_exponents, gradient, exponents)
    if layer.bias is not None and layer.bias.requires_grad:
        layer.accumulator.add_rows(layer.bias, gradient)
