"""Token embeddings whose gradients are exact sums, and Gemma's scaled embedding."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.autograd import Function
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

from ppo_repro.numerics.gradient_bins import Gradients
from ppo_repro.numerics.layers.linear import ExactModule


class _Embedding(Function):
    """y[t] = w[ids[t]]; the gradient of w goes to the accumulator."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, accumulator: Gradients | None, table: Tensor
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx, ctx.accumulator = weight, padding_idx, accumulator
        return table[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        if ctx.accumulator is not None:
            if ctx.padding_idx is not None:  # as in nn.Embedding, this row takes no gradient
                grad = grad.masked_fill((ids == ctx.padding_idx)[..., None], 0.0)
            ctx.accumulator.add_rows(ctx.weight, grad.reshape(-1, grad.shape[-1]), ids.reshape(-1))
        return None, None, None, None, None


def embedded(
    ids: Tensor, weight: Tensor, padding_idx: int | None, accumulator: Gradients | None, table: Tensor
) -> Tensor:
    """The rows `ids` of `table` [V, H] float32, which is the parameter `weight`, or what it is a part of."""
    return _Embedding.apply(ids, weight, padding_idx, accumulator, table.detach())


class ExactEmbedding(ExactModule):
    """Token embedding; ids [..] int64 -> [.., H] float32."""

    def __init__(self, source: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.padding_idx = source.weight, source.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        return embedded(ids, self.weight, self.padding_idx, self.accumulator, self.weight)


class ExactScaledEmbedding(ExactEmbedding):
    """Gemma's token embedding times sqrt(H), rounded to float32 as Gemma does; ids [..] int64 -> [.., H] float32."""

    def __init__(self, source: GemmaTextScaledWordEmbedding) -> None:
        super().__init__(source)
        self.scale = float(cast(Tensor, source.embed_scale))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale
