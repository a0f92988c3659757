"""Exact layers whose numbers are rounded as in a stack of lower precision: products stay exact, results are rounded.

Where a stack of 16 bits rounds: weights; inputs and outputs of linear layers and norms; queries, keys and values as
attention takes them (after the rotation), and its result; the activation function; both sums of the residual stream.
Inside attention, a norm or a softmax such stacks compute in float32, and nothing is rounded. Formats of 8 bits round
weights and inputs of the linear layers of attention and MLP alone, with a scale for each row, as W8A8 does.

Gradients pass through every rounding as if it were not there, onto float32 weights; with `gradients` set, the gradient
at each of these places is rounded too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd import Function
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ppo_repro.errors import UserError
from ppo_repro.numerics.arithmetic.rounding import round_rows, round_to
from ppo_repro.numerics.layers.activations import ExactSiLU
from ppo_repro.numerics.layers.embedding import ExactEmbedding
from ppo_repro.numerics.layers.experts import ExactExperts, ExactRouter
from ppo_repro.numerics.layers.families import ATTENTIONS, LLAMA_TRUNKS, MIXTURE_TRUNKS, head_of, trunk_of
from ppo_repro.numerics.layers.linear import ExactLinear
from ppo_repro.numerics.layers.norms import ExactRMSNorm
from ppo_repro.numerics.layers.precision import Precision, RoundedWeight, rounded


class RoundedLinear(ExactLinear):
    """A linear layer of attention or MLP: rounded input, weight and output."""

    def __init__(self, source: ExactLinear, precision: Precision) -> None:
        super().__init__(cast(nn.Linear, source), source.prepared.name)
        self.precision = precision
        self.prepared = RoundedWeight(source.prepared.name, precision.weights, precision.other_weights)

    def forward(self, x: Tensor) -> Tensor:
        p = self.precision
        x = rounded(x, p.activations, p.gradients)
        if p.linear_inputs is not None:
            x = rounded(x, p.linear_inputs)
        return rounded(super().forward(x), p.activations, p.gradients)


class RoundedHead(ExactLinear):
    """The language-model head: rounded input and weight, and logits."""

    def __init__(self, source: ExactLinear, precision: Precision) -> None:
        super().__init__(cast(nn.Linear, source), source.prepared.name)
        self.precision = precision
        self.prepared = RoundedWeight(source.prepared.name, precision.other_weights, precision.other_weights)

    def forward(self, x: Tensor) -> Tensor:
        p = self.precision
        return rounded(super().forward(rounded(x, p.activations, p.gradients)), p.logits, p.gradients)


class RoundedEmbedding(ExactEmbedding):
    """Token embedding: rounded weight and output."""

    def __init__(self, source: ExactEmbedding, precision: Precision) -> None:
        super().__init__(cast(nn.Embedding, source))
        self.precision = precision

    def forward(self, ids: Tensor) -> Tensor:
        p = self.precision
        return rounded(rounded(super().forward(ids), p.other_weights), p.activations, p.gradients)


class RoundedRMSNorm(ExactRMSNorm):
    """Root-mean-square norm: rounded weight and output; float32 in between."""

    def __init__(self, source: ExactRMSNorm, precision: Precision) -> None:
        super().__init__(source.weight, source.eps, source.name)
        self.precision = precision

    def factor(self) -> Tensor:
        p = self.precision
        return super().factor() if p.other_weights is None else round_to(self.weight.detach(), p.other_weights)

    def forward(self, x: Tensor) -> Tensor:
        return rounded(super().forward(x), self.precision.activations, self.precision.gradients)


class RoundedSiLU(ExactSiLU):
    """SiLU with a rounded result; the product with the other half is rounded as the input of the next layer."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        return rounded(super().forward(x), self.precision.activations, self.precision.gradients)


class RoundedRouter(ExactRouter):
    """The router of a mixture: rounded input, weight and logits; softmax and routing weights in float32.

    Stacks of 8 bits leave it alone, and gates of 16 bits give logits of 16 bits, so ties are frequent.
    """

    def __init__(self, source: ExactRouter, precision: Precision) -> None:
        super().__init__(source, source.name)
        self.normalised, self.precision = source.normalised, precision
        self.prepared = RoundedWeight(source.name, precision.other_weights, None)

    def logits(self, x: Tensor) -> Tensor:
        p = self.precision
        return rounded(super().logits(rounded(x, p.activations, p.gradients)), p.activations, p.gradients)


