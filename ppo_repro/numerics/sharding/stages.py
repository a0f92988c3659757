"""Models whose layers lie with several processes, some with each: a pipeline (Huang et al., 2019).

All processes of a group compute the same sequences, and take turns: the first runs its layers and hands the residual
stream over, and so on; gradients come back the other way. What is handed over are bits, and each layer is computed by
one process as one process alone computes it. Embedding and head are divided by token, as where processes divide each
layer, so they lie with all, and all have the results.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ppo_repro.errors import UserError
from ppo_repro.numerics.arithmetic.divided import Holders
from ppo_repro.numerics.layers.families import decoder_layers, modules_of, trunk_of
from ppo_repro.numerics.sharding.layers import FAMILIES, TYPES, divide_vocabulary
from ppo_repro.shares import pieces


def check_layers(config: PretrainedConfig, count: int, of: str) -> None:
    """Raise UserError unless the model `of` has a layer for each of `layout.mesh.pipeline` = count processes."""
    if count == 1:
        return
    if config.model_type not in TYPES:
        raise UserError(
            f"layout.mesh.pipeline = {count}: {of} is a {config.model_type} model; processes divide models of "
            f"{FAMILIES}; take 1"
        )
    if config.num_hidden_layers < count:
        raise UserError(
            f"layout.mesh.pipeline = {count}: {of} has num_hidden_layers = {config.num_hidden_layers}, and each "
            f"process needs one; take up to {config.num_hidden_layers}"
        )


def _handed_over(x: Tensor, giver: int, holders: Holders) -> Tensor:
    """What the process `giver` of a group has for x, on all of them, to the bit."""
    mine = [x.detach().clone()] if holders.rank == giver else []
    given: Tensor = holders.gather(mine)[0]
    return given


class _Turn(Function):
    """The residual stream of the process that ran the layers before; the gradient of the one that has those after.

    None: all have the same, because the embedding comes before, or norm and head come after.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, before: int | None, after: int | None, holders: Holders) -> Tensor:
        ctx.after, ctx.holders = after, holders
        return hidden.view_as(hidden) if before is None else _handed_over(hidden, before, holders)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given = grad if ctx.after is None else _handed_over(grad, ctx.after, ctx.holders)
        return given, None, None, None


class StagedLayer(GradientCheckpointingLayer):
    """A decoder layer of a pipeline, with its own parameters under their names, or nothing of another process's."""

    def __init__(self, source: nn.Module, index: int, stages: list[range], holders: Holders) -> None:
        super().__init__()
        self.stage = next(stage for stage, layers in enumerate(stages) if index in layers)
        self.holders, self.layer = holders, (source,)  # not a child: the names would be others
        self.is_first, self.is_last = index == 0, index == stages[self.stage][-1]
        self._modules = source._modules
        self.sizes = dict[int, torch.Size]()  # of whole parameters
        for module in modules_of(source):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    held = parameter if self.is_own else nn.Parameter(torch.empty(0), parameter.requires_grad)
                    module._parameters[name] = held
                    self.sizes[id(held)] = parameter.shape

    @property
    def is_own(self) -> bool:
        """Whether this process has the layer."""
        return self.stage == self.holders.rank

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # around what a backward pass may compute again: other processes would wait there
        if self.is_first:
            hidden = _Turn.apply(hidden, None, 0, self.holders)
        if self.is_own:
            hidden = super().__call__(hidden, *args, **kwargs)
        if self.is_last:
            after = self.stage + 1 if self.stage + 1 < self.holders.size else None
            hidden = _Turn.apply(hidden, self.stage, after, self.holders)
        return hidden

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer itself, where this process has it."""
        return cast(Tensor, self.layer[0](hidden, *args, **kwargs))


def stage(model: PreTrainedModel, holders: Holders, of: str = "the model") -> PreTrainedModel:
    """Keep this process's layers and tokens of a lowered model, in place, and free the rest.

    UserError for a model with fewer layers than processes, or of a family that is not divided.
    """
    check_layers(model.config, holders.size, of)
    divide_vocabulary(model, holders)
    trunk = cast(Any, trunk_of(model))
    layers = decoder_layers(trunk)
    stages = pieces(len(layers), holders.size)
    trunk.layers = nn.ModuleList(StagedLayer(layer, i, stages, holders) for i, layer in enumerate(layers))
    return model
