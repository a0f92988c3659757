"""Low-rank adapters: they start as the base, learn as in float64, and no layout of the work shows in them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.buffers import Coefficients, ReturnStatistics
from ppo_repro.errors import UserError
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.lora import Lora, add_lora, initial_a, linear_layers, share_frozen
from ppo_repro.models.lora_optimizer import make_lora_optimizer
from ppo_repro.models.networks import freeze, make_policy, make_value_model, policy_logits
from ppo_repro.models.state import TrainState
from ppo_repro.numerics import library
from ppo_repro.numerics.linear import linear
from ppo_repro.numerics.optimizer import SLOTS, AdamWSettings, OptimizerState, make_optimizer, weights_digest
from ppo_repro.numerics.rows import alone, slots_of
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.runs import checkpoint
from tests.support.lora import ALPHA, PROMPTS, RANK, RESPONSES, SETTINGS, adapted, learn
from tests.support.models import CONTEXT, FAMILIES, seeded, source_model, unequal

FROZEN = AdamWSettings(0.0, 0.9, 0.95, 1e-8, 0.01, 1.0)


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_start_is_the_base_to_the_bit(architecture: str, mode: str) -> None:
    source = source_model(architecture)
    with torch.no_grad():
        for parameter in source.parameters():
            if mode == "deterministic":
                parameter.view(-1)[::7] *= -0.0  # zeros of both signs
    policy = make_policy(source, mode, CONTEXT)
    before = weights_digest(policy.named_parameters())
    lora = add_lora(policy, RANK, ALPHA, (), seed=5)
    assert weights_digest(policy.named_parameters()) == before
    assert lora.layers.keys() == linear_layers(policy).keys() and len(lora.layers) >= 2 * 4


LAYOUTS = ((0, "right", 1), (3, "left", 2), (1, "none", 1), (4, "left", 2))  # micro-batch, padding, threads


def trained(architecture: str, mode: str, layout: tuple[int, str, int]) -> tuple[str, str]:
    """Digests of the merged weights and of the factors after three steps."""
    micro_batch, padding, threads = layout
    library.use_threads(threads)
    policy, lora, optimizer = adapted(architecture, mode)
    learn(policy, optimizer, mode, 3, micro_batch, padding)
    return weights_digest(policy.named_parameters()), weights_digest(lora.factors().items())


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gpt_neox", "gemma"])
def test_an_adapter_after_training_does_not_depend_on_the_layout(architecture: str) -> None:
    assert len({trained(architecture, "deterministic", layout) for layout in LAYOUTS}) == 1


@pytest.mark.usefixtures("row_dependent")
def test_a_native_adapter_after_training_depends_on_the_layout() -> None:
    assert len({trained("qwen3", "native", layout)[0] for layout in LAYOUTS[:3]}) == 3


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_frozen_weights_never_change_and_targets_do(architecture: str, mode: str) -> None:
    targets = ("q_proj", "down_proj") if architecture == "qwen3" else ("c_attn",)
    policy, lora, optimizer = adapted(architecture, mode, targets)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    learn(policy, optimizer, mode, 3)
    for name, parameter in policy.named_parameters():
        is_target = name.removesuffix(".weight") in lora.layers and name.endswith("weight")
        assert (unequal(parameter, before[name]) > 0) == is_target == parameter.requires_grad, name
        assert is_target or parameter.grad is None
    assert all(name.endswith(targets) for name in lora.layers)
    # control: a model that is trained whole changes everywhere
    whole = make_policy(source_model(architecture), mode, CONTEXT)
    learn(whole, make_optimizer(whole, SETTINGS, mode), mode, 3)
    assert all(unequal(p, before[name]) > 0 for name, p in whole.named_parameters())


def disagreements(mode: str) -> tuple[int, int]:
    """Of the tokens sampled after some steps: log-probs of the trainer that are not the sampler's, and all."""
    policy, _, optimizer = adapted("qwen3", mode)
    learn(policy, optimizer, mode, 2)
    engine = TorchEngine(policy, frozenset([1]), mode, CONTEXT, slots=4, prefill_chunk=3)
    requests = [Request(tuple(prompt), seed) for seed, prompt in enumerate(PROMPTS * 3)]
    completions = engine.generate(requests, Sampling(1.0, 0, 1.0, 12))
    batch = lay_out([r.prompt_ids for r in requests], [c.response_ids for c in completions], "left")
    with torch.no_grad():
        logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, mode)
    sampled = torch.cat([c.logprobs for c in completions])
    return unequal(logprobs, sampled), len(sampled)


