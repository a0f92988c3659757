"""Stage `MinibatchUpdate`: the record of one optimizer step, from the columns of its minibatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ppo_repro.buffers import PolicyUpdate, ValueUpdate
from ppo_repro.numerics.sums import mean_of
from ppo_repro.ppo import kl
from ppo_repro.ppo.objectives import ClipFlag, removes_gradient
from ppo_repro.stages.corrections import corrected
from ppo_repro.stages.minibatches import Minibatch
from ppo_repro.stages.training_batch import TrainingBatch

Columns = TypeVar("Columns")  # a NamedTuple of tensors, or a tuple of such; None for what a step has not


class PolicyColumns(NamedTuple):
    """The terms of the policy's losses of n tokens, float32 [n] each, flags uint8."""

    losses: Tensor
    new_logprobs: Tensor
    ratios: Tensor
    clip_flags: Tensor
    new_entropies: Tensor
    surrogates: Tensor
    penalty_terms: Tensor | None
    kl_terms: Tensor | None


class ValueColumns(NamedTuple):
    """The terms of the value model's losses of n tokens, [n] each."""

    losses: Tensor  # float32, before value_coef
    new_values: Tensor  # float32
    clipped: Tensor  # bool, the clipped branch decides the loss


def joined(columns: Sequence[Columns]) -> Columns:
    """Concatenate each column over the micro-batches, in order; None if the first micro-batch lacks it."""
    return tree_map(lambda *parts: None if parts[0] is None else torch.cat(parts), *columns)


def detached(columns: Columns) -> Columns:
    """Return the columns without their graph, which would keep activations in memory."""
    return tree_map(lambda column: None if column is None else column.detach(), columns)


def policy_update(batch: TrainingBatch, minibatch: Minibatch, columns: PolicyColumns, grad_norm: float) -> PolicyUpdate:
    """Sum the columns of a policy step with the weights of its minibatch.

    Args:
        minibatch: names M tokens of the iteration, and their weights.
        columns: [M] each.
        grad_norm: before clipping.
    """
    tokens, weights, corrections = minibatch.tokens, minibatch.loss_weights, batch.corrections
    flags = columns.clip_flags
    factors = None if corrections is None else corrections.weights[tokens]

    def corrected_total(terms: Tensor) -> float:
        return _total(terms if factors is None else corrected(terms, factors), weights)

    return PolicyUpdate(
        new_logprobs=columns.new_logprobs,
        ratios=columns.ratios,
        clip_flags=flags,
        new_entropies=columns.new_entropies,
        losses=columns.losses,
        surrogates=columns.surrogates,
        penalty_terms=columns.penalty_terms,
        importance_weights=factors,
        corrections=None if corrections is None else corrections.changes[tokens],
        kl_terms=columns.kl_terms,
        loss=_total(columns.losses, weights),
        surrogate_loss=corrected_total(columns.surrogates),
        penalty_loss=None if columns.penalty_terms is None else corrected_total(columns.penalty_terms),
        entropy_loss=0.0 - _total(columns.new_entropies * batch.entropy_coef, weights),
        kl_loss=None if columns.kl_terms is None else _total(columns.kl_terms, weights),
        entropy=mean_of(columns.new_entropies),
        approx_kl=mean_of(kl.k3(batch.anchor_logprobs[tokens] - columns.new_logprobs)),
        clip_fraction=None if bool((flags == ClipFlag.UNKNOWN).any()) else mean_of(removes_gradient(flags)),
        grad_norm=grad_norm,
    )


def value_update(minibatch: Minibatch, columns: ValueColumns, grad_norm: float | None) -> ValueUpdate:
    """Sum the columns [M] of a value model's step with the weights of its minibatch.

    `grad_norm` is None if the value head is on the policy's trunk.
    """
    return ValueUpdate(
        new_values=columns.new_values,
        clipped=columns.clipped,
        losses=columns.losses,
        loss=_total(columns.losses, minibatch.loss_weights),
        clip_fraction=mean_of(columns.clipped),
        grad_norm=grad_norm,
    )


def _total(values: Tensor, weights: Tensor) -> float:
    """Return the weighted sum of per-token losses [M], correctly rounded."""
    return math.fsum((values.to(torch.float64) * weights.to(torch.float64)).tolist())
