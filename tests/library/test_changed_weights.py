"""A deterministic model computes with the weights that it has, also after changes that torch does not count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import ppo_repro
from tests.support.models import CONFIGS, small_model

IDS = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
Change = Callable[[PreTrainedModel], object]


def deterministic(family: str = "llama", threads: int = 1) -> PreTrainedModel:
    return ppo_repro.deterministic(small_model(CONFIGS[family](), seed=0), threads=threads)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def anew(model: PreTrainedModel, family: str) -> PreTrainedModel:
    """A deterministic model with the weights that `model` has now."""
    stock = small_model(CONFIGS[family](), seed=0)
    stock.load_state_dict(model.state_dict())
    return ppo_repro.deterministic(stock, threads=1)


def through_data(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def through_numpy(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        values = parameter.detach().numpy()
        values *= 1.5


@pytest.mark.parametrize("change", [through_data, through_numpy])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_deterministic_model_computes_with_the_weights_that_it_has(family: str, change: Change) -> None:
    model = deterministic(family)
    before = logits(model)
    change(model)
    after = logits(model)
    assert torch.equal(after, logits(anew(model, family))) and not torch.equal(after, before)


def test_a_step_before_the_backward_pass_is_refused() -> None:
    model = deterministic()
    loss = model(IDS, labels=IDS).loss
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="a weight was changed between the forward pass and its backward"):
        loss.backward()
    model(IDS, labels=IDS).loss.backward()