@pytest.mark.usefixtures("row_dependent")
def test_sampler_and_trainer_agree_on_every_bit_after_training_an_adapter() -> None:
    differing, count = disagreements("deterministic")
    assert differing == 0 and count > 200
    assert disagreements("native")[0] > 10


def test_the_usual_form_of_an_adapter_rounds_otherwise_than_its_merged_weight() -> None:
    policy, lora, optimizer = adapted("qwen3", "deterministic")
    learn(policy, optimizer, "deterministic", 2)
    name, layer = next(iter(lora.layers.items()))
    x = torch.randn(50, layer.base.shape[1], generator=seeded(1))
    merged = linear(x, policy.get_submodule(name)).detach()
    usual = x @ layer.base.t() + (x @ layer.a.t()) @ layer.b.t() * lora.scale
    assert unequal(merged, usual) > len(x)
    # float32 sums of 48 products
    assert torch.allclose(merged, usual, rtol=0, atol=1e-4)


def adamw64(gradients: dict[str, Tensor], state: dict[str, list[Tensor]], t: int) -> float:
    """One AdamW step from its definition on float64 (parameter, first, second); returns the global norm."""
    s = SETTINGS
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    for name, (p, first, second) in state.items():
        g = gradients[name] * min(1.0, s.max_grad_norm / (norm + 1e-6))
        first.mul_(s.beta1).add_((1 - s.beta1) * g)
        second.mul_(s.beta2).add_((1 - s.beta2) * g * g)
        p.mul_(1 - s.learning_rate * s.weight_decay)
        p.sub_(s.learning_rate * (first / (1 - s.beta1**t)) / ((second / (1 - s.beta2**t)).sqrt() + s.eps))
    return norm


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_a_step_is_adamw_on_the_factors_and_nothing_else(mode: str) -> None:
    """With gradients of W' that are given, so that only the way down to the factors and the step are looked at."""
    policy, lora, optimizer = adapted("llama", mode, ("o_proj",))
    state = {
        n: [p.double(), torch.zeros(p.shape).double(), torch.zeros(p.shape).double()] for n, p in lora.factors().items()
    }
    for t, factor in enumerate((1.0, 30.0, 0.1), 1):
        fixed = {n: torch.randn(x.base.shape, generator=seeded(t)) * factor for n, x in lora.layers.items()}

        def backward(fixed: dict[str, Tensor] = fixed) -> None:
            for name, gradient in fixed.items():
                layer = policy.get_submodule(name)
                # y = I W'^T: the gradient of W' is the transposed gradient of y
                x, count = torch.eye(gradient.shape[1]), gradient.shape[1]
                rows = alone(count, slots_of(range(count), count, SLOTS))
                y = linear(x, layer, rows) if mode == "deterministic" else layer(x)
                torch.autograd.backward(y, gradient.t())

        report = optimizer.step(backward)
        gradients = {}
        for name, gradient in fixed.items():
            a, b = (state[f"{name}.lora_{which}.weight"][0] for which in "AB")
            gradients[f"{name}.lora_A.weight"] = lora.scale * b.t() @ gradient.double()
            gradients[f"{name}.lora_B.weight"] = lora.scale * gradient.double() @ a.t()
        assert report.grad_norm == pytest.approx(adamw64(gradients, state, t), rel=1e-5)
    for name, factor in lora.factors().items():
        # three steps of 2e-2 whose gradients agree to 1e-5 of the largest: the smallest are off by more of themselves
        assert torch.allclose(factor.double(), state[name][0], rtol=0, atol=2e-4), name
        assert (factor.double() - state[name][0]).norm() < 1e-4 * state[name][0].norm()
    for name, layer in lora.layers.items():
        a, b = (lora.factors()[f"{name}.lora_{which}.weight"].double() for which in "AB")
        # float32 weights near 1
        assert torch.allclose(layer.weight.double(), layer.base.double() + lora.scale * b @ a, rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_a_learning_rate_of_zero_changes_no_bit(mode: str) -> None:
    policy, lora, optimizer = adapted("qwen3", mode, settings=FROZEN)
    before = weights_digest(policy.named_parameters()), weights_digest(lora.factors().items())
    learn(policy, optimizer, mode, 2)
    assert (weights_digest(policy.named_parameters()), weights_digest(lora.factors().items())) == before


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_going_on_from_a_state_is_going_on(mode: str) -> None:
    policy, lora, optimizer = adapted("qwen3", mode)
    learn(policy, optimizer, mode, 2)
    held = optimizer.state()
    saved = OptimizerState(
        *({n: x.clone() for n, x in part.items()} for part in (held.first, held.second)),
        dict(held.steps), {n: x.clone() for n, x in held.factors.items()},
    )  # fmt: skip
    learn(policy, optimizer, mode, 1)
    other, other_lora, other_optimizer = adapted("qwen3", mode)
    other_optimizer.load(saved)
    learn(other, other_optimizer, mode, 1)
    assert weights_digest(other.named_parameters()) == weights_digest(policy.named_parameters())
    assert weights_digest(other_lora.factors().items()) == weights_digest(lora.factors().items())
    # control: without the moments the next step is another one
    third, third_lora, third_optimizer = adapted("qwen3", mode)
    for name, factor in third_lora.factors().items():
        factor.copy_(saved.factors[name])
    third_lora.merge()
    learn(third, third_optimizer, mode, 1)
    assert weights_digest(third.named_parameters()) != weights_digest(policy.named_parameters())


CONTROLS = Coefficients(0.05, 0.0, 0.0, ReturnStatistics())


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_a_checkpoint_holds_all_of_an_adapter(mode: str, tmp_path: Path) -> None:
    def fresh() -> tuple[TrainState, Lora]:
        policy, lora, optimizer = adapted("qwen3", mode)
        source = source_model("qwen3")
        value_model = make_value_model(source, mode, CONTEXT, 0)
        of_values = make_optimizer(value_model, SETTINGS, mode)
        return TrainState(
            policy, value_model, freeze(make_policy(source, mode, CONTEXT)), optimizer, of_values, CONTROLS
        ), lora

    state, lora = fresh()
    learn(state.policy, state.policy_optimizer, mode, 2)
    state.iteration = 1
    digest = checkpoint.save(checkpoint.take(state, "chain", "task"), tmp_path / "saved")
    other, other_lora = fresh()
    checkpoint.restore(checkpoint.load(tmp_path / "saved", digest), other)
    assert weights_digest(other_lora.factors().items()) == weights_digest(lora.factors().items())
    for s in (state, other):
        learn(s.policy, s.policy_optimizer, mode, 1)
    assert weights_digest(other.policy.named_parameters()) == weights_digest(state.policy.named_parameters())
    assert weights_digest(other_lora.factors().items()) == weights_digest(lora.factors().items())


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_a_state_of_something_else_is_refused(mode: str) -> None:
    policy, _, optimizer = adapted("qwen3", mode, ("q_proj",))
    learn(policy, optimizer, mode, 1)
    of_q = optimizer.state()
    with pytest.raises(ValueError, match=r"adapter|one side"):
        adapted("qwen3", mode, ("v_proj",))[2].load(of_q)
    whole = make_optimizer(make_policy(source_model("qwen3"), mode, CONTEXT), SETTINGS, mode)
    with pytest.raises(ValueError, match=r"adapter|module"):
        whole.load(of_q)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "qproj"), r"'qproj' names no layer that can be adapted; choose from down_proj, gate_proj"),
        (("lm_head",), "'lm_head' names no layer"),
        (("embed_tokens",), "'embed_tokens' names no layer"),
        (("proj",), "'proj' names no layer"),
    ],
)
def test_a_target_that_matches_nothing_is_named(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        adapted("qwen2", "deterministic", targets)


def test_targets_are_ends_of_names_at_a_dot() -> None:
    assert len(adapted("qwen3", "deterministic", ("q_proj",))[1].layers) == 2
    assert list(adapted("qwen3", "deterministic", ("0.self_attn.q_proj",))[1].layers) == [
        "model.layers.0.self_attn.q_proj"
    ]
    assert adapted("gpt2", "deterministic")[1].target_modules == ("c_attn", "c_fc", "c_proj")
    assert adapted("gpt_neox", "native")[1].target_modules == (
        "dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value",
    )  # fmt: skip


def test_the_draws_of_a_are_uniform_and_a_function_of_seed_and_name() -> None:
    rank, columns = 64, 100
    a = initial_a(rank, columns, 0, "layer")
    edge = 1.0 / math.sqrt(columns)
    assert float(a.abs().max()) < edge
    # 6400 draws: the largest gap between a sample's distribution function and the true one is above 1.95 / sqrt(n) in
    # one of a thousand samples (Kolmogorov); this sample is always the same
    ordered = np.sort(a.double().numpy().reshape(-1))
    expected = (ordered + edge) / (2 * edge)
    assert np.abs(expected - np.arange(a.numel()) / a.numel()).max() < 1.95 / math.sqrt(a.numel())
    assert unequal(a, initial_a(rank, columns, 0, "layer")) == 0
    assert unequal(a, initial_a(rank, columns, 1, "layer")) > 6000
    assert unequal(a, initial_a(rank, columns, 0, "other")) > 6000


def storages(*tensors: Tensor) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_what_is_not_trained_is_the_reference_s_own(architecture: str, mode: str) -> None:
    """Shared or copied, the same bits are trained; only the trained matrices and factors are the policy's own."""
    targets = ("q_proj", "up_proj") if architecture == "qwen3" else ("c_attn",)
    digests = []
    for shared in (False, True):
        policy, reference = (make_policy(source_model(architecture), mode, CONTEXT) for _ in range(2))
        freeze(reference)
        before = weights_digest(reference.named_parameters())
        lora = add_lora(policy, RANK, ALPHA, targets, seed=5)
        if shared:
            lora = share_frozen(policy, reference, lora)
        learn(policy, make_lora_optimizer(policy, lora, SETTINGS, mode), mode, 3)
        assert weights_digest(reference.named_parameters()) == before
        digests.append((weights_digest(policy.named_parameters()), weights_digest(lora.factors().items())))
    assert digests[0] == digests[1] and digests[0][0] != before
    own = storages(*policy.parameters()) - storages(*reference.parameters())
    assert own == storages(*(layer.weight for layer in lora.layers.values()))
    assert storages(*(layer.base for layer in lora.layers.values())) <= storages(*reference.parameters())
    assert [n for n, _ in policy.named_parameters()] == [n for n, _ in reference.named_parameters()]


def test_a_pass_of_the_reference_between_forward_and_backward_changes_nothing() -> None:
    """Queries, keys and values are one matrix of the kernels; here only the queries are trained."""
    digests = []
    for shared in (False, True):
        policy, reference = (make_policy(source_model("qwen3"), "deterministic", CONTEXT) for _ in range(2))
        lora = add_lora(policy, RANK, ALPHA, ("q_proj",), seed=5)
        if shared:
            lora = share_frozen(policy, freeze(reference), lora)
        optimizer = make_lora_optimizer(policy, lora, SETTINGS, "deterministic")
        batch = lay_out(PROMPTS, RESPONSES, slots=slots_of(range(len(PROMPTS)), len(PROMPTS), SLOTS))

        def backward(
            policy: PreTrainedModel = policy, reference: PreTrainedModel = reference, batch: TokenBatch = batch
        ) -> None:
            logits = policy_logits(policy, batch)
            with torch.no_grad():
                policy_logits(reference, batch)
            torch.autograd.backward(logits, torch.ones_like(logits) / 100)

        optimizer.step(backward)
        digests.append(weights_digest(policy.named_parameters()))
    assert digests[0] == digests[1] != weights_digest(reference.named_parameters())
