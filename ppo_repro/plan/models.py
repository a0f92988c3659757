"""The sizes of a model that decide its memory: matrices, layers, and what a backward pass keeps. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppo_repro.plan.mixtures import Mixture


@dataclass(frozen=True)
class Linear:
    """A matrix of a model, and whether it has a low-rank adapter."""

    outputs: int
    inputs: int
    adapted: bool = False
    across: bool = False  # stored as [inputs, outputs], so that a forward pass multiplies it across its rows
    # by processes that hold a model together: "outputs" or "inputs"; the sizes are those of this process's part
    divided: str = ""
    of_expert: bool = False  # which has operands only where a token takes this expert
    by_rest: bool = False  # formats of 8 bits leave it alone; the head is another one
    rounded: bool = False  # before it is prepared, so that there is a float32 copy of it

    @property
    def size(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True)
class Saved:
    """The numbers that a backward pass keeps of each token in one layer."""

    hidden: int  # multiple of the width of the residual stream
    queries: int  # multiple of the width of all query heads
    keys: int  # multiple of the width of all key heads
    intermediate: int  # multiple of the width of the MLP
    norms: int  # scalars; exact numerics also keep exponents of rows
    head_norms: int  # scalars for every query and key head
    mask: int  # rows of a mask over all tokens of the row
    mlp_hidden: int = 0  # multiple of the width of the residual stream, in layers with an MLP
    number: int = 0  # bytes of a number in torch's own passes; 0: exact numerics
    upcast_hidden: int = 0  # of `hidden`, those that torch keeps in float32 whatever the dtype
    upcast_heads: bool = False  # the same of one multiple of queries and keys


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide the memory of a model."""

    parameters: int  # a tied matrix counts once
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int  # of MLPs; experts have their own
    vocab_size: int
    linears: tuple[Linear, ...]  # of all layers
    head: Linear  # to the vocabulary, or to a score
    head_parameters: int  # of the head alone; 0 for a tied head
    saved: Saved
    whole: int = 0  # parameters of all processes that hold it together, where they divide it
    matrices: int = 0  # of the parameters, without a head of its own: what `zero: 3` divides
    mixture: Mixture | None = None  # in place of the MLPs of some layers, or of all

    @property
    def layer_kinds(self) -> tuple[tuple[int, Mixture | None], ...]:
        """How many layers have an MLP (None), and how many a mixture; kinds that the model has."""
        mixed = 0 if self.mixture is None else self.mixture.layers
        return tuple(kind for kind in ((self.layers - mixed, None), (mixed, self.mixture)) if kind[0])


def as_classifier(shape: ModelShape, labels: int) -> ModelShape:
    """The same trunk with a head of `labels` scores, as in a reward model."""
    head = Linear(labels, shape.hidden)
    parameters = shape.parameters - shape.head_parameters + head.size
    return replace(shape, parameters=parameters, head=head, head_parameters=head.size)
