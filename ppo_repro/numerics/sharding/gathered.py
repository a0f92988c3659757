"""Models whose matrices lie in pieces with all processes, and are whole for one product only (ZeRO 3).

A process computes its own sequences by the kernels it has, with all of a matrix: only where it lies in the meantime is
divided. So nothing is added up that one process does not add up, but the gradients, as in any mesh.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.errors import UserError
from ppo_repro.mesh.shards import ShardRanks
from ppo_repro.numerics.layers.embedding import ExactEmbedding, ExactScaledEmbedding, embedded
from ppo_repro.numerics.layers.linear import ExactConv1D, ExactLinear, ExactModule
from ppo_repro.numerics.layers.routes import routers
from ppo_repro.numerics.products import PreparedWeight
from ppo_repro.shares import pieces


class ShardedWeight(PreparedWeight):
    """A matrix of which this process holds a piece; whole, and prepared, while a product is computed."""

    def __init__(self, name: str, number: int, shape: torch.Size, ranks: ShardRanks) -> None:
        super().__init__(name)
        self.number, self.shape, self.ranks = number, shape, ranks

    def whole(self) -> Tensor:
        """The matrix, from the pieces of all processes, of which those that do not call this give theirs too."""
        return self.ranks.whole(self.number).view(self.shape)

    def contract(self, x: Tensor, weight: Tensor, dim: int, bias: Tensor | None = None) -> Tensor:
        """As `PreparedWeight.contract`, with the whole matrix for `weight`, which is the piece."""
        return PreparedWeight(self.name).contract(x, self.whole(), dim, bias)  # keeps nothing of it


class ShardedLinear(ExactLinear):
    """An `ExactLinear` whose parameter is this process's piece of the weight, flat; the bias is whole."""

    prepared: ShardedWeight

    def __init__(self, source: ExactLinear, weight: nn.Parameter, prepared: ShardedWeight) -> None:
        ExactModule.__init__(self)
        self.weight, self.bias, self.prepared = weight, source.bias, prepared


class ShardedConv1D(ExactConv1D):
    """The same of an `ExactConv1D`."""

    prepared: ShardedWeight

    def __init__(self, source: ExactConv1D, weight: nn.Parameter, prepared: ShardedWeight) -> None:
        ExactModule.__init__(self)
        self.weight, self.bias, self.prepared = weight, source.bias, prepared


class ShardedEmbedding(ExactModule):
    """The same of an `ExactEmbedding`, or of Gemma's scaled one."""

    def __init__(self, source: ExactEmbedding, weight: nn.Parameter, prepared: ShardedWeight) -> None:
        super().__init__()
        self.weight, self.padding_idx, self.prepared = weight, source.padding_idx, prepared
        self.scale = source.scale if isinstance(source, ExactScaledEmbedding) else None

    def forward(self, ids: Tensor) -> Tensor:
        found = embedded(ids, self.weight, self.padding_idx, self.accumulator, self.prepared.whole())
        return found if self.scale is None else found * self.scale


Sharded = ShardedLinear | ShardedConv1D | ShardedEmbedding
_KINDS = {
    ExactLinear: ShardedLinear,
    ExactConv1D: ShardedConv1D,
    ExactEmbedding: ShardedEmbedding,
    ExactScaledEmbedding: ShardedEmbedding,
}


def shard(model: PreTrainedModel, ranks: ShardRanks, of: str = "the model") -> PreTrainedModel:
    """Keep this process's pieces of the matrices of a lowered model, in place, and free the rest.

    Norms and biases stay whole. UserError for a mixture of experts.
    """
    if routers(model):
        raise UserError(
            f"layout.mesh.zero = 3: {of} is a mixture of experts, whose experts processes do not divide; take 2"
        )
    made = dict[int, tuple[nn.Parameter, int]]()  # an embedding and its tied head stay one parameter
    for name, module in list(model.named_modules()):
        kind = _KINDS.get(type(module))
        if kind is None:
            continue
        source = cast(Any, module)
        weight = source.weight
        if id(weight) not in made:
            own = pieces(weight.numel(), ranks.size)[ranks.rank]
            flat = weight.detach().contiguous().view(-1)[own.start : own.stop].clone()
            piece = nn.Parameter(flat, requires_grad=weight.requires_grad)
            made[id(weight)] = piece, ranks.keep(piece, weight.numel())
        piece, number = made[id(weight)]
        prepared = ShardedWeight(name, number, weight.shape, ranks)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, kind(source, piece, prepared))
    return model
