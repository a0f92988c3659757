"""transformers' Trainer and a loop of one's own train `deterministic(model)`: no batch layout changes the weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

import ppo_repro
from ppo_repro.numerics.weights import weights_digest
from tests.support.models import CLASSES, source_model, unequal
from tests.support.trained import LAYOUTS, trained_by_hand, trained_by_trainer


def deterministic_model() -> PreTrainedModel:
    return ppo_repro.deterministic(source_model("llama"), threads=1)


def test_weights_of_the_trainer_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    source = weights_digest(source_model("llama").named_parameters())
    digests = {trained_by_trainer(deterministic_model(), *layout, tmp_path) for layout in LAYOUTS}
    assert len(digests) == 1
    assert source not in digests


def test_weights_of_stock_torch_depend_on_it(tmp_path: Path, row_dependent: None) -> None:
    """The negative control, by construction: linear layers whose last digits depend on the number of rows."""
    digests = {trained_by_trainer(source_model("llama"), *layout, tmp_path) for layout in LAYOUTS}
    assert len(digests) == len(LAYOUTS)


def test_weights_of_a_loop_of_ones_own_do_not_depend_on_the_layout() -> None:
    digests = set()
    for layout in LAYOUTS:
        model = deterministic_model()
        digests.add(trained_by_hand(model, *layout, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    assert len(digests) == 1
    model = deterministic_model()
    digests.add(trained_by_hand(model, 8, "right", torch.optim.SGD(model.parameters(), lr=1e-2)))
    assert len(digests) == 2


def test_the_trained_copy_is_saved_and_loads_as_a_stock_model(tmp_path: Path) -> None:
    model = deterministic_model()
    trained_by_hand(model, 8, "right", torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.save_pretrained(tmp_path)
    stock = CLASSES[type(model.config)].from_pretrained(tmp_path)
    assert type(stock) is type(source_model("llama"))
    for (name, mine), (other_name, other) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        assert name == other_name
        assert unequal(mine, other) == 0
