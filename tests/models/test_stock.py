"""A model that computes in float64 without float64 weights is the model with float64 weights."""

from __future__ import annotations

import copy

import pytest
import torch

from ppo_repro.models.stock import float64
from tests.support.models import CONFIGS, small_model


@torch.no_grad()
@pytest.mark.parametrize("is_tied", [True, False])
def test_float64_has_the_bits_of_a_model_with_float64_weights(is_tied: bool) -> None:
    config = CONFIGS["gpt2"]()  # which has no constants in float32
    config.tie_word_embeddings = is_tied
    model, ids = small_model(config, 3), torch.tensor([[5, 6, 7, 8]])
    expected = copy.deepcopy(model).double()(ids).logits
    with float64(model):
        assert torch.equal(model(ids).logits, expected)
    assert not torch.equal(model(ids).logits.double(), expected)  # float32 weights again
