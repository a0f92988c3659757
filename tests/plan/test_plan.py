"""The memory plan: worked cases, byte for byte against real tensors, and against a real training step."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification, PretrainedConfig

from ppo_repro.commands.cli import _run
from ppo_repro.errors import UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.lora import add_lora, share_frozen
from ppo_repro.models.lora_optimizer import ExactLoraOptimizer, make_lora_optimizer
from ppo_repro.models.networks import (
    freeze,
    make_policy,
    make_value_model,
    policy_logits,
    value_predictions,
)
from ppo_repro.numerics import backend, gradients
from ppo_repro.numerics.kernels.amx import operands as amx_operands
from ppo_repro.numerics.kernels.amx import tiles as amx_tiles
from ppo_repro.numerics.kernels.float64 import tiles as float64_tiles
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.layers.kv_cache import GridCache, SlotCache
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.optimizer import ExactOptimizer, NativeOptimizer, make_optimizer
from ppo_repro.plan import memory, report
from ppo_repro.plan.memory import mixed_precision_bytes
from ppo_repro.plan.models import Linear, ModelShape, as_classifier
from ppo_repro.plan.phases import make_plan
from ppo_repro.plan.shapes import model_shape, plan_run
from ppo_repro.plan.work import LONG_STEP
from ppo_repro.runs.prepare import prepare
from ppo_repro.stages.forward import LOGITS_AT_ONCE
from tests.support.cli import one_line
from tests.support.models import CLASSES, CONFIGS, CONTEXT, MIXTURES, ragged, source_model
from tests.support.plans import (
    CONFIG_OF,
    SETTINGS,
    distinct,
    held_operands,
    resized,
    saved_bytes,
    take_a_step,
    whole_model,
    work,
)
from tests.support.runs import small_config

FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "gemma", "gpt2", "gpt_neox", *MIXTURES)
BILLION = 10**9


def test_four_models_of_seven_billion_need_252_gb_and_not_84() -> None:
    """16 bytes for each of two trained models, 2 for each of two frozen ones; 28 GB would hold no optimizer at all."""
    seven = 7 * BILLION
    assert mixed_precision_bytes(seven, 0) == 112 * BILLION
    assert mixed_precision_bytes(0, seven) == 14 * BILLION
    assert mixed_precision_bytes(2 * seven, 2 * seven) == 252 * BILLION
    # weight and gradient in 16 bits alone are 28 GB
    assert (2 + 2) * seven == 28 * BILLION < mixed_precision_bytes(seven, 0) / 3


def llama_7b() -> PretrainedConfig:
    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    return LlamaConfig(vocab_size=32000, max_position_embeddings=4096, **shape)


def test_a_real_seven_billion_model_needs_no_memory_to_be_planned() -> None:
    shape = model_shape(llama_7b(), exact=True)
    assert shape.parameters == 6_738_415_616
    trunk = shape.parameters - 32000 * 4096
    planned = make_plan(shape, shape, as_classifier(shape, 1), work("float64", max_context=2048))
    policy, value_model, reference, reward = planned.residents
    assert policy.mixed_precision == 16 * shape.parameters and reference.mixed_precision == 2 * shape.parameters
    assert value_model.trained_parameters == trunk + 4096 + 1 and reward.frozen_parameters == trunk + 4096
    # exact numerics on a CPU: float32 weights, int64 sums, two moments, int32 panels of the weights
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    assert (policy.total, policy.gradient_sums) == ((4 + 8) * shape.parameters, 8 * shape.parameters)
    assert reference.total == 4 * shape.parameters
    assert [m.operands for m in (policy, reference)] == pytest.approx([4 * matrices, 4 * matrices], rel=3e-3)


def test_operands_worked_by_hand() -> None:
    matrix = Linear(outputs=40, inputs=100)
    assert memory.prepared_bytes(matrix, False, work("native")) == 0
    assert memory.prepared_bytes(matrix, False, work("float64")) == 4 * 48 * 100 + 9 * 40 + 8 * 2  # two panels of 24
    assert memory.prepared_bytes(matrix, True, work("float64")) == 9 * 100  # only the grids
    across = replace(matrix, across=True)
    assert memory.prepared_bytes(across, False, work("float64")) == 9 * 40
    assert memory.prepared_bytes(across, True, work("float64")) == 4 * 120 * 40 + 9 * 100 + 8 * 5
    # 3 blocks of 16 columns, 2 of 64 terms, three digits of 1024 bytes, 48 scales
    assert memory.prepared_bytes(matrix, False, work("amx")) == 3 * 2 * 3 * 1024 + 48 * 8 + 40
    assert memory.prepared_bytes(matrix, True, work("amx")) == 7 * 1 * 3 * 1024 + 112 * 8 + 100
    vocabulary = Linear(outputs=50_000, inputs=16)
    assert memory.prepared_bytes(vocabulary, True, work("amx")) == 9 * 16  # too many terms for tiles


def test_the_constants_are_those_of_the_kernels() -> None:
    assert memory.FLOAT64_COLUMNS == float64_tiles.COLUMNS
    digits = amx_tiles.B_DIGITS, amx_tiles.A_DIGITS
    assert (*digits, amx_operands.MAX_TERMS) == (memory.AMX_WEIGHT, memory.AMX_INPUT, memory.AMX_MAX_TERMS)
    assert not gradients.needs_two_limbs(LONG_STEP) and gradients.needs_two_limbs(LONG_STEP + 1)
    assert memory.LOGITS_AT_ONCE == LOGITS_AT_ONCE


def test_long_steps_have_an_upper_limb() -> None:
    shape = model_shape(CONFIGS["qwen3"](), True)
    sequences = LONG_STEP // (CONTEXT - 1)
    works = [work("float64", step_sequences=sequences + more) for more in (0, 1)]
    sums = [memory.trained_model("policy", shape, shape.head, 0, w, 0).gradient_sums for w in works]
    assert sums == [8 * shape.parameters, 12 * shape.parameters]


KERNELS = ["float64", "native", *(["amx"] if backend.has_amx() else [])]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_stays_is_counted_to_the_byte(architecture: str, kernels: str) -> None:
    mode = "native" if kernels == "native" else "exact"
    backend.use("eager" if mode == "native" else kernels, 1)
    source = source_model(architecture)
    policy, value_model = make_policy(source, mode, CONTEXT), make_value_model(source, mode, CONTEXT, 0)
    reference = freeze(make_policy(source, mode, CONTEXT))
    batch = lay_out(*ragged(4, 0), "right")

    def logprobs(model: object = policy) -> Tensor:
        logits = policy_logits(model, batch)  # type: ignore[arg-type]
        return token_statistics(logits, batch.targets, 1.0, None, mode)[0]

    shape = model_shape(CONFIG_OF[architecture](), mode == "deterministic")
    planned = make_plan(shape, shape, None, work(kernels)).residents
    pairs = ((policy, logprobs, planned[0]), (value_model, lambda: value_predictions(value_model, batch), planned[1]))
    for model, forward, resident in pairs:
        optimizer = make_optimizer(model, SETTINGS, mode)
        take_a_step(model, forward, optimizer, batch.real_tokens)
        assert distinct(model.parameters()) == resident.weights
        state = optimizer.state()
        assert distinct([*state.first.values(), *state.second.values()]) == resident.moments
        if isinstance(optimizer, ExactOptimizer):
            assert distinct(optimizer.accumulator._sums_memory.values()) == resident.gradient_sums
            assert resident.gradients == 0
            # after a step the forward operands are new; those of the backward pass come with the next one
            forward_only = sum(
                memory.prepared_bytes(m, False, work(kernels)) for m in (*shape.linears, head_of(model, shape))
            )
            assert held_operands(model) == forward_only
            optimizer.accumulator.begin()
            torch.autograd.backward(forward().sum())
            assert held_operands(model) == resident.operands
        else:
            assert isinstance(optimizer, NativeOptimizer)
            assert distinct(p.grad for p in model.parameters() if p.grad is not None) == resident.gradients
    with torch.no_grad():
        logprobs(reference)
    assert (distinct(reference.parameters()), held_operands(reference)) == (planned[2].weights, planned[2].operands)


def head_of(model: nn.Module, shape: ModelShape) -> Linear:
    return Linear(1, shape.hidden) if hasattr(model, "trunk") else shape.head


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_an_adapter_is_counted_to_the_byte(architecture: str, mode: str) -> None:
    kernels = "float64" if mode == "deterministic" else "native"
    backend.use("float64" if mode == "deterministic" else "eager", 1)
    targets = ("q_proj", "up_proj") if architecture == "qwen3" else ("c_attn",)
    policy = make_policy(source_model(architecture), mode, CONTEXT)
    reference = freeze(make_policy(source_model(architecture), mode, CONTEXT))
    lora = share_frozen(policy, reference, add_lora(policy, 3, 6.0, targets, 0))
    optimizer = make_lora_optimizer(policy, lora, SETTINGS)
    batch = lay_out(*ragged(4, 0), "right")
    take_a_step(
        policy,
        lambda: token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, mode)[0],
        optimizer,
        batch.real_tokens,
    )
    shape = model_shape(CONFIGS[architecture](), mode == "deterministic", targets)
    resident = memory.trained_model("policy", shape, shape.head, 0, work(kernels, lora_rank=3), 3)
    bases = [layer.base for layer in lora.layers.values()]
    together = [*policy.parameters(), *bases, *lora.factors().values(), *reference.parameters()]
    assert distinct(together) == resident.weights + distinct(reference.parameters())
    state = optimizer.state()
    assert distinct([*state.first.values(), *state.second.values()]) == resident.moments
    if mode == "deterministic":
        assert isinstance(optimizer, ExactLoraOptimizer)
        assert distinct(optimizer.accumulator._sums_memory.values()) == resident.gradient_sums
        assert resident.gradients == 0
    else:
        with_gradients = [*policy.parameters(), *lora.factors().values()]
        assert distinct(p.grad for p in with_gradients if p.grad is not None) == resident.gradients
    assert resident.trained_parameters == sum(f.numel() for f in lora.factors().values())
    assert resident.mixed_precision == 16 * resident.trained_parameters + 2 * shape.parameters


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_an_adapted_value_model_is_counted_to_the_byte(mode: str) -> None:
    kernels = "float64" if mode == "deterministic" else "native"
    backend.use("float64" if mode == "deterministic" else "eager", 1)
    model = make_value_model(source_model("qwen3"), mode, CONTEXT, 0)
    reference = freeze(make_policy(source_model("qwen3"), mode, CONTEXT))
    lora = share_frozen(model, trunk_of(reference), add_lora(model, 3, 6.0, ("q_proj", "up_proj"), 0))
    optimizer = make_lora_optimizer(model, lora, SETTINGS)
    batch = lay_out(*ragged(4, 0), "right")
    take_a_step(model, lambda: value_predictions(model, batch), optimizer, batch.real_tokens)
    shape = model_shape(CONFIGS["qwen3"](), mode == "deterministic", ("q_proj", "up_proj"))
    resident = memory.trained_model("value model", shape, Linear(1, shape.hidden), 1, work(kernels), 3)
    bases = [layer.base for layer in lora.layers.values()]
    together = [*model.parameters(), *bases, *lora.factors().values(), *reference.parameters()]
    assert distinct(together) == resident.weights + distinct(reference.parameters())
    state = optimizer.state()
    assert distinct([*state.first.values(), *state.second.values()]) == resident.moments
    if isinstance(optimizer, ExactLoraOptimizer):
        assert distinct(optimizer.accumulator._sums_memory.values()) == resident.gradient_sums
        own = [m for m in shape.linears if m.adapted] + [Linear(1, shape.hidden)]
        optimizer.accumulator.begin()
        torch.autograd.backward(value_predictions(model, batch).sum())
        frozen = [m for m in shape.linears if not m.adapted]
        assert resident.operands == memory.operand_bytes(own, work(kernels), True)
        assert held_operands(model) == resident.operands + memory.operand_bytes(frozen, work(kernels), True)
        optimizer.rest()
        assert not optimizer.accumulator._sums_memory
    else:
        with_gradients = [*model.parameters(), *lora.factors().values()]
        assert distinct(p.grad for p in with_gradients if p.grad is not None) == resident.gradients
        optimizer.rest()
        assert all(p.grad is None for p in with_gradients)
    assert resident.trained_parameters == sum(p.numel() for p in lora.trained().values())


def test_phases_worked_by_hand() -> None:
    """The operands of each phase, of matrices that are adapted in one model, in two, in none."""
    shape = model_shape(CONFIGS["qwen3"](), True)
    first, *rest = shape.linears
    by_policy = replace(shape, linears=(replace(first, adapted=True), *rest))
    by_value = replace(shape, linears=(first, replace(rest[0], adapted=True), *rest[1:]))
    how = work("float64", lora_rank=2, value_lora_rank=2)

    def forward(*matrices: Linear) -> int:
        return memory.operand_bytes(matrices, how, False)

    def both(*matrices: Linear) -> int:
        return memory.operand_bytes(matrices, how, True)

    score = Linear(1, shape.hidden)
    phases = make_plan(by_policy, by_value, None, how).phases
    shared = both(first, *rest, shape.head)  # each is frozen in the policy or in the value model
    assert phases["rollout"]["operands"] == shared + forward(first)
    assert phases["scoring"]["operands"] == shared + forward(first) + forward(rest[0], score)
    assert phases["update"]["operands"] == shared + max(both(first), both(rest[0], score))
    side_by_side = make_plan(by_policy, by_value, None, replace(how, side_by_side=True)).phases
    assert side_by_side["update"]["operands"] == shared + both(first) + both(rest[0], score)
    # all weights trained: nothing is shared, and the reference rests in the update unless the loss needs it
    usual = work("float64")
    alone = make_plan(shape, None, None, usual).phases
    everything = (*shape.linears, shape.head)
    assert alone["scoring"]["operands"] == 2 * forward(*everything)
    assert alone["update"]["operands"] == both(*everything)
    with_reference = make_plan(shape, None, None, replace(usual, reference_in_steps=True)).phases
    assert with_reference["update"]["operands"] == both(*everything) + forward(*everything)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_caches_are_counted_to_the_byte(architecture: str) -> None:
    config, device = CONFIG_OF[architecture](), torch.device("cpu")
    grid, slots = GridCache(config, 5, CONTEXT, device), SlotCache(config, 5, CONTEXT, device)
    shape = model_shape(config, True)
    found = distinct([*grid.keys, *grid.values, *grid.value_scales])
    assert found == memory.cache_bytes(shape, work("float64", slots=5))
    assert distinct([*slots.keys, *slots.values]) == memory.cache_bytes(shape, work("native", slots=5))


def saved(architecture: str, mode: str, layers: int) -> int:
    """Bytes that the forward pass of a trunk keeps for its backward pass, parameters and tables left out."""
    return saved_bytes(make_policy(whole_model(resized(architecture, layers)), mode, CONTEXT))


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", [*FAMILIES, "qwen3_moe dense"])
def test_activations_of_a_layer_are_what_a_pass_keeps(architecture: str, mode: str) -> None:
    backend.use("float64" if mode == "deterministic" else "eager", 1)
    tokens, row = 3 * 29, 29
    found = saved(architecture, mode, 3) - saved(architecture, mode, 2)
    shape = model_shape(resized(architecture, 2), mode == "deterministic")
    how = work("float64" if mode == "deterministic" else "native")
    expected = memory.saved_bytes_per_layer(shape, tokens, row, shape.mixture)
    if mode == "deterministic" and architecture in {"qwen3", "qwen2", "llama", "mistral"}:
        assert found == expected
    elif mode == "deterministic":
        # two numbers of every head and query are kept outside autograd, and the order of the rows of experts; the check
        # that logits are finite lets go of them at once
        order = 16 * shape.mixture.per_token - 4 * shape.mixture.experts if shape.mixture else 0
        assert found == expected - (12 * shape.heads + order) * tokens
    else:
        # stock norms of Gemma keep 1 + weight too, whatever the tokens
        assert found == expected + (2 * 4 * shape.hidden if architecture == "gemma" else 0)
    recomputing = replace(how, recompute=True)
    deep = replace(shape, layers=32)
    assert memory.activation_bytes(deep, tokens, row, recomputing) < memory.activation_bytes(deep, tokens, row, how) / 4


def test_a_classifier_has_the_trunk_and_a_score() -> None:
    config = CONFIGS["llama"]()
    config.num_labels = 1
    with torch.device("meta"):
        real = LlamaForSequenceClassification(config)
    shape = as_classifier(model_shape(config, True), 1)
    assert shape.parameters == sum(p.numel() for p in real.parameters())


def test_the_tiny_model_is_planned_as_it_is_made() -> None:
    from ppo_repro.runs.prepare import prepare

    config = small_config("model.warm_start_steps=0")
    prepared = prepare(config, lambda step, total, loss: None)
    found = plan_run(config)
    # the tokenizer of this task needs all the tokens it may have
    assert len(prepared.task.tokenizer) == config.model.vocab_size  # type: ignore[union-attr]
    assert found.residents[0].weights == distinct(prepared.state.policy.parameters())
    assert found.residents[1].weights == distinct(prepared.state.value_model.parameters())


def config_only(folder: Path, architecture: str = "qwen3") -> Path:
    config = CONFIGS[architecture]()
    config.architectures = [CLASSES[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


def test_a_folder_with_nothing_but_its_config_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model={{kind: folder, path: {config_only(tmp_path)}}}"
    config = small_config(model)
    found = plan_run(config)
    assert [r.name for r in found.residents] == ["policy", "value model", "reference"]
    assert found.peak == memory.PROCESS + found.resident + max(sum(parts.values()) for parts in found.phases.values())
    assert _run(["plan", "tests/support/small.yaml", "--set", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report.as_json(found)
    assert _run(["plan", "tests/support/small.yaml", "--set", model]) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("policy", "value model", "reference", "peak", "mixed-precision"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_what_cannot_be_planned_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="there is no config"):
        plan_run(small_config(f"model={{kind: folder, path: {tmp_path}}}"))
    config_only(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["BertModel"]}))
    with pytest.raises(UserError, match="architecture BertModel; must be one of LlamaForCausalLM"):
        plan_run(small_config(f"model={{kind: folder, path: {tmp_path}}}"))
    assert _run(["plan", "tests/support/small.yaml", "--set", "layout.backend=eager"]) == 2
    assert "layout.backend = eager" in one_line(capsys.readouterr().err)


def test_smaller_pieces_of_work_need_less_and_the_same_stays() -> None:
    usual = plan_run(small_config())
    for override, phase in (
        ("layout.update_micro_batch=4", "update"),
        ("layout.forward_micro_batch=8", "scoring"),
        ("layout.rollout_slots=8", "rollout"),
        ("layout.gradient_checkpointing=true", "update"),
    ):
        found = plan_run(small_config(override))
        assert found.resident == usual.resident
        assert sum(found.phases[phase].values()) < sum(usual.phases[phase].values()), override


def test_arithmetic_needs_no_torch() -> None:
    code = "import sys, ppo_repro.plan.memory, ppo_repro.plan.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (252 * BILLION, "252.0 GB")])
def test_sizes_are_decimal(count: int, text: str) -> None:
    assert report.size(count) == text


@pytest.mark.parametrize("lora", ["null", "{rank: 2, alpha: 4.0}"])
def test_older_policies_are_counted_as_they_are_kept(lora: str) -> None:
    behind = small_config(
        f"lora={lora}", "mismatch.sampler.lag={kind: fixed, iterations: 9}", "model.warm_start_steps=0"
    )
    state = prepare(behind, lambda step, total, loss: None).state
    versions = state.versions_now()
    assert versions is not None
    one = sum(tensor.nbytes for tensor in versions.tensors().values())
    # a run of three iterations has two older policies at most; while they sample, the newest one waits beside them
    vocabulary = f"model.vocab_size={state.policy.config.vocab_size}"
    planned = plan_run(small_config(f"lora={lora}", "mismatch.sampler.lag={kind: fixed, iterations: 9}", vocabulary))
    found = {phase: amounts.get("older policies", 0) for phase, amounts in planned.phases.items()}
    assert found == {"loading": 0, "rollout": 3 * one, "scoring": 2 * one, "update": 2 * one}
    assert "older policies" not in str(plan_run(small_config()).phases)
