"""Mixtures of experts with exact sums: the router, its choice of experts, and the experts themselves.

A token is computed by its k experts alone and shares no sum with another token. The laws:

* the experts of a token are those with the k largest router logits; of equal logits the lower expert index wins;
* routing weights are integer masses over an exact sum of masses, see `arithmetic.distribution`;
* where a token's experts meet, their k terms are added in float64 by rising expert index and rounded once to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.distribution import distribution
from ppo_repro.numerics.arithmetic.grid import DOT_BITS, exact_dot, quantise
from ppo_repro.numerics.gradient_bins import Gradients
from ppo_repro.numerics.layers.linear import ExactModule, linear
from ppo_repro.numerics.logprobs import top_logits
from ppo_repro.numerics.products import PreparedWeight


def chosen_experts(logits: Tensor, count: int) -> Tensor:
    """The experts with the `count` largest logits, int64 [T, k] by rising index; of equal logits the lower index wins.

    logits [T, E] float32, k = count <= E.
    """
    return top_logits(logits, 1.0, count)[0].to(torch.int64).sort(-1).values


def ordered_sum(terms: Tensor | Sequence[Tensor]) -> Tensor:
    """terms[0] + terms[1] + ... in this order, float64; terms [k, ..]."""
    total = terms[0].to(torch.float64)
    for term in terms[1:]:
        total = total + term.to(torch.float64)
    return total


class _RoutingWeights(Function):
    """w = softmax(logits over the chosen experts) where normalised, else softmax(logits) at the chosen experts.

    logits [T, E] float32, experts int64 [T, k] -> [T, k] float32. With p the softmax and g its gradient, 0 where not
    chosen: dlogits = p (g - sum p g).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, experts: Tensor, normalised: bool) -> Tensor:
        d = distribution(logits.gather(-1, experts) if normalised else logits, None)
        p = d.masses / d.total
        ctx.save_for_backward(p, experts)
        ctx.normalised, ctx.shape = normalised, logits.shape
        return (p if normalised else p.gather(-1, experts)).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, experts = ctx.saved_tensors
        g = grad.to(torch.float64)
        chosen = p if ctx.normalised else p.gather(-1, experts)
        mean = ordered_sum((chosen * g).unbind(-1))[:, None]
        zeros = torch.zeros(ctx.shape, dtype=torch.float64, device=grad.device)
        if ctx.normalised:
            d = zeros.scatter(-1, experts, p * (g - mean))
        else:
            d = p * (zeros.scatter(-1, experts, g) - mean)
        return d.to(torch.float32), None, None


class _ExpertLinear(Function):
    """y[s] = W[e(s)] x[s] for rows sorted by expert, and dx[s] = dy[s] W[e(s)]; the gradient of W [E, N, K] is summed.

    Each expert's product, and its share of the gradient, is that of a linear layer over its own rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: list[int], prepared: Sequence[PreparedWeight], to: Gradients | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.counts, ctx.prepared, ctx.accumulator = weight, counts, prepared, to
        return _by_expert(x, weight, counts, prepared, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), grad = ctx.saved_tensors, grad.contiguous()
        if ctx.accumulator is not None and ctx.needs_input_grad[1]:
            for expert, rows in _rows_of(ctx.counts):
                ctx.accumulator.add_linear(ctx.weight, x[rows], grad[rows], part=expert)
        return _by_expert(grad, ctx.weight, ctx.counts, ctx.prepared, 0), None, None, None, None


def _rows_of(counts: list[int]) -> list[tuple[int, slice]]:
    """Each expert that has rows, with them."""
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, slice(start, start + count)))
        start += count
    return found


def _by_expert(x: Tensor, weight: Tensor, counts: list[int], prepared: Sequence[PreparedWeight], dim: int) -> Tensor:
    """The product of each expert's rows with its matrix, over dimension `dim` of the matrix; [S, ..] float32."""
    y = torch.empty(len(x), weight.shape[2 - dim], dtype=torch.float32, device=x.device)
    matrices = weight.detach()
    for expert, rows in _rows_of(counts):
        y[rows] = prepared[expert].contract(x[rows], matrices[expert], dim)
    return y


@dataclass(frozen=True)
class Dispatch:
    """Which row of the S = T k rows sorted by expert belongs to which token; a token's experts are in rising order."""

    tokens: Tensor  # [S] int64, the token of each row
    places: Tensor  # [T, k] int64, the rows of each token
    counts: list[int]  # rows of each expert


