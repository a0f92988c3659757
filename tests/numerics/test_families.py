"""Every family computes what its unmodified model does, keeps its modules, and refuses what it does not know."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, CohereForCausalLM, PretrainedConfig, PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.families import FAMILIES, Family, FamilyNames, attention_of
from ppo_repro.numerics.lowering import Lowered, lower
from ppo_repro.numerics.network import network_of
from ppo_repro.numerics.rotary import tables
from ppo_repro.numerics.weights import weights_digest
from tests.support.models import (
    ARCHITECTURES,
    CLASSES,
    CONTEXT,
    EVERY_FAMILY,
    LLAMA3_ROPE,
    MIXTURES,
    VARIANTS,
    WINDOWED,
    YARN_ROPE,
    gemma_config,
    llama_config,
    phi3_config,
    policy,
    qwen2_config,
    qwen3_config,
    ragged,
    small_model,
    source_model,
    unequal,
)
from tests.support.paths import ROOT

PAGE = ROOT / "ppo_repro" / "models" / "README.md"


def test_the_page_of_models_has_a_row_for_every_family() -> None:
    rows = re.findall(r"^\| [^|]* \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(FAMILIES)


TOLERANCE = 3e-6  # relative, of logits of small random models in float32: 1e-6 was measured


def stock_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def logits_error(source: PreTrainedModel, made: PreTrainedModel, padding: str) -> float:
    """Relative distance from the unmodified model in float64, each sequence alone under the masks it makes itself."""
    prompts, responses = ragged(6, 1, prompt=30)
    wide = copy.deepcopy(source).double()
    with torch.no_grad():
        got = policy_logits(made, lay_out(prompts, responses, padding))
    expected = torch.cat(
        [stock_logits(wide, [*p, *r[:-1]])[len(p) - 1 :] for p, r in zip(prompts, responses, strict=True)]
    )
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("architecture", [*EVERY_FAMILY, *(pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS)])
def test_logits_are_those_of_the_unmodified_model(architecture: str) -> None:
    source = source_model(architecture)
    errors = {p: logits_error(source, policy(architecture, "native"), p) for p in ("right", "left", "none")}
    errors["deterministic"] = logits_error(source, policy(architecture, "deterministic"), "right")
    assert not {where: e for where, e in errors.items() if not 0 < e < TOLERANCE}


def wrong_rows() -> Iterator[Any]:
    """Every row of `FAMILIES` with one field as Llama has it, and rows with norms at other places."""
    others = ("name", "names", "mixture", "learned_positions", "gated")  # which weights there are
    computing = {field.name: field.default for field in dataclasses.fields(Family) if field.name not in others}
    for kind, row in FAMILIES.items():
        for name, default in computing.items():
            if getattr(row, name) != default:
                yield pytest.param(kind, replace(row, **{name: default}), id=f"{kind}: {name}")
    before = FamilyNames(norm1="post_attention_layernorm", norm2="post_feedforward_layernorm")
    yield pytest.param("olmo2", replace(FAMILIES["olmo2"], names=before), id="olmo2: norms before")
    for kind in ("gemma2", "gemma3_text"):
        names = FAMILIES[kind].names
        turned = names._replace(norm1_after=names.norm2, norm2=names.norm1_after)
        yield pytest.param(kind, replace(FAMILIES[kind], names=turned), id=f"{kind}: norms exchanged")


@pytest.mark.parametrize("names", [FamilyNames(norm2=None), FamilyNames(norm1_after="x")])
def test_a_row_with_one_of_two_norms_is_refused(names: FamilyNames) -> None:
    with pytest.raises(AssertionError, match="x: the kernels need both norms of a layer, or neither"):
        Family("x", names)


@pytest.mark.parametrize(("kind", "row"), [*wrong_rows()])
def test_a_wrong_row_of_the_table_is_seen(kind: str, row: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a small model of the family has other logits, or is refused."""
    sources = [source_model(a) for a in (*ARCHITECTURES, *MIXTURES, *VARIANTS) if re.split("[ ,]", a)[0] == kind]
    monkeypatch.setitem(FAMILIES, kind, row)

    def error(source: PreTrainedModel) -> float:
        try:
            return logits_error(source, make_policy(copy.deepcopy(source), "deterministic", CONTEXT), "right")
        except (UserError, AttributeError, KeyError):
            return math.inf

    assert max(map(error, sources)) > 1000 * TOLERANCE


