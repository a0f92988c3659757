"""The memory plan: worked cases, and what real models, caches and passes hold."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from ppo_repro.commands.cli import _run
from ppo_repro.errors import UserError
from ppo_repro.models.networks import make_policy
from ppo_repro.numerics import library
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.native import SlotCache
from ppo_repro.numerics.network import Network, network_of
from ppo_repro.plan import memory
from ppo_repro.plan.memory import FLOAT, Model, Plan, Work, as_json, frozen_model, make_plan, size, trained_model
from ppo_repro.plan.shapes import plan_run, sizes_of
from ppo_repro.runs.prepare import prepare
from ppo_repro.stages.chunks import LOGITS_AT_ONCE
from tests.support.models import CLASSES, CONFIGS, CONTEXT, MIXTURES
from tests.support.plans import CONFIG_OF, distinct, resized, saved_bytes, whole_model
from tests.support.runs import small_config

BILLION = 10**9
LORA = "{rank: 2, alpha: 4.0}"
HOW = Work(
    deterministic=True,
    slots=4,
    max_context=CONTEXT,
    max_response_tokens=8,
    forward_sequences=8,
    update_sequences=4,
    gradient_arrays=1,
    packed=False,
    recompute=False,
    older_policies=0,
    sampler_stock=0,
    sampler_rounds=False,
    reference_in_steps=False,
    processes=1,
)


def test_four_models_of_seven_billion_need_252_gb_and_not_84() -> None:
    """16 bytes for each of two trained models, 2 for each of two frozen ones; 28 GB would hold no optimizer at all."""
    seven = 7 * BILLION
    trained, frozen = Model("", seven, seven, 0, seven, seven), Model("", seven, 0, seven, 0, seven)
    assert Plan((trained, trained, frozen, frozen), {}, 1).mixed_precision == 252 * BILLION
    assert Plan((trained,), {}, 1).mixed_precision == 112 * BILLION
    # weight and gradient in 16 bits alone are 28 GB
    assert (2 + 2) * seven == 28 * BILLION


def test_a_real_seven_billion_model_needs_no_memory_to_be_planned() -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes = sizes_of(LlamaConfig(vocab_size=32000, max_position_embeddings=4096, **shape), True)
    assert sizes.parameters == 6_738_415_616
    assert sizes.linears == 32 * (4 * 4096**2 + 3 * 4096 * 11008) and sizes.head == 32000 * 4096
    trunk = sizes.parameters - 32000 * 4096
    value, reward = trained_model("value model", sizes, 0, True), frozen_model("reward model", sizes, 1)
    assert value.trained == value.weights == trunk + 4096 + 1 and reward.frozen == trunk + 4096
    policy, reference = trained_model("policy", sizes, 0), frozen_model("reference", sizes)
    plan = make_plan(sizes, (policy, reference), None, HOW)
    assert plan.rows["weights"]["update"] == 2 * FLOAT * sizes.parameters
    assert plan.rows["moments"]["update"] == 2 * plan.rows["gradients"]["update"] == 8 * sizes.parameters
    packed = 4 * policy.packed
    assert plan.rows["packed weights"] == {"rollout": packed, "scoring": 2 * packed, "update": packed}


def test_a_classifier_has_the_trunk_and_a_score() -> None:
    config = CONFIGS["llama"]()
    config.num_labels = 1
    with torch.device("meta"):
        real = LlamaForSequenceClassification(config)
    assert frozen_model("", sizes_of(config, True), 1).frozen == sum(p.numel() for p in real.parameters())


@pytest.mark.parametrize("architecture", [*CONFIGS, *MIXTURES])
def test_caches_are_counted_to_the_byte(architecture: str) -> None:
    cache = SlotCache(CONFIG_OF[architecture](), HOW.slots, CONTEXT, torch.device("cpu"), torch.float32)
    sizes = sizes_of(CONFIG_OF[architecture](), False)
    how = replace(HOW, deterministic=False)
    plan = make_plan(sizes, (trained_model("policy", sizes, 0), frozen_model("reference", sizes)), None, how)
    assert plan.rows["KV cache"]["rollout"] == distinct([*cache.keys, *cache.values])


@pytest.mark.parametrize("architecture", [*CONFIGS, *MIXTURES])
def test_activations_of_a_layer_are_what_a_pass_of_torch_keeps(architecture: str) -> None:
    tokens, row = 3 * 29, 29
    found = [saved_bytes(make_policy(whole_model(resized(architecture, n)), "native", CONTEXT)) for n in (2, 3)]
    sizes = [sizes_of(resized(architecture, n), False) for n in (2, 3)]
    planned = FLOAT * tokens * (sizes[1].kept - sizes[0].kept + row)
    assert planned == pytest.approx(found[1] - found[0], rel=0.15)
    assert planned != pytest.approx((found[1] - found[0]) / 2, rel=0.15), "the control: half of it"


@pytest.mark.parametrize("architecture", [*CONFIGS, *MIXTURES])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_what_the_kernels_keep(architecture: str, recompute: bool) -> None:
    config, tokens = resized(architecture, 3), 64  # arrays are aligned to 16 numbers
    network = network_of(trunk_of(make_policy(whole_model(config), "deterministic", CONTEXT)))
    assert isinstance(network, Network)
    network.prepare()
    sizes = sizes_of(config, True)
    kept = sizes.layers * sizes.hidden + sizes.kept_in_layer - sizes.hidden if recompute else sizes.kept
    found = library.load().kept_floats(ctypes.byref(network.struct), tokens, 1 if recompute else 2)
    assert found == tokens * (kept + sizes.hidden + 2)


@pytest.mark.parametrize("lora", ["null", LORA])
def test_weights_and_moments_of_a_run_are_counted_to_the_byte(lora: str) -> None:
    config = small_config("model.warm_start_steps=0", f"lora={lora}")
    state = prepare(config, lambda step, total, loss: None, share=True).state
    modules = [module for module in (state.policy, state.reference, state.value_model) if module is not None]
    factors = state.policy_optimizer.state().factors
    plan = plan_run(small_config(f"lora={lora}", f"model.vocab_size={state.policy.config.vocab_size}"))
    found = distinct([*(p for module in modules for p in module.parameters()), *factors.values()])
    assert plan.rows["weights"]["update"] == found
    optimizers = [optimizer for optimizer in (state.policy_optimizer, state.value_optimizer) if optimizer is not None]
    moments = [m for optimizer in optimizers for m in (optimizer.state().first, optimizer.state().second)]
    assert plan.rows["moments"]["update"] == sum(t.nbytes for of in moments for t in of.values())


def config_only(folder: Path) -> Path:
    config = CONFIGS["qwen3"]()
    config.architectures = [CLASSES[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


def test_a_folder_with_nothing_but_its_config_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model={{kind: folder, path: {config_only(tmp_path)}}}"
    found = plan_run(small_config(model))
    assert [m.name for m in found.models] == ["policy", "value model", "reference"]
    assert found.peak == memory.PROCESS + max(found.total(phase) for phase in memory.PHASES)
    assert _run(["plan", "tests/support/small.yaml", "--set", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(as_json(found)))
    assert _run(["plan", "tests/support/small.yaml", "--set", model]) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("policy", "value model", "reference", "peak", "Mixed-precision", *found.rows))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_what_cannot_be_planned_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no config"):
        plan_run(small_config(f"model={{kind: folder, path: {tmp_path}}}"))
    path = config_only(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["BertModel"]}))
    with pytest.raises(UserError, match="architecture BertModel; must be one of LlamaForCausalLM"):
        plan_run(small_config(f"model={{kind: folder, path: {tmp_path}}}"))


@pytest.mark.parametrize(
    ("override", "phase"),
    [
        ("layout.update_micro_batch=4", "update"),
        ("layout.forward_micro_batch=8", "scoring"),
        ("layout.rollout_slots=8", "rollout"),
        ("layout.gradient_checkpointing=true", "update"),
    ],
)
def test_smaller_passes_need_less_and_the_same_stays(override: str, phase: str) -> None:
    usual, found = plan_run(small_config()), plan_run(small_config(override))
    assert found.rows["moments"] == usual.rows["moments"] and found.total(phase) < usual.total(phase)


def test_of_two_processes_each_needs_less_for_its_sequences_and_the_same_for_the_models() -> None:
    one, two = plan_run(small_config()), plan_run(small_config(), 2)
    assert two.certain == one.certain and two.rows["activations"]["update"] < one.rows["activations"]["update"]


def test_arithmetic_needs_no_torch() -> None:
    code = "import sys, ppo_repro.plan.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert memory.LOGITS_AT_ONCE == LOGITS_AT_ONCE


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (252 * BILLION, "252.0 GB")])
def test_sizes_are_decimal(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize("lora", ["null", LORA])
def test_older_policies_are_counted_as_they_are_kept(lora: str) -> None:
    behind = f"lora={lora}", "mismatch.sampler.lag=9"
    state = prepare(small_config(*behind, "model.warm_start_steps=0"), lambda step, total, loss: None).state
    versions = state.versions_now()
    assert versions is not None
    one = sum(tensor.nbytes for tensor in versions.tensors().values())
    # a run of three iterations has two older policies at most; while they sample, the newest one waits beside them
    planned = plan_run(small_config(*behind, f"model.vocab_size={state.policy.config.vocab_size}"))
    assert planned.rows["older policies"] == {"rollout": 3 * one, "scoring": 2 * one, "update": 2 * one}
    assert "older policies" not in plan_run(small_config()).rows


def test_copies_of_a_sampler_that_rounds_are_counted() -> None:
    assert "copies" not in plan_run(small_config()).rows
    stock = plan_run(small_config("mismatch.sampler.stock=bfloat16"))
    assert stock.rows["copies"]["update"] == 2 * stock.models[0].trained
    rounded = plan_run(small_config("mismatch.sampler.precision={weights: bfloat16, activations: bfloat16}"))
    assert rounded.rows["copies"] == {"loading": 0, "rollout": 4 * rounded.models[0].packed, "scoring": 0, "update": 0}
