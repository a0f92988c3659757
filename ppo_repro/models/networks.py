"""The networks of a run and their forward passes over a TokenBatch."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.models.layout import TokenBatch
from ppo_repro.numerics.attention import reach
from ppo_repro.numerics.layers import ExactLinear
from ppo_repro.numerics.lowering import is_exact, lower
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


def make_policy(source: PreTrainedModel, mode: str, max_context: int) -> PreTrainedModel:
    """A copy of `source` ready to be trained in the given numerics; dropout is off."""
    model = copy.deepcopy(source).eval()
    if mode == "exact":
        return lower(model, max_context)
    model.set_attn_implementation("sdpa")
    return model


def make_value_model(source: PreTrainedModel, mode: str, max_context: int, seed: int) -> ValueModel:
    """A value model whose trunk starts as the policy's; its head is bell-shaped, std 0.1 / sqrt(H), bias 0."""
    trunk = make_policy(source.model, mode, max_context)
    size = source.config.hidden_size
    head = nn.Linear(size, 1)
    draws = bell(size, "value head", seed) * (0.1 / math.sqrt(size))
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(draws)[None, :])
        head.bias.zero_()
    return ValueModel(trunk, ExactLinear(head) if mode == "exact" else head)


def hidden_states(trunk: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Final hidden states [n, H] float32 at the positions that predict the response tokens."""
    ids, positions = batch.input_ids, batch.position_ids
    if is_exact(trunk):
        out = trunk(input_ids=ids, position_ids=positions, first_key=batch.first_key, use_cache=False)
    else:
        mask = reach(batch.first_key, None)
        out = trunk(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
    out = out.last_hidden_state
    return out.reshape(-1, out.shape[-1])[batch.predictors]


def policy_logits(policy: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Logits [n, V] float32 at the positions that predict the response tokens."""
    return policy.lm_head(hidden_states(policy.model, batch))


def value_predictions(value_model: ValueModel, batch: TokenBatch) -> Tensor:
    """Values [n] float32 before each response token."""
    return value_model.head(hidden_states(value_model.trunk, batch))[:, 0]


def expand_kept(kept_tokens: Tensor, vocab_size: int) -> Tensor | None:
    """Bit sets [n, ceil(V/8)] uint8 -> bool [n, V]; None where nothing was cut."""
    if kept_tokens.shape[1] == 0:
        return None
    return torch.from_numpy(np.unpackbits(kept_tokens.numpy(), axis=1, count=vocab_size).view(np.bool_))