class RoundedExperts(ExactExperts):
    """The experts of a mixture: linear layers rounded as those of an MLP, and the sum over experts."""

    def __init__(self, source: ExactExperts, precision: Precision) -> None:
        super().__init__(source, "")
        self.precision = precision
        self.prepared_gate_up, self.prepared_down = (
            [RoundedWeight(one.name, precision.weights, None) for one in prepared]
            for prepared in (source.prepared_gate_up, source.prepared_down)
        )

    def _entering(self, x: Tensor) -> Tensor:
        p = self.precision
        x = rounded(x, p.activations, p.gradients)
        return x if p.linear_inputs is None else rounded(x, p.linear_inputs)

    def gate_up(self, rows: Tensor, counts: list[int]) -> Tensor:
        p = self.precision
        return rounded(super().gate_up(self._entering(rows), counts), p.activations, p.gradients)

    def down(self, rows: Tensor, counts: list[int]) -> Tensor:
        p = self.precision
        return rounded(super().down(self._entering(rows), counts), p.activations, p.gradients)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return rounded(super().forward(x, weights, experts), self.precision.activations, self.precision.gradients)


class RoundedDecoderLayer(GradientCheckpointingLayer):
    """A decoder layer of the Llama structure, h = x + attention(norm(x)), y = h + mlp(norm(h)): both sums rounded."""

    def __init__(self, source: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        for name, child in source.named_children():  # in their order, which is that of the parameters
            setattr(self, name, child)
        self.train(source.training)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        p, parts = self.precision, cast(Any, self)
        attended, _ = parts.self_attn(hidden_states=parts.input_layernorm(hidden_states), **options)
        middle = rounded(hidden_states + attended, p.activations, p.gradients)
        return rounded(middle + parts.mlp(parts.post_attention_layernorm(middle)), p.activations, p.gradients)


def attention_inputs(precision: Precision, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [R, H, L, D] as attention takes them; keys and values as a cache holds them.

    A cache in a format of 8 bits has scale 1 in floating point, the usual one of `vllm` and `sglang`, and one for each
    head of a token in int8. Every query reads the cache's numbers, its own token's included, cached or not.
    """
    q, k, v = (rounded(x, precision.activations, precision.gradients) for x in (q, k, v))
    if precision.kv_cache is None:
        return q, k, v
    k, v = (_Stored.apply(x, precision.kv_cache) for x in (k, v))
    return q, k, v


class _Stored(Function):
    """Keys or values in the format of a cache; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: str) -> Tensor:
        return round_rows(x, form) if form == "int8" else round_to(x, form)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def round_model(model: PreTrainedModel, precision: Precision, where: str) -> PreTrainedModel:
    """Exchange the layers of a lowered causal model in place for rounded ones, and return it.

    Parameters stay the same objects under the same names and in the same order. UserError, beginning with `where`, for
    a model of another structure.
    """
    if not precision.rounds:
        return model
    head = head_of(model)
    if not isinstance(head, ExactLinear) or type(trunk_of(model)) not in (*LLAMA_TRUNKS, *MIXTURE_TRUNKS):
        known = "Llama, Qwen2, Qwen3, Mistral, Qwen3-MoE, Mixtral or OLMoE"
        raise UserError(f"{where}: needs a {known} model, not {type(model).__name__}; remove it")
    model.set_output_embeddings(RoundedHead(head, precision))
    if precision.only_logits:
        return model
    trunk = trunk_of(model)
    for name, module in list(trunk.named_modules()):
        replacement = _replacement(module, precision)
        if replacement is not None:
            parent, _, attribute = name.rpartition(".")
            setattr(trunk.get_submodule(parent), attribute, replacement)
        if type(module) in ATTENTIONS:
            cast(Any, module).precision = precision
    for name, layer in list(trunk.named_modules()):
        if isinstance(layer, GradientCheckpointingLayer):
            parent, _, attribute = name.rpartition(".")
            setattr(trunk.get_submodule(parent), attribute, RoundedDecoderLayer(layer, precision))
    return model


def _replacement(module: nn.Module, precision: Precision) -> nn.Module | None:
    if type(module) is ExactLinear:
        return RoundedLinear(module, precision)
    if type(module) is ExactEmbedding:
        return RoundedEmbedding(module, precision)
    if type(module) is ExactRMSNorm:
        return RoundedRMSNorm(module, precision)
    if type(module) is ExactRouter:
        return RoundedRouter(module, precision)
    if type(module) is ExactExperts:
        return RoundedExperts(module, precision)
    return RoundedSiLU(precision) if type(module) is ExactSiLU else None


def view_of(model: PreTrainedModel) -> PreTrainedModel:
    """Another tree of modules over the very parameters and buffers of a lowered model without gradients to collect."""
    shared: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
