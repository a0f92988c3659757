"""The reward model: a transformers sequence classifier with one label, read at the last token of prompt + response.

In deterministic numerics a score depends only on its own sequence, whatever else is in the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.base.mode import Mode, Precision
from ppo_repro.models.networks import ValueModel, draw_head, make_policy, sequence_scores
from ppo_repro.numerics.families import CLASSIFIER_OF, trunk_of


def make_reward_model(
    source: PreTrainedModel, mode: Mode, max_context: int, seed: int, precision: Precision = "highest"
) -> PreTrainedModel:
    """Make a reward model from the trunk of a causal model. Its head is bell-shaped, std 0.1 / sqrt(H).

    Args:
        source: an unmodified float32 model, which is copied.
        max_context: tokens of the longest sequence.
        precision: of the products in deterministic numerics.

    Raises:
        UserError: the family has no classifier, or the kernels do not support it.
    """
    if type(source) not in CLASSIFIER_OF:
        known = ", ".join(c.__name__ for c in CLASSIFIER_OF)
        raise UserError(f"a reward model cannot be made from {type(source).__name__}; must be one of {known}")
    config = copy.deepcopy(source.config)
    config.num_labels = 1
    model = CLASSIFIER_OF[type(source)](config)
    trunk_of(model).load_state_dict(trunk_of(source).state_dict())
    draw_head(model.get_parameter("score.weight"), "reward head", seed)
    return make_policy(nn.Module.to(model, source.device), mode, max_context, precision)


@torch.no_grad()
def reward_scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]], padding: str, micro_batch: int) -> Tensor:
    """Score each prompt + response at its last token, without gradients.

    In deterministic numerics the bits are the same for every micro-batch and order.

    Args:
        model: from `make_reward_model`.
        sequences: B sequences of token ids.
        padding: `right`, `left` or `none`.
        micro_batch: sequences at a time, 0 for all at once.

    Returns:
        [B] float32.

    Raises:
        ValueError: a sequence is empty.
    """
    if not all(len(sequence) for sequence in sequences):
        raise ValueError("an empty sequence has no last token")
    size = micro_batch or len(sequences) or 1
    chunks = [sequences[i : i + size] for i in range(0, len(sequences), size)]
    return torch.cat([torch.empty(0), *(sequence_scores(model, chunk, padding) for chunk in chunks)])


def value_model_from(
    reward_model: PreTrainedModel, mode: Mode, max_context: int, precision: Precision = "highest"
) -> ValueModel:
    """Make a value model from a copy of the reward model, so that V after the last token is the score.

    Its head also has a bias, which starts at 0. Ouyang et al., 2022, section 3.5.
    """
    stock = type(reward_model)(copy.deepcopy(reward_model.config))
    stock.load_state_dict(reward_model.state_dict())
    weight = stock.get_parameter("score.weight")
    head = nn.Linear(weight.shape[1], 1)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.zero_()
    device = reward_model.device
    trunk = make_policy(nn.Module.to(trunk_of(stock), device), mode, max_context, precision)
    return ValueModel(trunk, head.to(device))
