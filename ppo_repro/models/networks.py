"""The networks of a run and their forward passes over a TokenBatch."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ppo_repro.base.mode import Mode, Precision, is_deterministic_mode
from ppo_repro.base.seeding import bell
from ppo_repro.config.mismatch import SamplerPrecision
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.numerics.description import check_visibility
from ppo_repro.numerics.families import attention_of, decoder_layers, routers, trunk_of
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.interface import Ints
from ppo_repro.numerics.linear import linear
from ppo_repro.numerics.lowering import Lowered, is_deterministic, lower, lowered_of, set_recompute
from ppo_repro.numerics.network import logits, network_of
from ppo_repro.numerics.rounding import NARROW, NumberFormats
from ppo_repro.numerics.sequences import Rows


class ValueModel(nn.Module):
    """A transformer trunk and a scalar head: V(s_t) before each response token."""

    def __init__(self, trunk: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head


def make_policy(
    source: PreTrainedModel, mode: Mode, max_context: int, precision: Precision = "highest"
) -> PreTrainedModel:
    """Copy `source` for training in the given numerics, without dropout, whatever the model's config says.

    Raises UserError if the kernels do not support the model.
    """
    check_visibility(source.config, max_context)
    model = copy.deepcopy(source).eval()
    if is_deterministic_mode(mode):
        return lower(model, Lowered(max_context, precision=precision))
    model.set_attn_implementation(attention_of(model.config))
    if routers(model):
        model.set_experts_implementation("eager")  # grouped products refuse rows of no multiple of 16 bytes
    return model


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert the model's parameters to a dtype in place, and return the model.

    Buffers do not change, because rotary frequencies are float32 everywhere.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def make_value_model(
    source: PreTrainedModel, mode: Mode, max_context: int, seed: int, precision: Precision = "highest"
) -> ValueModel:
    """Make a value model whose trunk starts as the policy's. The head's weights are bell-shaped, std 0.1 / sqrt(H).

    Args:
        source: an unmodified float32 model, which is copied.
        max_context: tokens of the longest sequence.
        precision: of the products in deterministic numerics.
    """
    trunk = make_policy(trunk_of(source), mode, max_context, precision)
    return ValueModel(trunk, make_value_head(source.config.hidden_size, seed).to(source.device))


def make_value_head(size: int, seed: int) -> nn.Linear:
    """Make a scalar head on hidden states of `size` H: bell-shaped weights with std 0.1 / sqrt(H), bias 0."""
    head = nn.Linear(size, 1)
    draw_head(head.weight, "value head", seed)
    nn.init.zeros_(head.bias)
    return head


@torch.no_grad()
def draw_head(weight: Tensor, name: str, seed: int) -> None:
    """Fill the weights [1, H] of a scalar head: bell-shaped, std 0.1 / sqrt(H), a function of name and seed."""
    size = weight.shape[1]
    weight.copy_(torch.from_numpy(bell(size, name, seed) * (0.1 / math.sqrt(size)))[None, :])


def checkpoint_gradients(trunk: PreTrainedModel) -> None:
    """Let the trunk keep no activations inside decoder layers. Its backward pass computes them again."""
    if is_deterministic(trunk):
        set_recompute(trunk, True)
        return
    for layer in decoder_layers(trunk):
        layer.gradient_checkpointing = True
        # the forward pass draws no random numbers, so there is no generator state to restore
        recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer._gradient_checkpointing_func = recompute  # type: ignore[assignment]


def hidden_states(trunk: PreTrainedModel, batch: TokenBatch, replay: bool = False) -> Tensor:
    """Compute the final hidden states [n, H] at the positions that predict the response tokens.

    `replay`: the trunk's mixtures of experts use the routes of the batch, if it has any.
    """
    return seen_states(trunk, batch, replay, seen=False)[0]


def seen_states(
    trunk: PreTrainedModel, batch: TokenBatch, replay: bool, seen: bool = True
) -> tuple[Tensor, Ints | None]:
    """Compute `hidden_states`, and return the chosen experts too.

    Args:
        batch: the sequences, and the n rows to return.
        replay: whether the batch's recorded routes replace the router's choice.

    Returns:
        Hidden states [n, H] float32; routes of all inputs [.., M k], None unless `seen`.
    """
    sequences = batch.sequences if replay else replace(batch.sequences, routes=None)
    return network_of(trunk).over_batch(sequences, batch.predictors, seen)


def policy_logits(policy: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Compute the logits [n, V] float32 at the positions that predict the response tokens."""
    return logits(policy, hidden_states(trunk_of(policy), batch), batch.rows)


def scalar(head: nn.Linear, hidden: Tensor, rows: Rows, lowered: Lowered | None) -> Tensor:
    """Compute the output [n] float32 of a head with one output, on the CPU.

    Args:
        head: [1, H] with or without bias.
        hidden: [n, H] float32.
        rows: sequence and position of each row, and the sums that receive gradients.
        lowered: of the trunk, whose numerics compute the head too; None for stock torch.
    """
    return (head(hidden) if lowered is None else linear(hidden, head, rows, lowered.precision))[:, 0].cpu()


def sequence_scores(
    classifier: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    padding: str,
    slots: Ints | None = None,
    sums: GradientSums | None = None,
) -> Tensor:
    """Compute the scores [S] float32 of a classifier with one label, each at the last token of its sequence.

    The stock forward looks for the last token that is not `pad_token_id`; here the layout gives the last position.

    Args:
        classifier: from `make_reward_model`.
        sequences: S sequences of token ids.
        padding: `right`, `left` or `none`.
        slots: [S + 1] as in `Rows`, for a pass with gradients; None without gradients.
        sums: receive the gradients of weights.
    """
    # `lay_out` scores a response, so each sequence gets one token, which is no input
    batch = lay_out(sequences, [(0,)] * len(sequences), padding, slots=slots).with_sums(sums)
    hidden = hidden_states(trunk_of(classifier), batch)
    return scalar(cast(nn.Linear, classifier.score), hidden, batch.rows, lowered_of(classifier))


def value_predictions(value_model: ValueModel, batch: TokenBatch) -> Tensor:
    """Return the values [n] float32 before each response token."""
    return values_of(value_model, hidden_states(value_model.trunk, batch), batch)


def values_of(value_model: ValueModel, hidden: Tensor, batch: TokenBatch) -> Tensor:
    """Return the values [n] float32 from the trunk's hidden states [n, H] of a batch."""
    return scalar(value_model.head, hidden, batch.rows, lowered_of(value_model.trunk))


def rounding_of(config: SamplerPrecision) -> NumberFormats:
    """Return the number format of each kind of number, from the formats that the configuration names."""
    narrow_inputs = config.activations in NARROW
    return NumberFormats(
        weights=config.weights,
        other_weights=config.rest if config.weights in NARROW else config.weights,
        linear_inputs=config.activations if narrow_inputs else "float32",
        activations=config.rest if narrow_inputs else config.activations,
        kv_cache=config.kv_cache,
        logits=config.logits,
    )


def rounded_view(policy: PreTrainedModel, rounding: NumberFormats) -> PreTrainedModel:
    """Return a model with the same parameters as `policy` that rounds as `rounding` says.

    If `rounding` rounds nothing, the result is `policy` itself.
    """
    lowered = lowered_of(policy)
    if lowered is None or rounding == NumberFormats():
        return policy
    shared = (*policy.parameters(), *policy.buffers())
    view = copy.deepcopy(policy, {id(tensor): tensor for tensor in shared})
    return lower(view, replace(lowered, rounding=rounding))
