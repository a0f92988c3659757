"""Reward models: stock scores, one set of bits for every layout, folders, and value models made from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.base.mode import Mode
from ppo_repro.models.batches import lay_out
from ppo_repro.models.folders import load_reward_model, save_model
from ppo_repro.models.networks import make_policy, value_predictions
from ppo_repro.models.reward_model import reward_scores, value_model_from
from ppo_repro.models.tiny import make_tokenizer
from ppo_repro.numerics.families import CLASSIFIER_OF, attention_of, trunk_of
from ppo_repro.tasks.problems import arithmetic
from tests.support.models import CLASSIFIED, CONFIGS, CONTEXT, fill, ragged, source_model, unequal

SEQUENCES = [[*s, 5] for s in ragged(11, 4, prompt=25)[0]]  # the stock forward cannot see its padding, 0, at the end


def classifier(architecture: str, labels: int = 1) -> PreTrainedModel:
    """An unmodified classifier with random weights and a large head."""
    config = CONFIGS[architecture]()
    config.num_labels = labels
    model = CLASSIFIER_OF[type(source_model(architecture))](config).eval()
    fill(model, 3)
    return model


def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer(arithmetic(5), 16)


def scores(model: PreTrainedModel, sequences: list[list[int]] = SEQUENCES) -> Tensor:
    return reward_scores(model, sequences, "right", 0)


@pytest.mark.parametrize("architecture", CLASSIFIED)
def test_a_saved_folder_is_read_by_transformers_and_by_us_with_the_same_scores(
    architecture: str, tmp_path: Path
) -> None:
    model = make_policy(classifier(architecture), "deterministic", CONTEXT)
    save_model(model, tokenizer(), tmp_path / "model")
    caps = {"attn_implementation": attention_of(model.config)}
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", **caps).eval()
    assert type(stock) is CLASSIFIER_OF[type(source_model(architecture))]
    with torch.no_grad():
        alone = torch.cat([stock(input_ids=torch.tensor([s])).logits[:, 0] for s in SEQUENCES])
        width = max(map(len, SEQUENCES))
        ids = torch.tensor([s + [0] * (width - len(s)) for s in SEQUENCES])
        padded = stock(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, 0]
    expected = scores(model)
    for found in (alone, padded):
        # two orders of float32
        assert float((found - expected).norm() / expected.norm()) < 3e-5
    again, _ = load_reward_model(tmp_path / "model", "deterministic", CONTEXT)
    assert unequal(scores(again), expected) == 0
    native, _ = load_reward_model(tmp_path / "model", "native", CONTEXT)
    assert unequal(scores(native), expected) > 0


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", CLASSIFIED)
def test_a_value_model_made_from_it_starts_with_its_score_after_the_last_token(architecture: str, mode: Mode) -> None:
    model = make_policy(classifier(architecture), mode, CONTEXT)
    value_model = value_model_from(model, mode, CONTEXT)
    prompts, responses = ragged(9, 2)
    batch = lay_out(prompts, [[*r, 0] for r in responses], "right")  # the added token is predicted, not read
    with torch.no_grad():
        values = value_predictions(value_model, batch)
    last = torch.tensor([len(r) + 1 for r in responses]).cumsum(0) - 1
    expected = scores(model, [p + r for p, r in zip(prompts, responses, strict=True)])
    if mode == "deterministic":
        assert unequal(values[last], expected) == 0
        assert unequal(values[last - 1], expected) > 0, "one token earlier the value is another"
    else:
        assert torch.allclose(values[last], expected, rtol=0, atol=1e-4)  # float32: the bias may be fused into the sum
    assert all(p.requires_grad for p in value_model.parameters())
    names = {name for name, _ in value_model.named_parameters()}
    assert names == {f"trunk.{n}" for n, _ in trunk_of(model).named_parameters()} | {"head.weight", "head.bias"}
