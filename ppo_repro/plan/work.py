"""What decides the memory of a run: the sizes of its models, and how it computes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

LONG_STEP = 1 << 12  # tokens of a step, prompts included, above which sums of gradients have an upper limb


@dataclass(frozen=True)
class Linear:
    """A matrix of a model, and whether it has a low-rank adapter."""

    outputs: int
    inputs: int
    adapted: bool = False
    across: bool = False  # stored as [inputs, outputs], so that a forward pass multiplies it across its rows
    # by processes that hold a model together: "outputs" or "inputs"; the sizes are those of this process's part
    divided: str = ""

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


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide the memory of a model."""

    parameters: int  # a tied matrix counts once
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    linears: tuple[Linear, ...]  # of all layers
    head: Linear  # to the vocabulary, or to a score
    head_parameters: int  # of the head alone; 0 for a tied head
    saved: Saved
    whole: int = 0  # parameters of all processes that hold it together, where they divide it
    matrices: int = 0  # of the parameters, without a head of its own: what `zero: 3` divides


@dataclass(frozen=True)
class Work:
    """How a run computes."""

    kernels: str  # "amx", "float64", or "native" for stock torch
    slots: int
    max_context: int
    max_response_tokens: int
    sequences: int  # per iteration
    forward_sequences: int  # per scoring pass
    update_sequences: int  # per backward pass
    packed: bool  # all sequences in one row
    recompute: bool  # gradient checkpointing
    lora_rank: int  # 0: all weights of the policy are trained
    side_by_side: bool  # policy and value model step at the same time
    step_sequences: int = 0  # per optimizer step, all micro-batches together
    value_lora_rank: int = 0  # 0: all weights of a value model of its own are trained
    older_policies: int = 0  # versions that a sampler which is behind needs beside the policy
    reference_in_steps: bool = False  # whether the loss of the policy needs the reference's logits
    processes: int = 1  # of the run; everything else is of one of them
    tensor: int = 1  # of them hold one copy of the models together
    pipeline: int = 1  # the same, but some layers each
    zero: int = 0  # what they divide: 1 moments, 2 after each step the sums of gradients too, 3 weights

    @property
    def exact(self) -> bool:
        return self.kernels != "native"

    @property
    def has_kernels(self) -> bool:
        """Whether kernels compute the statistics of logits, which need nothing else as wide as they are."""
        return self.exact and self.tensor * self.pipeline == 1

    def moments(self, parameters: int) -> int:
        """Bytes of the AdamW moments of so many parameters, up to one number of each tensor where they are divided."""
        return 8 * (ceil(parameters / self.processes) if self.zero else parameters)

    @property
    def in_pieces(self) -> bool:
        """Whether matrices are whole only while a product is computed."""
        return self.zero == 3 and self.processes > 1

    def weights(self, parameters: int, matrices: int) -> int:
        """Bytes of the weights of so many parameters, `matrices` of which are of matrices."""
        return 4 * (parameters - matrices + ceil(matrices / self.processes) if self.in_pieces else parameters)

    @property
    def long_steps(self) -> bool:
        """Whether an optimizer step may have so many tokens that sums of gradients have an upper limb."""
        return self.step_sequences * (self.max_context - 1) > LONG_STEP
