"""Models that several processes hold together, each some heads, rows, columns and tokens (Shoeybi et al., 2019).

Two kinds of products are divided along their sum: those whose inputs are divided, and the input gradients of those
whose outputs are. Their operands lie on the grids of whole rows, the integer partial sums are added up over the
processes, and rounded once after that. So a layer has the bits it has in one process. Everything else a process
computes by the kernels it has, on its own heads, columns or rows.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.errors import UserError
from ppo_repro.numerics.arithmetic.contraction import Operand, input_operand, weight_operand
from ppo_repro.numerics.arithmetic.contraction import linear as contract
from ppo_repro.numerics.arithmetic.divided import Holders, Share
from ppo_repro.numerics.gradient_bins import Gradients
from ppo_repro.numerics.layers.embedding import ExactEmbedding
from ppo_repro.numerics.layers.families import decoder_layers, head_of, key_value_heads, trunk_of
from ppo_repro.numerics.layers.linear import ExactLinear, ExactModule
from ppo_repro.numerics.products import PreparedWeight, factor_exponents
from ppo_repro.shares import pieces

OUTPUTS, INPUTS = 0, 1  # along which dimension of a weight [N, K] it is divided
TYPES, FAMILIES = ("llama", "qwen2", "qwen3", "mistral"), "Llama, Qwen2, Qwen3 or Mistral"
ATTENTION = {"q_proj": OUTPUTS, "k_proj": OUTPUTS, "v_proj": OUTPUTS, "o_proj": INPUTS}
MLP = {"gate_proj": OUTPUTS, "up_proj": OUTPUTS, "down_proj": INPUTS}


def share_of(length: int, holders: Holders) -> Share:
    """What this process holds of `length` numbers; parts differ by one number at most."""
    part = pieces(length, holders.size)[holders.rank]
    return Share(holders, part.start, part.stop, length)


def check_divisible(config: PretrainedConfig, count: int, of: str) -> None:
    """Raise UserError naming the first size of the model `of` that `layout.mesh.tensor` = count does not divide."""
    if count == 1:
        return
    if config.model_type not in TYPES:
        raise UserError(
            f"layout.mesh.tensor = {count}: {of} is a {config.model_type} model; processes divide models of "
            f"{FAMILIES}; take 1"
        )
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": key_value_heads(config),
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % count:
            allowed = [n for n in range(1, size + 1) if all(s % n == 0 for s in sizes.values())]
            raise UserError(
                f"layout.mesh.tensor = {count}: {of} has {name} = {size}, which it does not divide; "
                f"must be {'one of ' if len(allowed) > 1 else ''}{', '.join(map(str, allowed))}"
            )


class DividedWeight(PreparedWeight):
    """A part of a weight [N, K], prepared for both products; that along `dim` is a sum over the parts of all processes.

    For it 9 bytes for each number beside the weight: this is the eager specification, not a kernel.
    """

    def __init__(self, name: str, dim: int, share: Share) -> None:
        super().__init__(name)
        self.dim, self.share = dim, share
        self._made_from: tuple[int, int] = (0, -1)
        self._rows: Operand | None = None

    def forget(self) -> None:
        super().forget()
        self._made_from, self._rows = (0, -1), None

    def contract(self, x: Tensor, weight: Tensor, dim: int, bias: Tensor | None = None) -> Tensor:
        """As `PreparedWeight.contract`; along the divided dimension all processes must call it, with their parts of x,
        and each of them gets the whole result.
        """
        if dim != self.dim:
            return super().contract(x, weight, dim, bias)
        made_from = weight.data_ptr(), weight._version
        if self._rows is None or made_from != self._made_from:
            rows = weight.detach() if dim == INPUTS else weight.detach().t()
            self._rows, self._made_from = weight_operand(rows, self._where, self.share), made_from
        return contract(input_operand(x.detach(), self._where, self.share), self._rows, bias, self.share)


class _DividedLinear(Function):
    """y = x W^T + b and dx = dy W, of which one is a divided sum; gradients of weight and bias to the accumulator."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: DividedLinear,
        accumulator: Gradients | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows)
        ctx.parameters, ctx.layer, ctx.accumulator, ctx.shape = (weight, bias), layer, accumulator, x.shape
        return layer.prepared.contract(rows, weight, 1, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (weight, bias), layer = ctx.saved_tensors, ctx.parameters, ctx.layer
        dy, dx = grad.reshape(-1, grad.shape[-1]), None
        if ctx.needs_input_grad[0]:
            dx = layer.prepared.contract(dy, weight, 0).view(ctx.shape)
        if ctx.accumulator is not None:
            if ctx.needs_input_grad[1]:
                name = ctx.accumulator.names[id(weight)]
                exponents, grad_exponents = factor_exponents(name, rows, dy)
                if layer.dim == INPUTS:  # the grid of an input is that of its whole row
                    exponents = layer.share.largest(exponents)
                ctx.accumulator.add_measured(name, rows, exponents, dy, grad_exponents)
            if ctx.needs_input_grad[2]:
                ctx.accumulator.add_rows(bias, dy)
        return dx, None, None, None, None


class DividedLinear(ExactLinear):
    """An `ExactLinear` of which this process has some outputs, or some inputs and then the whole result."""

    def __init__(self, source: ExactLinear, dim: int, holders: Holders, weight: nn.Parameter) -> None:
        ExactModule.__init__(self)
        self.dim, self.share = dim, share_of(source.weight.shape[dim], holders)
        self.weight, self.bias = weight, source.bias
        if source.bias is not None and dim == OUTPUTS:
            self.bias = _own_parameter(source.bias, self.share, 0)
        self.prepared = DividedWeight(source.prepared.name, dim, self.share)

    def forward(self, x: Tensor) -> Tensor:
        return _DividedLinear.apply(x, self.weight, self.bias, self, self.accumulator)


class _Joined(Function):
    """The columns of all processes; the gradient goes to those of this one."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return share.joined(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.share.own(grad).contiguous(), None


class DividedHead(DividedLinear):
    """A language-model head of which this process has the logits of some tokens; called, it gives those of all."""

    def forward(self, x: Tensor) -> Tensor:
        return _Joined.apply(self.own_logits(x), self.share)

    def own_logits(self, x: Tensor) -> Tensor:
        """The logits of this process's tokens."""
        return super().forward(x)


class _DividedEmbedding(Function):
    """y[t] = w[ids[t]] from whoever has that row; each process adds up the gradient of its own rows."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, share: Share, accumulator: Gradients | None
    ) -> Tensor:
        owned = (ids >= share.start) & (ids < share.stop)
        rows = torch.where(owned, ids - share.start, 0)
        ctx.save_for_backward(rows, owned if padding_idx is None else owned & (ids != padding_idx))
        ctx.weight, ctx.accumulator = weight, accumulator
        return share.spread(weight.detach()[rows], owned[..., None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, counts = ctx.saved_tensors
        if ctx.accumulator is not None:
            ctx.accumulator.add_rows(ctx.weight, grad[counts], rows[counts])
        return None, None, None, None, None


class DividedEmbedding(ExactEmbedding):
    """An `ExactEmbedding` of which this process has the rows of some tokens."""

    def __init__(self, source: ExactEmbedding, holders: Holders, weight: nn.Parameter) -> None:
        ExactModule.__init__(self)
        self.share, self.dim = share_of(len(source.weight), holders), OUTPUTS
        self.weight, self.padding_idx = weight, source.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        return _DividedEmbedding.apply(ids, self.weight, self.padding_idx, self.share, self.accumulator)


def _own_parameter(whole: Tensor, share: Share, dim: int) -> nn.Parameter:
    return nn.Parameter(share.own(whole.detach(), dim).clone(), requires_grad=whole.requires_grad)


def divide(model: PreTrainedModel, holders: Holders, of: str = "the model") -> PreTrainedModel:
    """Keep this process's part of a lowered model, in place, and free the rest; the model itself for one holder.

    UserError for a model that cannot be divided, see `check_divisible`.
    """
    if holders.size == 1:
        return model
    check_divisible(model.config, holders.size, of)
    divide_vocabulary(model, holders)
    for layer in decoder_layers(model):
        for parent, dims in ((cast(Any, layer).self_attn, ATTENTION), (cast(Any, layer).mlp, MLP)):
            for name, dim in dims.items():
                source: ExactLinear = getattr(parent, name)
                own = _own_parameter(source.weight, share_of(source.weight.shape[dim], holders), dim)
                setattr(parent, name, DividedLinear(source, dim, holders, own))
    return model


def divide_vocabulary(model: PreTrainedModel, holders: Holders) -> None:
    """Keep this process's tokens of the embedding, and of the head where the model has one, and free the rest."""
    trunk = cast(Any, trunk_of(model))
    embedding, head = trunk.embed_tokens, None if trunk is model else cast(ExactLinear, head_of(model))
    share = share_of(len(embedding.weight), holders)
    own = _own_parameter(embedding.weight, share, OUTPUTS)
    trunk.embed_tokens = DividedEmbedding(embedding, holders, own)
    if head is not None:
        tied = head.weight is embedding.weight
        own_head = own if tied else _own_parameter(head.weight, share, OUTPUTS)
        model.set_output_embeddings(DividedHead(head, OUTPUTS, holders, own_head))


def own_logits(head: nn.Module, hidden: Tensor) -> tuple[Tensor, Share | None]:
    """The logits of hidden states [n, H] that this process has, float32, and of which tokens they are; None for all."""
    if isinstance(head, DividedHead):
        return head.own_logits(hidden), head.share
    if type(head) is nn.Linear:  # a stock trainer has both in 16 bits, and dropout gives float32
        return head(hidden.to(head.weight.dtype)).float(), None
    return head(hidden), None
