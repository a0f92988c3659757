"""The networks of a run and their forward passes over a TokenBatch."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.models.layout import TokenBatch, lay_out
from ppo_repro.numerics.attention import reach
from ppo_repro.numerics.families import check_visibility, head_of, stock_masks, trunk_of
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
    """A copy of `source` ready to be trained in the given numerics; dropout is off, whatever the model's config says.

    Raises UserError where the model is not covered.
    """
    check_visibility(source.config, max_context)
    model = copy.deepcopy(source).eval()
    if mode == "exact":
        return lower(model, max_context)
    model.set_attn_implementation("sdpa")
    return model


def make_value_model(source: PreTrainedModel, mode: str, max_context: int, seed: int) -> ValueModel:
    """A value model whose trunk starts as the policy's; its head is bell-shaped, std 0.1 / sqrt(H), bias 0."""
    trunk = make_policy(trunk_of(source), mode, max_context)
    size = source.config.hidden_size
    head = nn.Linear(size, 1)
    draws = bell(size, "value head", seed) * (0.1 / math.sqrt(size))
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(draws)[None, :])
        head.bias.zero_()
    return ValueModel(trunk, ExactLinear(head, "value head") if mode == "exact" else head)


def hidden_states(trunk: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Final hidden states [n, H] float32 at the positions that predict the response tokens."""
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
    out = out.last_hidden_state
    return out.reshape(-1, out.shape[-1])[batch.predictors]


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


def expand_kept(kept_tokens: Tensor, vocab_size: int) -> Tensor | None:
    """Bit sets [n, ceil(V/8)] uint8 -> bool [n, V]; None where nothing was cut."""
    if kept_tokens.shape[1] == 0:
        return None
    bits = torch.arange(7, -1, -1, dtype=torch.uint8)
    spread = (kept_tokens[:, :, None] >> bits) & 1
    return spread.reshape(len(kept_tokens), -1)[:, :vocab_size].bool()