@pytest.mark.parametrize("architecture", EVERY_FAMILY)
def test_a_lowered_model_keeps_modules_parameters_and_what_its_class_computes(
    architecture: str, tmp_path: Path
) -> None:
    source, ids = source_model(architecture), list(range(20))
    expected, modules = stock_logits(source, ids), [type(m) for m in source.modules()]
    before, digest = dict(source.named_parameters(remove_duplicate=False)), weights_digest(source.named_parameters())
    lowered = lower(source, Lowered(CONTEXT))
    with torch.no_grad():
        found = policy_logits(lowered, lay_out([ids[:1]], [[*ids[1:], 0]]))
    assert unequal(found, expected) > 0, "the kernels computed nothing"
    after = dict(lowered.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert [type(m) for m in lowered.modules()] == modules
    assert weights_digest(lowered.named_parameters()) == digest
    lowered.save_pretrained(tmp_path)
    stock = {"attn_implementation": attention_of(source.config), "experts_implementation": "eager"}
    loaded = type(source).from_pretrained(tmp_path, local_files_only=True, **stock).eval()
    assert weights_digest(loaded.named_parameters()) == digest
    assert unequal(stock_logits(loaded, ids), expected) == 0


LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize("rope", [LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE], ids=["linear", "llama3", "yarn"])
def test_scaled_rotary_positions_are_those_of_the_unmodified_model(rope: dict[str, object]) -> None:
    config = llama_config(rope_parameters=rope)
    stock = small_model(config, 0).model.rotary_emb(torch.zeros(1, 1, 48), torch.arange(CONTEXT)[None])
    ours = tables(config, rope, CONTEXT)
    for mine, theirs in zip(ours, stock, strict=True):
        # stock takes float32 angles up to 64: half a unit in the last place is 2^-19
        assert torch.allclose(torch.cat([mine, mine], -1), theirs[0], rtol=0, atol=2.0**-18)
    # the comparison sees the scaling: the plain frequencies are far away
    plain = tables(config, {"rope_type": "default", "rope_theta": 1e4}, CONTEXT)
    assert float((ours[0] - plain[0]).abs().max()) > 0.1


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


def without_a_layer_type() -> PreTrainedModel:
    model = source_model("qwen3")
    model.config.layer_types = model.config.layer_types[:1]
    return model


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
    "relu": (made(qwen3_config, hidden_act="relu"), r"hidden_act = 'relu': deterministic numerics know silu, .*gelu"),
    "layers": (
        made(qwen2_config, layer_types=["full_attention", "chunked_attention"]),
        r"layer_types = .*chunked.*: each must be full_attention or sliding_attention; choose another model",
    ),
    "layer type": (without_a_layer_type, r"^model config: transformers makes no model of it \(IndexError: list index"),
    "window": (made(qwen2_config, **{**WINDOWED, "sliding_window": None}), r"sliding_window = None: .* needs a number"),
    "sideways": (made(gemma_config, use_bidirectional_attention=True), r"use_bidirectional_attention = True"),
    "dynamic": (made(llama_config, rope_parameters=DYNAMIC), r"rope_type = 'dynamic'"),
    "partial": (made(llama_config, rope_parameters=PARTIAL), r"partial_rotary_factor = 0\.5"),
    "family": (of_another_family, r"CohereForCausalLM: .* choose a Llama, Qwen2, Qwen3"),
    "bfloat16": (in_bfloat16, r"'model\.layers\.1\.mlp\.up_proj\.weight' is torch\.bfloat16"),
    "long sequences": (
        made(phi3_config, original_max_position_embeddings=CONTEXT - 1),
        r"numerics\.max_context = 64: the model has 63 positions, and other rotary frequencies in longer sequences",
    ),
    "positions": (
        made(qwen3_config, max_position_embeddings=CONTEXT - 1),
        r"numerics\.max_context = 64: the model has 63 positions",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_covered_is_refused_by_name(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        network_of(lower(make(), Lowered(CONTEXT)))