def dispatch(experts: Tensor, count: int) -> Dispatch:
    """Sort the rows of tokens by expert; experts int64 [T, k], `count` experts in all."""
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(flat), device=flat.device)
    counts = (flat[None, :] == torch.arange(count, device=flat.device)[:, None]).sum(-1)
    return Dispatch(order // experts.shape[1], places.view(experts.shape), counts.tolist())


class _Scatter(Function):
    """rows[s] = x[token of s]; dx[t] = sum over the experts of t by rising index, in float64, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Dispatch) -> Tensor:
        ctx.places = way.places
        return x[way.tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ordered_sum(grad[ctx.places.t()]).to(torch.float32), None


class _Combine(Function):
    """out[t] = sum_j w[t, j] y[row of t, j], by rising expert index in float64, rounded once; [T, H] float32.

    Products of two float32 are exact in float64. dy = w dout; dw[t, j] = dout[t] . y[..], an exact dot product.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, way: Dispatch) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.way = way
        terms = (y[rows].to(torch.float64) * w[:, None] for rows, w in _by_rank(way, weights.to(torch.float64)))
        return ordered_sum(tuple(terms)).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y, weights), way = ctx.saved_tensors, ctx.way
        where = "the gradient of a mixture of experts"
        g, g_scale = quantise(grad, DOT_BITS, where=where)
        dy, dw = torch.empty_like(y), []
        for rows, w in _by_rank(way, weights):
            dy[rows] = grad * w[:, None]
            integers, scale = quantise(y[rows], DOT_BITS, where=where)
            dw.append(exact_dot(g, integers) * (g_scale * scale))
        return dy, torch.cat(dw, -1).to(torch.float32), None


def _by_rank(way: Dispatch, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The rows [T] and the weights [T] of every token's first expert, its second, .."""
    return list(zip(way.places.unbind(-1), weights.unbind(-1), strict=True))


class ExactRouter(ExactModule):
    """The router of a mixture: logits [T, E], routing weights [T, k] float32, experts int64 [T, k] by rising index.

    x [T, H] float32. `given` are the experts of the next tokens, int64 [T, k] by rising index, where they are not to
    be chosen here: see `TrunkForward`. Raises NumericsError where a logit is not finite.
    """

    def __init__(self, source: nn.Module, name: str) -> None:
        super().__init__()
        stock = cast(Any, source)
        self.given: Tensor | None = None
        self.weight: nn.Parameter = stock.weight
        self.top_k, self.name = int(stock.top_k), name
        self.normalised = bool(getattr(stock, "norm_topk_prob", True))  # Mixtral's always are
        self.prepared = PreparedWeight(name)

    def logits(self, x: Tensor) -> Tensor:
        """x W^T, [T, E] float32."""
        return linear(x, self.weight, None, self.prepared, self.accumulator)

    def choose(self, logits: Tensor) -> Tensor:
        """The experts of each token, int64 [T, k] by rising index."""
        return chosen_experts(logits.detach(), self.top_k)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(x)
        if not bool(torch.isfinite(logits).all()):
            raise NumericsError(f"a logit of {self.name} is not finite; lower the learning rate or check the weights")
        experts = self.choose(logits) if self.given is None else self.given
        return logits, _RoutingWeights.apply(logits, experts, self.normalised), experts


class ExactExperts(ExactModule):
    """The experts of a mixture, each a gated MLP: y[t] = sum_e w[t, e] down_e(act(gate_e x[t]) up_e x[t]).

    x [T, H], weights [T, k] float32, experts int64 [T, k] by rising index -> [T, H] float32.
    """

    def __init__(self, source: nn.Module, name: str) -> None:
        super().__init__()
        stock = cast(Any, source)
        self.gate_up_proj: nn.Parameter = stock.gate_up_proj  # [E, 2 I, H], the rows of gates first
        self.down_proj: nn.Parameter = stock.down_proj  # [E, H, I]
        self.act_fn: nn.Module = stock.act_fn
        self.prepared_gate_up: Sequence[PreparedWeight]
        self.prepared_down: Sequence[PreparedWeight]
        self.prepared_gate_up, self.prepared_down = (
            [PreparedWeight(f"{name}.{which} of expert {e}") for e in range(len(self.down_proj))]
            for which in ("gate_up_proj", "down_proj")
        )

    def gate_up(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Gates and ups of rows sorted by expert, [S, 2 I] float32."""
        return _ExpertLinear.apply(rows, self.gate_up_proj, counts, self.prepared_gate_up, self.accumulator)

    def down(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The experts' results, [S, H] float32."""
        return _ExpertLinear.apply(rows, self.down_proj, counts, self.prepared_down, self.accumulator)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        way = dispatch(experts, len(self.down_proj))
        gate, up = self.gate_up(_Scatter.apply(x, way), way.counts).chunk(2, dim=-1)
        return _Combine.apply(self.down(self.act_fn(gate) * up, way.counts), weights, way)


class ExactMixture(nn.Module):
    """A router and its experts in place of an MLP; x [.., H] float32 -> [.., H] float32."""

    def __init__(self, source: nn.Module, name: str) -> None:
        super().__init__()
        stock = cast(Any, source)
        for part, module in stock.named_children():  # in their order, which is that of the parameters
            setattr(self, part, (ExactRouter if part == "gate" else ExactExperts)(module, f"{name}.{part}"))

    def forward(self, x: Tensor) -> Tensor:
        parts, rows = cast(Any, self), x.reshape(-1, x.shape[-1])
        _, weights, experts = parts.gate(rows)
        return parts.experts(rows, weights, experts).view(x.shape)
