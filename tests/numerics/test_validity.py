"""What the kernels cannot compute is refused by field, in one line, before a kernel sees it: models and batches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import ppo_repro
from ppo_repro.base.errors import NumericsError, UserError
from ppo_repro.numerics import library
from ppo_repro.numerics.interface import ffi, ints, names
from ppo_repro.numerics.lowering import Lowered
from ppo_repro.numerics.network import Network
from ppo_repro.numerics.ranges import MAX_EXPERTS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH
from ppo_repro.numerics.sequences import ragged
from tests.support.models import CONFIGS, CONTEXT, MIXTURES, gpt_neox_config, llama_config, mixtral_config, small_model

IDS = torch.tensor([[1, 2, 3]])
THREE = {"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 16}


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **changes}}


# a model, and what is said of it: field, value, rule
MODELS: dict[str, Callable[[], Any]] = {
    "head_dim = 15: .*even": lambda: llama_config(head_dim=15),
    "head_dim = 15: .* even": lambda: gpt_neox_config(hidden_size=60, **rope(partial_rotary_factor=1.0)),
    "head_dim = 18: .* must rotate": lambda: gpt_neox_config(hidden_size=72, rotary_pct=0.5),
    "num_key_value_heads = 2: must divide": lambda: llama_config(**THREE),
    "num_experts_per_tok = 3: must be from 1": lambda: mixtral_config(num_local_experts=2, num_experts_per_tok=3),
    "rope_parameters: rope_theta = nan: ": lambda: llama_config(**rope(rope_theta=float("nan"))),
    "sliding_window = -3: ": lambda: mixtral_config(sliding_window=-3),
}


@pytest.mark.parametrize("message", MODELS)
def test_a_model_that_the_kernels_cannot_compute_is_refused(message: str) -> None:
    with pytest.raises(UserError, match=f"^model config {message}") as refused:
        ppo_repro.deterministic(small_model(MODELS[message](), 0))
    assert "\n" not in str(refused.value)


def replaced(part: str, module: nn.Module) -> Callable[[PreTrainedModel], None]:
    return lambda model: setattr(model, part, module)


def reshaped(name: str, *shape: int) -> Callable[[PreTrainedModel], None]:
    return lambda model: setattr(model.get_parameter(name), "data", torch.randn(shape))


CHANGES = {
    "lm_head": replaced("lm_head", nn.Linear(64, 89, bias=False)),
    "q_proj": reshaped("model.layers.0.self_attn.q_proj.weight", 3, 48),
    "norm": reshaped("model.norm.weight", 3),
    "embed_tokens": reshaped("model.embed_tokens.weight", 3, 48),
}


@pytest.mark.parametrize("part", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_weight_of_another_shape_is_refused(part: str, when: str) -> None:
    model = small_model(llama_config(), 0)
    if when == "after":
        model = ppo_repro.deterministic(model)
    CHANGES[part](model)
    with pytest.raises(UserError, match=rf"^model parameter '\S*{part}.weight' is .*and its config wants"):
        model(IDS) if when == "after" else ppo_repro.deterministic(model)


def test_a_model_with_another_vocabulary_is_seen_as_it_is() -> None:
    model = ppo_repro.deterministic(small_model(llama_config(), 0))
    model(IDS)
    model.resize_token_embeddings(200, mean_resizing=False)
    assert model(torch.tensor([[199, 3]])).logits.shape == (1, 2, 200)


def network(family: str) -> Network:
    return Network(small_model((CONFIGS | MIXTURES)[family](), 0).base_model, Lowered(CONTEXT))


def fault(of: Network) -> str | None:
    found = library.load().model_fault(of.model.struct)
    return None if found == ffi.NULL else ffi.string(found).decode()


# numbers of the C structs, `layer` for the first layer's, that break one rule, and the field that the rule is about
BROKEN = {
    "num_hidden_layers": [("layers", 0), ("layers", MAX_LAYERS + 1)],
    "hidden_size": [("hidden", 0), ("hidden", MAX_WIDTH + 1), ("hidden", 49), ("embedding_scale", float("inf"))],
    "vocab_size": [("vocabulary", 0), ("vocabulary", MAX_VOCABULARY + 1)],
    "num_attention_heads": [("heads", 0), ("q_at", -1), ("q_at", 1 << 30), ("k_step", 1), ("v_at", 4000)],
    "num_key_value_heads": [("kv_heads", 0), ("kv_heads", 3), ("kv_heads", 8)],
    "head_dim": [("head_dim", 0), ("head_dim", 1 << 29), *(("layer.rotary.elements", n) for n in (15, 0, 18))],
    "rope_parameters": [("layer.rotary.cosine", ffi.NULL), ("layer.rotary.sine", ffi.NULL)],
    "attn_logit_softcapping": [("layer.score_cap", float("nan")), ("layer.score_cap", -1.0)],
    "residual_multiplier": [("residual_scale", 0.0), ("residual_scale", float("inf"))],
    "sliding_window": [("layer.window", -1)],
    "max_position_embeddings": [("position_entries", -1)],
    "pad_token_id": [("padding", 89), ("padding", -2)],
    "eps of the norms": [("eps", 0.0), ("eps", float("nan")), ("eps", -1.0)],
    "model_type": [("norm", len(names("NormKind", ""))), ("qk_norm", len(names("QkNormKind", ""))), ("head_norm", 2)],
    "hidden_act": [("activation", len(names("ActivationKind", "")))],
    "intermediate_size": [("gated", 0)],
    "num_experts": [("mixtures", 3), ("mixtures", 0), ("experts", 0), ("experts", MAX_EXPERTS + 1), ("experts", 3)],
    "num_experts_per_tok": [("chosen", 0), ("chosen", 5)],
}
RULES = [(field, *change) for field, changes in BROKEN.items() for change in changes]


@pytest.mark.parametrize(("field", "number", "value"), RULES)
def test_each_rule_names_its_field(field: str, number: str, value: Any) -> None:
    of = network("mixtral" if "experts" in field else "qwen3")
    assert fault(of) is None
    path, _, name = number.rpartition(".")
    setattr(attrgetter(path)(of.model.struct) if path else of.model.struct, name, value)
    assert str(fault(of)).partition(": ")[0] == field


def test_every_rule_of_the_source_is_broken_above() -> None:
    source = re.sub("//.*", "", (library.build.SOURCES / "validity.c").read_text())
    assert set(re.findall(r'return [^"]*"([^:"]+):', source)) == {*BROKEN}


ROUTES = {"outside": [0, 4], "negative": [-1, 2], "falling": [2, 1], "twice": [2, 2]}


@pytest.mark.parametrize("wrong", [*ROUTES, "too few"])
def test_routes_that_are_none_of_the_models_are_refused(wrong: str) -> None:
    of = network("mixtral")
    routes = np.tile([0, 1], (3, 2))
    routes[1] = [0, 1, *ROUTES.get(wrong, [0, 1])]
    given = torch.from_numpy(routes[:, :2] if wrong == "too few" else routes)
    with pytest.raises(UserError, match=r"^routes"):
        of.over_batch(ragged([[1, 2, 3]], routes=given), ints([0, 1, 2]))


@pytest.mark.parametrize("rows", [[0, 2, 2], [1, 0]])
def test_rows_that_do_not_rise_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^rows must rise, each once$"):
        network("qwen3").over_batch(ragged([[1, 2, 3]]), ints(rows))


@pytest.mark.parametrize(
    ("past", "message"),
    [(-1, "positions: must be at least 0"), (CONTEXT, f"{CONTEXT + 1} tokens: numerics.max_context is {CONTEXT}")],
)
def test_positions_outside_the_tables_are_refused(past: int, message: str) -> None:
    of = network("qwen3")
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        of.over_batch(ragged([[1]], past=[past]), ints([0]))


# a weight of Gemma 2, which has every norm of a layer, and the first norm that an infinity in the weight reaches
FIRST_NORMS = {
    "embed_tokens": "layers.0.input_layernorm",
    "layers.0.self_attn.o_proj": "layers.0.post_attention_layernorm",
    "layers.0.post_attention_layernorm": "layers.0.pre_feedforward_layernorm",
    "layers.0.mlp.down_proj": "layers.0.post_feedforward_layernorm",
    "layers.0.post_feedforward_layernorm": "layers.1.input_layernorm",
    "layers.1.post_feedforward_layernorm": "norm",
}


@pytest.mark.parametrize("weight", FIRST_NORMS)
def test_the_norm_whose_input_is_not_finite_is_named(weight: str) -> None:
    """C numbers the norms of a model, and Python names them by number."""
    of = network("gemma2")
    message = rf"^the input of {re.escape(FIRST_NORMS[weight])} is not finite; "
    with torch.no_grad(), pytest.raises(NumericsError, match=message):
        of.parameters[f"{weight}.weight"].fill_(math.inf)
        of.over_batch(ragged([[1, 2, 3]]), ints([0]))
