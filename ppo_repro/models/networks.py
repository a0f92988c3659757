"""The networks of a run and their forward passes over a TokenBatch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.grid import OPERAND_BITS
from ppo_repro.numerics.layers.attention import reach
from ppo_repro.numerics.layers.families import check_visibility, head_of, stock_masks, trunk_of
from ppo_repro.numerics.layers.linear import ExactLinear
from ppo_repro.numerics.layers.lowering import is_exact, lower
from ppo_repro.numerics.trunk import training
from ppo_repro.numerics.trunk.weights import parts_of
from ppo_repro.seeding import bell


class ValueModel(nn.Module):
    """A transformer trunk of its own and a scalar head, V(s_t) before each response token."""

    def __init__(self, trunk: PreTrainedModel, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Take the parameters out of autograd."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def make_policy(source: PreTrainedModel, mode: str, max_context: int, bits: int = OPERAND_BITS) -> PreTrainedModel:
    """A copy of `source` ready to be trained in the given numerics; dropout is off, whatever the model's config says.

    `bits` are the operand bits of exact linear layers. Raises UserError where the model is not covered.
    """
    check_visibility(source.config, max_context)
    model = copy.deepcopy(source).eval()
    if mode == "exact":
        return lower(model, max_context, bits)
    model.set_attn_implementation("sdpa")
    return model


def make_value_model(
    source: PreTrainedModel, mode: str, max_context: int, seed: int, bits: int = OPERAND_BITS
) -> ValueModel:
    """A value model whose trunk starts as the policy's; its head is bell-shaped, std 0.1 / sqrt(H), bias 0."""
    trunk = make_policy(trunk_of(source), mode, max_context, bits)
    return ValueModel(trunk, make_value_head(source.config.hidden_size, mode, seed, bits))


def make_value_head(size: int, mode: str, seed: int, bits: int = OPERAND_BITS) -> nn.Module:
    """A scalar head on hidden states of `size`: weights bell-shaped, std 0.1 / sqrt(H), bias 0."""
    head = nn.Linear(size, 1)
    draws = bell(size, "value head", seed) * (0.1 / math.sqrt(size))
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(draws)[None, :])
        head.bias.zero_()
    return ExactLinear(head, "value head", bits) if mode == "exact" else head


def checkpoint_gradients(model: nn.Module) -> None:
    """Keep no activations inside decoder layers from now on; the backward pass computes them again."""
    for layer in _decoder_layers(model):
        layer.gradient_checkpointing = True
        # exact or native, the forward draws no random number, so there is no generator state to restore
        recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer._gradient_checkpointing_func = recompute  # type: ignore[assignment]


def _decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


@contextmanager
def _recording_gradients(trunk: nn.Module) -> Iterator[None]:
    """transformers checkpoints layers in training mode only, and takes their cache away: not while sampling."""
    layers = _decoder_layers(trunk) if torch.is_grad_enabled() else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def hidden_states(trunk: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Final hidden states [n, H] float32 at the positions that predict the response tokens."""
    parts = parts_of(trunk) if is_exact(trunk) and backend.has_kernels(batch.input_ids) else None
    if parts is not None:
        recompute = any(layer.gradient_checkpointing for layer in _decoder_layers(trunk))
        places = batch.input_ids, batch.position_ids, batch.first_key, batch.predictors
        return training.hidden_states(parts, *places, recompute)
    with _recording_gradients(trunk):
        out = _forward(trunk, batch)
    return out.reshape(-1, out.shape[-1])[batch.predictors]


def _forward(trunk: PreTrainedModel, batch: TokenBatch) -> Tensor:
    ids, positions = batch.input_ids, batch.position_ids
    if is_exact(trunk):
        # GPT-2 takes padding without a mask for a mistake and says so; what is visible is first_key alone
        everything = torch.ones_like(ids)
        out = trunk(
            input_ids=ids,
            position_ids=positions,
            attention_mask=everything,
            first_key=batch.first_key,
            use_cache=False,
        )
    else:
        masks = stock_masks(trunk.config, lambda window: reach(batch.first_key, window))
        out = trunk(input_ids=ids, position_ids=positions, attention_mask=masks, use_cache=False)
    return out.last_hidden_state


def policy_logits(policy: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Logits [n, V] float32 at the positions that predict the response tokens."""
    return head_of(policy)(hidden_states(trunk_of(policy), batch))


def sequence_scores(classifier: PreTrainedModel, sequences: Sequence[Sequence[int]], padding: str) -> Tensor:
    """Scores [S, labels] float32 of a sequence classification model, each at the last token of its sequence.

    The stock forward looks for the last token that is not `pad_token_id`; here the layout says where it is.
    """
    batch = lay_out(sequences, [(0,)] * len(sequences), padding)  # the token after the last one is no input
    return cast(nn.Module, classifier.score)(hidden_states(trunk_of(classifier), batch))


def value_predictions(value_model: ValueModel, batch: TokenBatch) -> Tensor:
    """Values [n] float32 before each response token."""
    return value_model.head(hidden_states(value_model.trunk, batch))[:, 0]
