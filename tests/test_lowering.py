"""Lowering keeps a model's parameters and values, touches nothing else, and refuses what it does not know."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from ppo_repro.errors import UserError
from ppo_repro.models.layout import lay_out
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import make_policy, policy_logits, value_predictions
from ppo_repro.numerics.attention import attention
from ppo_repro.numerics.lowering import check_config, lower
from ppo_repro.numerics.optimizer import weights_digest
from tests.models_for_tests import (
    ARCHITECTURES,
    CONTEXT,
    llama_config,
    policy,
    qwen2_config,
    qwen3_config,
    ragged,
    source_model,
    unequal,
    value_model,
)


def stock_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lowered_logits_are_those_of_the_unmodified_model(architecture: str, padding: str) -> None:
    prompts, responses = ragged(6, 1, prompt=30)
    source = copy.deepcopy(source_model(architecture)).double()
    with torch.no_grad():
        got = policy_logits(policy(architecture, "exact"), lay_out(prompts, responses, padding))
    expected = torch.cat(
        [stock_logits(source, [*p, *r[:-1]])[len(p) - 1 :] for p, r in zip(prompts, responses, strict=True)]
    )
    error = (got.double() - expected).norm() / expected.norm()
    # operands of 20 bits lose 2^-21 each, about 1e-6 per product; two layers deep 5e-6 to 1.2e-5 was measured
    assert 0 < float(error) < 3e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_native_and_exact_values_agree_closely(architecture: str) -> None:
    batch = lay_out(*ragged(6, 1), "right")
    with torch.no_grad():
        exact = value_predictions(value_model(architecture, "exact"), batch)
        native = value_predictions(value_model(architecture, "native"), batch)
    # the tolerance of the logits
    assert float((exact - native).norm() / native.norm()) < 3e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_stay_the_same_objects_under_the_same_names(architecture: str) -> None:
    model = source_model(architecture)
    before, keys = dict(model.named_parameters(remove_duplicate=False)), list(model.state_dict())
    digest = weights_digest(model.named_parameters())
    lowered = lower(model, CONTEXT)
    after = dict(lowered.named_parameters(remove_duplicate=False))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert list(lowered.state_dict()) == keys
    assert weights_digest(lowered.named_parameters()) == digest


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_lowered_state_loads_into_the_unmodified_class_and_from_a_saved_folder(
    architecture: str, tmp_path: Path
) -> None:
    lowered = make_policy(source_model(architecture), "exact", CONTEXT)
    ids = list(range(20))
    expected = stock_logits(source_model(architecture), ids)
    fresh = type(source_model(architecture))(lowered.config.__class__.from_dict(lowered.config.to_dict())).eval()
    fresh.load_state_dict(lowered.state_dict())
    assert unequal(stock_logits(fresh, ids), expected) == 0
    lowered.save_pretrained(tmp_path)
    loaded = type(fresh).from_pretrained(tmp_path, local_files_only=True).eval()
    assert weights_digest(loaded.named_parameters()) == weights_digest(lowered.named_parameters())
    assert unequal(stock_logits(loaded, ids), expected) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lowering_one_model_leaves_every_other_alone(architecture: str) -> None:
    other, source, ids = source_model(architecture), source_model(architecture), list(range(25))
    before, classes = stock_logits(other, ids), [type(m) for m in source.modules()]
    lowered = make_policy(source, "exact", CONTEXT)
    assert unequal(stock_logits(other, ids), before) == 0
    assert unequal(stock_logits(source_model(architecture), ids), before) == 0
    assert [type(m) for m in source.modules()] == classes and unequal(stock_logits(source, ids), before) == 0
    # the check can fail: the lowered model gives other bits
    with torch.no_grad():
        exact = policy_logits(lowered, lay_out([ids[:1]], [[*ids[1:], 0]], "right"))
    assert unequal(exact, before) > 0


class TwiceLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_module(name: str, module: nn.Module) -> PreTrainedModel:
    model = source_model("qwen3")
    model.set_submodule(name, module)
    return model


def in_bfloat16() -> PreTrainedModel:
    model = source_model("qwen3")
    model.model.layers[1].mlp.up_proj.to(torch.bfloat16)
    return model


LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "subclass": (
        lambda: with_module("model.layers.1.mlp.up_proj", TwiceLinear(48, 72)),
        r"'model\.layers\.1\.mlp\.up_proj' of class TwiceLinear",
    ),
    "module": (lambda: with_module("model.norm", nn.LayerNorm(48)), r"'model\.norm' of class LayerNorm"),
    "gelu": (lambda: Qwen3ForCausalLM(qwen3_config(hidden_act="gelu")), r"hidden_act = 'gelu'"),
    "window": (
        lambda: Qwen2ForCausalLM(qwen2_config(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
        r"layer_types = .*sliding_attention",
    ),
    "dropout": (lambda: LlamaForCausalLM(llama_config(attention_dropout=0.1)), r"attention_dropout = 0\.1"),
    "yarn": (lambda: LlamaForCausalLM(llama_config(rope_parameters=YARN)), r"rope_type = 'yarn'"),
    "bfloat16": (in_bfloat16, r"'model\.layers\.1\.mlp\.up_proj\.weight' is torch\.bfloat16"),
    "positions": (
        lambda: Qwen3ForCausalLM(qwen3_config(max_position_embeddings=CONTEXT - 1)),
        r"numerics\.max_context = 64: the model has 63 positions",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_covered_is_refused_by_name(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        lower(make(), CONTEXT)


def test_a_vocabulary_too_large_for_the_grids_is_refused() -> None:
    check_config(qwen3_config(vocab_size=2**23), CONTEXT)
    with pytest.raises(UserError, match="vocab_size = 8388609"):
        check_config(qwen3_config(vocab_size=2**23 + 1), CONTEXT)


def test_linear_rope_is_that_of_the_unmodified_model() -> None:
    config = llama_config(rope_parameters=LINEAR_ROPE)
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(source_model("llama").state_dict())
    x, positions = torch.zeros(1, 1, 48), torch.arange(CONTEXT)[None]
    stock = model.model.rotary_emb(x, positions)
    exact = lower(model, CONTEXT).model.rotary_emb(x, positions)
    for ours, theirs in zip(exact, stock, strict=True):
        # stock takes float32 angles up to 64: half a unit in the last place is 2^-19
        assert torch.allclose(ours, theirs, rtol=0, atol=2.0**-18)


def test_attention_refuses_what_it_would_otherwise_ignore() -> None:
    q = torch.zeros(1, 2, 3, 4)
    module, first_key = nn.Module(), torch.zeros(1, 3, dtype=torch.int64)
    for mask, first in ((None, None), (torch.ones(1, 1, 3, 3, dtype=torch.bool), first_key)):
        with pytest.raises(TypeError, match="and no mask"):
            attention(module, q, q, q, mask, 1.0, first_key=first)
    for option in ({"dropout": 0.1}, {"softcap": 50.0}):
        with pytest.raises(TypeError, match=next(iter(option))):
            attention(module, q, q, q, None, 1.0, first_key=first_key, **option)


def test_a_folder_of_another_architecture_or_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path = .*no config\.json"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(UserError, match="architecture GPT2LMHeadModel; must be one of Qwen3ForCausalLM"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(UserError, match=r"model\.path = .*cannot be loaded"):
        load_folder(tmp_path)
