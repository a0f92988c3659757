"""Check in every iteration of deterministic numerics that sampler and trainer computed the same bits.

The trainer's passes must also have the same bits as each other. If a check fails, the iteration is not recorded and the
run ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_repro.base.errors import PromiseBroken
from ppo_repro.buffers import ForwardPass, MinibatchUpdate, Rollout
from ppo_repro.config.run import RunConfig


class NamedValues(NamedTuple):
    """Values of a column of the records, with its name."""

    name: str
    values: Tensor  # float32


@dataclass(frozen=True)
class Unequal:
    """The K tokens at which two columns differ, which must have the same bits, in the order of the records."""

    iteration: int
    compared: int  # number of tokens, including tokens with equal bits
    sequence: Tensor  # [K] int64, the response of each token
    position: Tensor  # [K] int64, of the token in its response
    left: NamedValues  # [K]
    right: NamedValues  # [K]

    def describe(self) -> str:
        """Return the first difference and both values, exact to the last bit, on one line."""
        left, right = (f"{column.name} {_exactly(column.values[0])}" for column in (self.left, self.right))
        where = f"iteration {self.iteration}, response {self.sequence[0]}, token {self.position[0]}"
        return f"{where}: {left}, {right}; {len(self.sequence)} of {self.compared} tokens differ"


class UnequalBits(PromiseBroken):
    """Two columns differ in an iteration although deterministic numerics promise that they are equal."""

    def __init__(self, message: str, found: Unequal) -> None:
        super().__init__(message)
        self.found = found


def _exactly(value: Tensor) -> str:
    return f"{float(value)!r} (bits {int(value.view(torch.int32)) & 0xFFFFFFFF:08x})"


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Return which elements of two float32 tensors differ in any bit: bool, in their shape."""
    return a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)


def require_same_bits(iteration: int, lengths: Tensor, left: NamedValues, right: NamedValues, tokens: Tensor) -> None:
    """Raise UnequalBits if two columns of M values differ in any bit.

    Args:
        lengths: [B] int64, tokens of each sequence.
        tokens: [M] int64, index of the values into all tokens of the sequences.
    """
    rows = differing(left.values, right.values).nonzero()[:, 0]
    if not len(rows):
        return
    rows = rows[tokens[rows].argsort()]  # minibatches shuffle
    ends = torch.cumsum(lengths, 0)
    sequence = torch.searchsorted(ends, tokens[rows], right=True)
    position = tokens[rows] - (ends - lengths)[sequence]
    unequal_tokens = Unequal(
        iteration=iteration,
        compared=len(tokens),
        sequence=sequence,
        position=position,
        left=NamedValues(left.name, left.values[rows]),
        right=NamedValues(right.name, right.values[rows]),
    )
    raise UnequalBits(unequal_tokens.describe(), unequal_tokens)


def require_ratios_of_one(iteration: int, lengths: Tensor, ratios: Tensor, tokens: Tensor) -> None:
    """Raise UnequalBits if a ratio before the first step is not exactly 1.

    Args:
        lengths: [B] int64, tokens of each response.
        ratios: [M] float32.
        tokens: [M] int64, index of the ratios into all tokens of the iteration.
    """
    expected = NamedValues("expected", torch.ones_like(ratios))
    require_same_bits(iteration, lengths, NamedValues("ratios", ratios), expected, tokens)


def sampler_is_exact(config: RunConfig) -> bool:
    """Return whether the log-probs of sampler and trainer are promised to be equal.

    If they are not, their difference is measured.
    """
    rollout, mismatch = config.rollout, config.mismatch
    causes_of_difference = (
        config.is_native,
        rollout.engine_without_promise is not None,
        rollout.mismatch_sigma is not None,
        mismatch.sampler.token_bias is not None,
        mismatch.sampler.lag > 0,
        mismatch.flip == "token",
        not mismatch.same_precision,
        mismatch.trainer.scores_otherwise,
    )
    return not any(causes_of_difference)


def require_sampler_agrees(config: RunConfig, iteration: int, rollout: Rollout, forward: ForwardPass) -> None:
    """Raise UnequalBits if log-probs of sampler and trainer differ although they are promised to be equal."""
    if sampler_is_exact(config):
        sampled = NamedValues("rollout_logprobs", rollout.rollout_logprobs)
        scored = NamedValues("old_logprobs", forward.old_logprobs)
        require_same_bits(iteration, rollout.lengths, sampled, scored, torch.arange(len(rollout.response_ids)))


def require_first_step_agrees(
    config: RunConfig, iteration: int, rollout: Rollout, forward: ForwardPass, first: MinibatchUpdate
) -> None:
    """Raise UnequalBits if a first-minibatch ratio is not 1, or a value differs from the forward pass.

    In native numerics nothing is checked. With `ratio_anchor: old` ratios are checked for every sampler, except with
    dropout. Otherwise they are checked only if the sampler is exact.
    """
    if config.numerics.mode != "deterministic":
        return
    repeats = config.ppo.ratio_anchor == "old" and not config.mismatch.trainer.dropout
    if first.policy is not None and (repeats or sampler_is_exact(config)):
        require_ratios_of_one(iteration, rollout.lengths, first.policy.ratios, first.tokens)
    if first.value is not None and forward.values is not None:
        before = NamedValues("values", forward.values[first.tokens])
        again = NamedValues("new_values", first.value.new_values)
        require_same_bits(iteration, rollout.lengths, before, again, first.tokens)
