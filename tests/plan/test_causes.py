"""The memory plan of causes of a mismatch, byte for byte beside what real models and optimizers hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ppo_repro.config.mismatch import SamplerPrecision
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.models.precision import precision_of
from ppo_repro.numerics import backend
from ppo_repro.numerics.layers.kv_cache import SlotCache
from ppo_repro.numerics.layers.rounded import round_model
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.optimizer import make_optimizer
from ppo_repro.plan import memory
from ppo_repro.plan.causes import Causes
from ppo_repro.plan.phases import make_plan
from ppo_repro.plan.report import lines
from ppo_repro.plan.shapes import _NATIVE, _rounding, model_shape, plan_run
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.stock_engine import in_dtype
from ppo_repro.runs.prepare import Prepared, prepare
from tests.support.models import CONTEXT, ragged, source_model
from tests.support.plans import (
    CONFIG_OF,
    SETTINGS,
    distinct,
    held_copies,
    held_operands,
    resized,
    saved_bytes,
    take_a_step,
    whole_model,
    work,
)
from tests.support.runs import small_config

ROUNDED = ("qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "mixtral", "olmoe")
OTHERS = ("gpt2", "gpt_neox", "gemma")  # which nothing rounds, but torch may compute
# those that share layers with these wait for the slow tests
QUICK = ("qwen3", "qwen3_moe")
SLOW = [pytest.param(a, marks=pytest.mark.slow) for a in ROUNDED if a not in QUICK]
PRECISIONS = {
    "16 bits": {"weights": "bfloat16", "activations": "bfloat16", "logits": "bfloat16"},
    "16 bits of weights": {"weights": "float16"},
    "8 bits": {"weights": "int8", "activations": "int8"},
    "8 bits and 16": {"weights": "float8_e4m3", "activations": "float8_e4m3", "rest": "bfloat16"},
    "cache": {"kv_cache": "int8"},
    "logits": {"logits": "bfloat16"},
}
STOCK = {"bfloat16": 2, "float16": 2, "float32": 4}


def precision(name: str) -> SamplerPrecision:
    return SamplerPrecision(**PRECISIONS[name])


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("architecture", ["qwen3", "mixtral"])
def test_rounded_weights_are_counted_to_the_byte(architecture: str, name: str) -> None:
    backend.use("float64", 1)
    policy = round_model(make_policy(source_model(architecture), "exact", CONTEXT), precision_of(precision(name)), "")
    batch = lay_out(*ragged(4, 0), "right")

    def logprobs() -> Tensor:
        return token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "exact")[0]

    optimizer = make_optimizer(policy, SETTINGS, "exact")
    take_a_step(policy, logprobs, optimizer, batch.real_tokens)
    optimizer.accumulator.begin()  # type: ignore[union-attr]
    torch.autograd.backward(logprobs().sum())
    rounding = _rounding(precision(name))
    shape = model_shape(CONFIG_OF[architecture](), True)
    how = work("float64", causes=Causes(trainer=rounding))
    planned = make_plan(shape, None, None, how)
    assert held_operands(policy) + held_copies(policy) == planned.residents[0].operands
    # by hand: all matrices, those of attention and MLP, or none
    matrices = sum(m.size for m in shape.linears)
    routers = sum(m.size for m in shape.linears if m.by_rest)
    layers = 0 if precision(name).weights == "float32" else matrices - routers
    others = routers + shape.head.size if name in ("16 bits", "16 bits of weights", "8 bits and 16") else 0
    assert held_copies(policy) == 4 * (layers + others)
    unrounded = make_plan(shape, None, None, work("float64")).phases["update"]
    found = planned.phases["update"]
    experts = "operands of experts"
    extra = sum(found.get(part, 0) - unrounded.get(part, 0) for part in ("operands", experts))
    assert extra == held_copies(policy)


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("architecture", [*QUICK, *SLOW])
def test_layers_that_round_keep_what_was_planned(architecture: str, name: str) -> None:
    backend.use("float64", 1)

    def saved(layers: int) -> int:
        policy = make_policy(whole_model(resized(architecture, layers)), "exact", CONTEXT)
        round_model(policy, precision_of(precision(name)), "")
        return saved_bytes(policy)

    tokens, row = 3 * 29, 29
    shape = _rounding(precision(name)).marked(model_shape(resized(architecture, 2), True))
    expected = memory.saved_bytes_per_layer(shape, tokens, row, shape.mixture)
    # kept outside autograd, or let go of at once: see test_plan
    outside = 12 * shape.heads
    outside += 16 * shape.mixture.per_token - 4 * shape.mixture.experts if shape.mixture else 0
    if name == "logits" and shape.mixture is None:  # whole kernels keep those numbers themselves
        outside = 0
    assert saved(3) - saved(2) == expected - outside * tokens


@pytest.mark.parametrize("dtype", STOCK)
@pytest.mark.parametrize("architecture", [*QUICK, *SLOW, *OTHERS])
def test_what_torch_keeps_in_a_dtype_is_what_was_planned(architecture: str, dtype: str) -> None:
    backend.use("eager", 1)

    def saved(layers: int) -> int:
        return saved_bytes(
            in_dtype(make_policy(whole_model(resized(architecture, layers)), "native", CONTEXT), getattr(torch, dtype))
        )

    shape = model_shape(resized(architecture, 2), False)
    shape = replace(shape, saved=replace(shape.saved, number=STOCK[dtype]))
    expected = memory.saved_bytes_per_layer(shape, 3 * 29, 29, shape.mixture)
    # stock norms of Gemma keep 1 + weight too, in float32 and whatever the tokens
    expected += 2 * 4 * shape.hidden if architecture == "gemma" else 0
    if shape.mixture is not None and architecture != "mixtral":  # routing weights are planned in float32
        expected -= (4 - STOCK[dtype]) * shape.mixture.per_token * 3 * 29
    assert saved(3) - saved(2) == expected


def of_run(*overrides: str) -> Prepared:
    return prepare(small_config("model.warm_start_steps=0", *overrides), lambda step, total, loss: None)


def planned_for(prepared: Prepared, *overrides: str) -> memory.Plan:
    """The plan of the run, with the vocabulary that it has."""
    size = prepared.state.policy.config.vocab_size
    return plan_run(small_config(*overrides, f"model.vocab_size={size}"))


def sample(prepared: Prepared) -> None:
    requests = [Request(prompt_ids=(3, 4, 5), seed=1)]
    prepared.engine.generate(requests, Sampling(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=4))


@pytest.mark.parametrize("name", ["16 bits", "8 bits", "logits"])
def test_a_sampler_that_rounds_has_operands_of_its_own_while_it_samples(name: str) -> None:
    backend.use("float64", 1)
    formats = ", ".join(f"{field}: {form}" for field, form in PRECISIONS[name].items())
    rounds = f"mismatch.sampler.precision={{{formats}}}"
    prepared = of_run(rounds, "layout.backend=float64")
    state, sampler = prepared.state, prepared.state.sampler
    assert sampler is prepared.engine.policy is not state.policy
    assert distinct([*sampler.parameters(), *state.policy.parameters()]) == distinct(state.policy.parameters())
    sample(prepared)
    held = held_operands(sampler) + held_copies(sampler)
    phases = planned_for(prepared, rounds, "layout.backend=float64").phases
    assert (held, held_operands(state.policy)) == (phases["rollout"]["operands"], 0)
    state.rest_sampler()
    assert held_operands(sampler) == held_copies(sampler) == 0
    without = planned_for(prepared, "layout.backend=float64").phases
    assert phases["rollout"]["operands"] - without["rollout"]["operands"] == held_before_rounding(name, prepared)
    assert (phases["scoring"], phases["update"]) == (without["scoring"], without["update"])


def held_before_rounding(name: str, prepared: Prepared) -> int:
    """The copies alone: a sampler that rounds nothing has as many operands."""
    sizes = {
        path: module.weight.nbytes  # type: ignore[union-attr]
        for path, module in prepared.state.policy.named_modules()
        if path.endswith(("_proj", "lm_head"))
    }
    head = sizes.pop("lm_head")
    return {"16 bits": sum(sizes.values()) + head, "8 bits": sum(sizes.values()), "logits": 0}[name]


@pytest.mark.parametrize("dtype", STOCK)
def test_a_copy_of_torch_is_counted_to_the_byte(dtype: str) -> None:
    backend.use("float64", 1)
    stock = (f"mismatch.sampler.stock={dtype}", "layout.backend=float64")
    prepared = of_run(*stock)
    state = prepared.state
    assert state.sampler is prepared.engine.policy
    plan = planned_for(prepared, *stock)
    copies = {r.name: r.weights for r in plan.residents if r.name.endswith("copy")}
    assert copies == {"sampler's copy": distinct(state.sampler.parameters())}
    assert set(copies.values()) == {STOCK[dtype] * sum(p.numel() for p in state.policy.parameters())}
    sample(prepared)
    assert held_operands(state.policy) == 0 == plan.phases["rollout"]["operands"]
    cache = SlotCache(state.policy.config, 5, CONTEXT, torch.device("cpu"), getattr(torch, dtype))
    shape, own = model_shape(state.policy.config, True), Causes(sampler_stock=STOCK[dtype])
    assert distinct([*cache.keys, *cache.values]) == memory.cache_bytes(shape, work("float64", slots=5, causes=own))


def test_the_table_of_a_run_without_causes_has_none() -> None:
    plan = plan_run(small_config())
    assert "copy" not in "\n".join(lines(plan)) and plan.work.causes == Causes()
    assert _NATIVE["llama"].number == 4 and model_shape(CONFIG_OF["llama"](), True).saved.number == 0
