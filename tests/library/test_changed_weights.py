"""Weights that change in ways of which torch counts none, and processes that are forked: the same bits, or an error."""

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


def new_storage_twice(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        for _ in range(2):  # the second may get the address that the first one had
            parameter.data = parameter.data * 1.5


def two_rows_change_places(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.copy_(parameter.data.roll(1, 0))


def one_weight(model: PreTrainedModel) -> None:
    last = [parameter for parameter in model.parameters() if parameter.dim() == 2][-1]
    last.data[0, 0] += 0.5


CHANGES = [through_data, through_numpy, new_storage_twice, two_rows_change_places, one_weight]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_deterministic_model_computes_with_the_weights_that_it_has(family: str, change: Change) -> None:
    model = deterministic(family)
    before = logits(model)
    change(model)
    after = logits(model)
    assert torch.equal(after, logits(anew(model, family))) and not torch.equal(after, before)


def test_without_a_look_at_the_weights_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppo_repro.library.gradients.fingerprints", lambda *_: ())
    model = deterministic()
    logits(model)
    through_data(model)
    assert not torch.equal(logits(model), logits(anew(model, "llama")))


@pytest.mark.parametrize("change", [through_data, through_numpy, one_weight])
def test_weights_that_change_before_the_backward_pass_are_refused(change: Change) -> None:
    model = deterministic()
    loss = model(IDS, labels=IDS).loss
    change(model)
    with pytest.raises(RuntimeError, match="a weight was changed between the forward pass and its backward"):
        loss.backward()
    model(IDS, labels=IDS).loss.backward()
