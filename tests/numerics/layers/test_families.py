"""What differs between model families: windows in stock attention, classification heads, dropout, tied heads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.errors import UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, make_value_model, policy_logits, sequence_scores
from ppo_repro.numerics.families import CLASSIFIER_OF, head_of, trunk_of
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from tests.support.models import (
    ARCHITECTURES,
    CONFIGS,
    CONTEXT,
    FAMILIES,
    fill,
    gemma_config,
    gpt2_config,
    gpt_neox_config,
    policy,
    ragged,
    source_model,
    unequal,
    without_window,
)

GREEDY = Sampling(1.0, 0, 1.0, 20, greedy=True)


@torch.no_grad()
def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy tokens of the model's own `generate`, under its own cache and masks, which no stop token ends."""
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY.max_response_tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_greedy_tokens_are_those_of_generate(architecture: str, mode: str) -> None:
    prompts, _ = ragged(5, 2, prompt=20)
    source = source_model(architecture)
    engine = TorchEngine(policy(architecture, mode), frozenset(), mode, CONTEXT, 3, 4)
    completions = engine.generate([Request(tuple(p), 0) for p in prompts], GREEDY)
    # 20 tokens after up to 20 of a prompt: windows of 5 and 6 keys have long moved on
    assert [list(c.response_ids) for c in completions] == [generated(source, p) for p in prompts]


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", ["mistral", "qwen2 sliding"])
def test_without_its_window_generate_gives_other_tokens(architecture: str, mode: str) -> None:
    prompts, _ = ragged(5, 2, prompt=20)
    engine = TorchEngine(policy(architecture, mode), frozenset(), mode, CONTEXT, 3, 4)
    completions = engine.generate([Request(tuple(p), 0) for p in prompts], GREEDY)
    assert [list(c.response_ids) for c in completions] != [generated(without_window(architecture), p) for p in prompts]


def classifier(architecture: str, labels: int) -> PreTrainedModel:
    config = CONFIGS[architecture]()
    config.num_labels = labels
    model = CLASSIFIER_OF[type(source_model(architecture))](config).eval()
    fill(model, 3)
    return model


@pytest.mark.parametrize("architecture", FAMILIES)
def test_classification_scores_are_those_of_the_unmodified_model_at_the_last_token(architecture: str) -> None:
    labels = 1 + ARCHITECTURES.index(architecture) % 3
    source, (sequences, _) = classifier(architecture, labels), ragged(7, 4, prompt=25)
    sequences = [[*s, 5] for s in sequences]  # the stock forward cannot see a last token that is its padding
    wide = copy.deepcopy(source).double()
    with torch.no_grad():
        expected = torch.cat([wide(input_ids=torch.tensor([s]), use_cache=False).logits for s in sequences])
        scores = {}
        for mode in ("deterministic", "native"):
            model = make_policy(source, mode, CONTEXT)
            scores[mode] = [sequence_scores(model, sequences, padding) for padding in ("right", "left", "none")]
    assert expected.shape == (7, labels)
    for found in (*scores["exact"], *scores["native"]):
        # the tolerance of the logits
        assert float((found - expected).norm() / expected.norm()) < 3e-6
    assert all(unequal(found, scores["exact"][0]) == 0 for found in scores["exact"])


@pytest.mark.usefixtures("row_dependent")
def test_native_classification_scores_depend_on_the_layout() -> None:
    model = make_policy(classifier("gpt2", 3), "native", CONTEXT)
    sequences, _ = ragged(20, 4, prompt=25)
    with torch.no_grad():
        right, packed = sequence_scores(model, sequences, "right"), sequence_scores(model, sequences, "none")
    assert unequal(right, packed) > 0


def test_a_sequence_that_ends_in_the_padding_token_is_scored_at_its_end() -> None:
    model = make_policy(classifier("llama", 2), "exact", CONTEXT)
    with torch.no_grad():
        scores = sequence_scores(model, [[5, 6, 7], [5, 6, 7, 0], [5]], "right")
        alone = sequence_scores(model, [[5, 6, 7, 0]], "none")
    assert unequal(scores[1:2], alone) == 0 and unequal(scores[0], scores[1]) > 0


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_dropout_of_the_configuration_does_not_act(architecture: str, mode: str) -> None:
    source = source_model(architecture)
    assert max(m.p for m in source.modules() if isinstance(m, nn.Dropout)) == 0.1
    for module in source.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = lay_out(*ragged(4, 1), "right")
    with torch.no_grad():
        got = policy_logits(policy(architecture, mode), batch)
        assert unequal(policy_logits(make_policy(source, mode, CONTEXT), batch), got) == 0
        assert unequal(policy_logits(policy(architecture, mode), batch), got) == 0
        # the check can fail: in training mode the stock dropouts do act
        stock = source_model(architecture).train()
        ids = torch.arange(10)[None]
        first: Tensor = stock(ids).logits
        assert unequal(first, stock(ids).logits) > 0


def test_dropout_stays_off_when_an_exact_model_is_put_into_training_mode() -> None:
    model = make_policy(source_model("gpt2"), "exact", CONTEXT)
    batch = lay_out(*ragged(4, 1), "right")
    with torch.no_grad():
        assert unequal(policy_logits(model.train(), batch), policy_logits(policy("gpt2", "exact"), batch)) == 0


@pytest.mark.parametrize("architecture", FAMILIES)
def test_trunk_and_head_are_found_and_stay_tied(architecture: str) -> None:
    model = policy(architecture, "exact")
    tied = head_of(model).weight is trunk_of(model).get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings == (architecture in {"qwen3", "gemma", "gpt2"})
    value_model = make_value_model(source_model(architecture), "exact", CONTEXT, 0)
    names = {name for name, _ in value_model.named_parameters()}
    trunk = {f"trunk.{name}" for name, _ in trunk_of(source_model(architecture)).named_parameters()}
    assert names == trunk | {"head.weight", "head.bias"}


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_what_no_layout_can_express_is_refused_in_both_modes(mode: str) -> None:
    for config, message in (
        (gemma_config(use_bidirectional_attention=True), "use_bidirectional_attention = True"),
        (gpt2_config(add_cross_attention=True), "add_cross_attention = True"),
        (gpt_neox_config(max_position_embeddings=CONTEXT - 1), "the model has 63 positions"),
    ):
        model = {type(c()): source_model(a) for a, c in CONFIGS.items()}[type(config)]
        model.config = config
        with pytest.raises(UserError, match=message):
            make_policy(model, mode, CONTEXT)
