"""The networks of a run and their forward passes over a TokenBatch."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.numerics.layers.families import check_visibility, decoder_layers, head_of, trunk_of
from ppo_repro.numerics.layers.linear import ExactLinear
from ppo_repro.numerics.layers.lowering import lower
from ppo_repro.numerics.layers.routes import routers
from ppo_repro.numerics.trunk.forward import TrunkForward
from ppo_repro.seeding import bell


class ValueModel(nn.Module):
    """A transformer trunk and a scalar head: V(s_t) before each response token."""

    def __init__(self, trunk: PreTrainedModel, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Take the parameters out of autograd."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def make_policy(source: PreTrainedModel, mode: str, max_context: int) -> PreTrainedModel:
    """A copy of `source` ready for training in the given numerics; dropout is off, whatever the model's config says.

    Raises UserError where the model is not covered.
    """
    check_visibility(source.config, max_context)
    model = copy.deepcopy(source).eval()
    if mode == "exact":
        return lower(model, max_context)
    model.set_attn_implementation("sdpa")
    if routers(model):
        model.set_experts_implementation("eager")  # grouped products refuse rows of no multiple of 16 bytes
    return model


def make_value_model(source: PreTrainedModel, mode: str, max_context: int, seed: int) -> ValueModel:
    """A value model whose trunk starts as the policy's; its head is bell-shaped, std 0.1 / sqrt(H), bias 0."""
    trunk = make_policy(trunk_of(source), mode, max_context)
    return ValueModel(trunk, make_value_head(source.config.hidden_size, mode, seed).to(source.device))


def make_value_head(size: int, mode: str, seed: int) -> nn.Module:
    """A scalar head on hidden states of `size` H: weights bell-shaped, std 0.1 / sqrt(H), bias 0."""
    head = nn.Linear(size, 1)
    draws = bell(size, "value head", seed) * (0.1 / math.sqrt(size))
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(draws)[None, :])
        head.bias.zero_()
    return ExactLinear(head, "value head") if mode == "exact" else head


def checkpoint_gradients(model: nn.Module) -> None:
    """From now on keep no activations inside decoder layers; the backward pass computes them again."""
    for layer in decoder_layers(model):
        layer.gradient_checkpointing = True
        # the forward draws no random number, exact or native, so there is no generator state to restore
        recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer._gradient_checkpointing_func = recompute  # type: ignore[assignment]


def hidden_states(trunk: PreTrainedModel, batch: TokenBatch, replay: bool = False) -> Tensor:
    """Final hidden states [n, H] float32 at the positions that predict the response tokens.

    `replay`: tokens take the routes of the batch, where it has some, through the mixtures of experts of the trunk.
    """
    inputs = batch.input_ids, batch.position_ids, batch.first_key, batch.predictors
    ids, positions, first_key, rows = (x.to(trunk.device) for x in inputs)
    routes = batch.routes.flatten(0, 1).to(trunk.device) if replay and batch.routes is not None else None
    return TrunkForward(trunk).over_batch(ids, positions, first_key, rows, routes)


def policy_logits(policy: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Logits [n, V] float32 at the positions that predict the response tokens."""
    return head_of(policy)(hidden_states(trunk_of(policy), batch))


def sequence_scores(classifier: PreTrainedModel, sequences: Sequence[Sequence[int]], padding: str) -> Tensor:
    """Scores [S, labels] float32 of a sequence classification model, each at the last token of its sequence.

    The stock forward looks for the last token that is not `pad_token_id`; here the layout says where the last one is.
    """
    batch = lay_out(sequences, [(0,)] * len(sequences), padding)  # the token after the last one is no input
    return cast(nn.Module, classifier.score)(hidden_states(trunk_of(classifier), batch))


def value_predictions(value_model: ValueModel, batch: TokenBatch) -> Tensor:
    """Values [n] float32 before each response token."""
    return value_model.head(hidden_states(value_model.trunk, batch))[:, 0]
