"""How a run computes, as far as its memory depends on it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ppo_repro.plan.causes import NO_CAUSES, Causes

LONG_STEP = 1 << 12  # tokens of a step, prompts included, above which sums of gradients have an upper limb


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
    causes: Causes = NO_CAUSES
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
