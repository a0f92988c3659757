"""Lowering keeps a model's parameters and values, touches nothing else, and refuses what it does not know."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, CohereForCausalLM, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from ppo_repro.errors import UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import make_policy, policy_logits, value_predictions
from ppo_repro.numerics.layers.attention import attention
from ppo_repro.numerics.layers.lowering import check_config, lower
from ppo_repro.numerics.optimizer import weights_digest
from tests.support.models import (
    ARCHITECTURES,
    CLASSES,
    CONTEXT,
    LLAMA3_ROPE,
    MIXTURES,
    VARIANTS,
    YARN,
    gemma_config,
    gpt2_config,
    llama_config,
    mistral_config,
    policy,
    qwen2_config,
    qwen3_config,
    ragged,
    source_model,
    unequal,
    value_model,
    without_window,
)


def stock_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def logits_error(architecture: str, mode: str, padding: str) -> float:
    """Relative distance from the unmodified model in float64, each sequence alone under the masks it makes itself."""
    prompts, responses = ragged(6, 1, prompt=30)
    source = copy.deepcopy(source_model(architecture)).double()
    with torch.no_grad():
        got = policy_logits(policy(architecture, mode), lay_out(prompts, responses, padding))
    expected = torch.cat(
        [stock_logits(source, [*p, *r[:-1]])[len(p) - 1 :] for p, r in zip(prompts, responses, strict=True)]
    )
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES])
def test_logits_are_those_of_the_unmodified_model(architecture: str, padding: str) -> None:
    # weights lose 2^-24 of the largest of a row, as float32 does: 1e-6 was measured at most, on either side
    for mode in ("deterministic", "native"):
        assert 0 < logits_error(architecture, mode, padding) < 3e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_other_settings_are_those_of_the_unmodified_model(variant: str) -> None:
    assert 0 < logits_error(variant, "exact", "none") < 3e-6
    assert 0 < logits_error(variant, "native", "right") < 3e-6


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", ["mistral", "qwen2 sliding"])
def test_the_sliding_window_is_seen_in_the_logits(architecture: str, mode: str) -> None:
    blind = make_policy(without_window(architecture), mode, CONTEXT)
    batch = lay_out([list(range(30))], [[1, 2]], "right")
    with torch.no_grad():
        a, b = policy_logits(policy(architecture, mode), batch), policy_logits(blind, batch)
    assert float((a - b).norm() / a.norm()) > 0.01


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES])
def test_native_and_exact_values_agree_closely(architecture: str) -> None:
    batch = lay_out(*ragged(6, 1), "right")
    with torch.no_grad():
        exact = value_predictions(value_model(architecture, "exact"), batch)
        native = value_predictions(value_model(architecture, "native"), batch)
    # the tolerance of the logits, of each
    assert float((exact - native).norm() / native.norm()) < 6e-6


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES])
def test_parameters_stay_the_same_objects_under_the_same_names(architecture: str) -> None:
    model = source_model(architecture)
    before, keys = dict(model.named_parameters(remove_duplicate=False)), list(model.state_dict())
    digest = weights_digest(model.named_parameters())
    lowered = lower(model, CONTEXT)
    after = dict(lowered.named_parameters(remove_duplicate=False))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert list(lowered.state_dict()) == keys
    assert weights_digest(lowered.named_parameters()) == digest


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES])
def test_a_lowered_state_loads_into_the_unmodified_class_and_from_a_saved_folder(
    architecture: str, tmp_path: Path
) -> None:
    lowered = make_policy(source_model(architecture), "exact", CONTEXT)
    ids = list(range(20))
    expected = stock_logits(source_model(architecture), ids)
    fresh = type(source_model(architecture))(lowered.config.__class__.from_dict(lowered.config.to_dict())).eval()
    fresh.set_experts_implementation("eager")  # no part of a saved configuration
    fresh.load_state_dict(lowered.state_dict())
    assert unequal(stock_logits(fresh, ids), expected) == 0
    lowered.save_pretrained(tmp_path)
    loaded = type(fresh).from_pretrained(tmp_path, local_files_only=True, experts_implementation="eager").eval()
    assert weights_digest(loaded.named_parameters()) == weights_digest(lowered.named_parameters())
    assert unequal(stock_logits(loaded, ids), expected) == 0


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES])
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
SCALED_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2, "beta_fast": 20, "beta_slow": 2, "truncate": False}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def made(config: Callable[..., PretrainedConfig], **changes: object) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        changed = config(**changes)
        return CLASSES[type(changed)](changed)

    return make


def of_another_family() -> PreTrainedModel:
    config = llama_config(rope_parameters=None).to_dict()
    return CohereForCausalLM(CohereConfig(**{k: v for k, v in config.items() if k != "model_type"}))


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "subclass": (
        lambda: with_module("model.layers.1.mlp.up_proj", TwiceLinear(48, 72)),
        r"'model\.layers\.1\.mlp\.up_proj' of class TwiceLinear",
    ),
    "module": (lambda: with_module("model.norm", nn.RMSNorm(48)), r"'model\.norm' of class RMSNorm"),
    "relu": (made(qwen3_config, hidden_act="relu"), r"hidden_act = 'relu'"),
    "gelu": (made(gpt2_config, activation_function="gelu_10"), r"activation_function = 'gelu_10'"),
    "layers": (made(qwen2_config, layer_types=["full_attention", "chunked_attention"]), r"layer_types = .*chunked"),
    "untyped": (made(mistral_config, layer_types=["full_attention", "sliding_attention"]), r"layer_types = .*sliding"),
    "window": (made(qwen3_config, layer_types=["full_attention", "sliding_attention"]), r"sliding_window = None"),
    "sideways": (made(gemma_config, use_bidirectional_attention=True), r"use_bidirectional_attention = True"),
    "not causal": (made(llama_config, is_causal=False), r"is_causal = False"),
    "cross": (made(gpt2_config, add_cross_attention=True), r"add_cross_attention = True"),
    "dynamic": (made(llama_config, rope_parameters=DYNAMIC), r"rope_type = 'dynamic'"),
    "longrope": (made(llama_config, rope_parameters=LONGROPE), r"rope_type = 'longrope'"),
    "partial": (made(llama_config, rope_parameters=PARTIAL), r"partial_rotary_factor = 0\.5"),
    "family": (
        of_another_family,
        r"of class CohereForCausalLM: .* choose a Llama, Qwen2, Qwen3, Mistral, Gemma, GPT-2",
    ),
    "bfloat16": (in_bfloat16, r"'model\.layers\.1\.mlp\.up_proj\.weight' is torch\.bfloat16"),
    "positions": (
        made(qwen3_config, max_position_embeddings=CONTEXT - 1),
        r"numerics\.max_context = 64: the model has 63 positions",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_covered_is_refused_by_name(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        lower(make(), CONTEXT)


def test_a_vocabulary_too_large_for_the_grids_is_refused() -> None:
    check_config(qwen3_config(vocab_size=2**20), CONTEXT)
    with pytest.raises(UserError, match="vocab_size = 1048577"):
        check_config(qwen3_config(vocab_size=2**20 + 1), CONTEXT)


def test_contexts_with_too_many_queries_for_the_gradient_of_a_key_are_refused() -> None:
    config = qwen3_config(num_attention_heads=64, num_key_value_heads=1, max_position_embeddings=2**15)
    check_config(config, 2**14)
    with pytest.raises(UserError, match=r"max_context = 16385: with 64 query heads .* allow 16384 at most"):
        check_config(config, 2**14 + 1)


@pytest.mark.parametrize(
    "rope", [LINEAR_ROPE, LLAMA3_ROPE, YARN, SCALED_YARN], ids=["linear", "llama3", "yarn", "scaled"]
)
def test_scaled_rotary_positions_are_those_of_the_unmodified_model(rope: dict[str, object]) -> None:
    config = llama_config(rope_parameters=rope)
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(source_model("llama").state_dict())
    x, positions = torch.zeros(1, 1, 48), torch.arange(CONTEXT)[None]
    stock = model.model.rotary_emb(x, positions)
    exact = lower(model, CONTEXT).model.rotary_emb(x, positions)
    for ours, theirs in zip(exact, stock, strict=True):
        # stock takes float32 angles up to 64: half a unit in the last place is 2^-19
        assert torch.allclose(ours, theirs, rtol=0, atol=2.0**-18)
    # the comparison sees the scaling: the plain frequencies are far away
    plain = lower(LlamaForCausalLM(llama_config(rope_parameters=None)), CONTEXT).model.rotary_emb(x, positions)
    assert float((exact[0] - plain[0]).abs().max()) > 0.1


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
    (tmp_path / "config.json").write_text('{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}')
    with pytest.raises(
        UserError, match=r"architecture Gemma2ForCausalLM; must be one of LlamaForCausalLM, .*GPT2LMHead"
    ):
        load_folder(tmp_path)
    of_another_family().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match="loads as CohereForCausalLM; must be one of"):
        load_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(UserError, match=r"model\.path = .*has neither model\.safetensors nor"):
        load_folder(tmp_path)
