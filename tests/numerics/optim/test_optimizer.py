"""One optimizer step: AdamW against its definition, redone steps, and steps that change no weight."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ppo_repro.errors import NumericsError, PromiseBroken
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.optimizer import AdamWSettings, ExactOptimizer, make_optimizer, weights_digest
from tests.support.models import CONTEXT, ragged, seeded, source_model, unequal
from tests.support.optimizer import backward_of, linear_model

SETTINGS = AdamWSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0)
FROZEN = AdamWSettings(0.0, 0.9, 0.95, 1e-8, 0.1, 1.0)


def test_adamw_is_its_definition_in_float64() -> None:
    model, factors = linear_model(), (1.0, 3.0, 0.01, 0.5, 40.0)
    optimizer = ExactOptimizer(model, SETTINGS)
    reference = nn.Linear(6, 4).double()
    reference.load_state_dict({name: p.double() for name, p in model.named_parameters()})
    first = {n: torch.zeros_like(p) for n, p in reference.named_parameters()}
    second = {n: torch.zeros_like(p) for n, p in reference.named_parameters()}
    x = torch.randn(20, 6, generator=seeded(7)).double()
    target = torch.randn(20, 4, generator=seeded(8)).double()
    for t, factor in enumerate(factors, 1):
        report = optimizer.step(backward_of(model, factor), 20)
        error = (reference(x) - target).detach() * factor
        gradients = {"weight": error.t() @ x, "bias": error.sum(0)}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        # float32 forward, and operands of 22 to 27 bits
        assert report.grad_norm == pytest.approx(norm, rel=1e-6)
        with torch.no_grad():
            for name, p in reference.named_parameters():
                g = gradients[name] * min(1.0, SETTINGS.max_grad_norm / (norm + 1e-6))
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.95 * second[name] + 0.05 * g * g
                p *= 1 - 1e-2 * 0.1
                p -= 1e-2 * (first[name] / (1 - 0.9**t)) / ((second[name] / (1 - 0.95**t)).sqrt() + 1e-8)
    for name, p in model.named_parameters():
        # steps of 1e-2 whose gradients agree to 1e-5; float32 weights near 1 add 1e-7 per step
        assert torch.allclose(p.double(), dict(reference.named_parameters())[name], rtol=0, atol=3e-6), name
        assert not torch.allclose(p.double(), linear_model().get_parameter(name).double(), rtol=0, atol=1e-3)


def test_exact_and_native_steps_agree_closely() -> None:
    weights: dict[str, Tensor] = {}
    for mode in ("deterministic", "native"):
        model = linear_model() if mode == "deterministic" else nn.Linear(6, 4)
        model.load_state_dict(linear_model().state_dict())
        optimizer = make_optimizer(model, SETTINGS, mode)
        for factor in (1.0, 5.0, 0.1):
            optimizer.step(backward_of(model, factor), 20)
        weights[mode] = model.weight.detach()
    # two float32 implementations of the same three steps of 1e-2
    assert torch.allclose(weights["exact"], weights["native"], rtol=0, atol=3e-6)


def run_policy(settings: AdamWSettings, steps: int) -> tuple[nn.Module, list[int]]:
    policy = make_policy(source_model("qwen3"), "exact", CONTEXT)
    optimizer = ExactOptimizer(policy, settings)
    batch = lay_out(*ragged(6, 0), "right")

    def backward() -> None:
        logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "exact")
        torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / len(logprobs)))

    return policy, [optimizer.step(backward, batch.real_tokens).redos for _ in range(steps)]


def test_a_learning_rate_of_zero_changes_no_bit_and_another_does() -> None:
    before = weights_digest(make_policy(source_model("qwen3"), "exact", CONTEXT).named_parameters())
    assert weights_digest(run_policy(FROZEN, 3)[0].named_parameters()) == before
    assert weights_digest(run_policy(SETTINGS, 1)[0].named_parameters()) != before


def test_only_the_first_step_calibrates() -> None:
    assert run_policy(FROZEN, 3)[1] == [1, 0, 0]


def gradients_of(optimizer: ExactOptimizer) -> list[torch.Tensor]:
    """What the last step left in the memory of the sums: float32 gradients in the first half."""
    memory = [optimizer.accumulator._sums_memory[name] for name in optimizer.accumulator.parameters]
    return [sums.view(-1).view(torch.float32)[: sums.numel()] for sums in memory]


@pytest.mark.parametrize("grid", [-60, -20, 90])
@pytest.mark.parametrize("factor", [2.0**30, 2.0**-30])
def test_a_spike_is_redone_with_the_same_result_as_from_any_other_grid(grid: int, factor: float) -> None:
    spiked, direct, calls = linear_model(), linear_model(), []
    optimizer = ExactOptimizer(spiked, FROZEN)
    assert optimizer.step(backward_of(spiked, 1.0), 20).redos == 1
    assert optimizer.step(backward_of(spiked, factor, calls), 20).redos == 1
    assert calls == [factor, factor]
    other = ExactOptimizer(direct, FROZEN)
    other.accumulator.grids = {"weight": grid, "bias": grid}
    assert other.step(backward_of(direct, factor), 20).redos == 1
    assert other.accumulator.grids == optimizer.accumulator.grids
    for after_spike, direct_sums in zip(gradients_of(optimizer), gradients_of(other), strict=True):
        assert unequal(after_spike, direct_sums) == 0 and after_spike.abs().amax() > 0


def test_a_change_inside_the_window_is_not_redone() -> None:
    model = linear_model()
    optimizer = ExactOptimizer(model, FROZEN)
    optimizer.step(backward_of(model, 1.0), 20)
    assert [optimizer.step(backward_of(model, f), 20).redos for f in (8.0, 1.0, 8.0, 64.0, 4.0)] == [0] * 5
    assert optimizer.step(backward_of(model, 64.0), 20).redos == 1


def test_a_backward_pass_that_never_repeats_is_an_error() -> None:
    model = linear_model()
    optimizer = ExactOptimizer(model, FROZEN)
    factors = iter(2.0 ** (20 * (i % 2)) for i in range(100))
    with pytest.raises(PromiseBroken, match="not reproducible"):
        optimizer.step(lambda: backward_of(model, next(factors))(), 20)


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_a_gradient_that_is_not_finite_changes_no_weight(mode: str) -> None:
    model = linear_model() if mode == "deterministic" else nn.Linear(6, 4)
    optimizer = make_optimizer(model, SETTINGS, mode)
    before = weights_digest(model.named_parameters())
    with pytest.raises(NumericsError, match="not finite"):
        optimizer.step(backward_of(model, math.inf), 20)
    assert weights_digest(model.named_parameters()) == before


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_a_replaced_learning_rate_takes_effect(mode: str) -> None:
    model = linear_model() if mode == "deterministic" else nn.Linear(6, 4)
    optimizer = make_optimizer(model, SETTINGS, mode)
    optimizer.step(backward_of(model, 1.0), 20)
    before = model.weight.detach().clone()
    optimizer.settings = FROZEN
    optimizer.step(backward_of(model, 1.0), 20)
    assert unequal(model.weight, before) == 0


def test_the_digest_depends_on_names_bits_and_order() -> None:
    a, b = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    cases = [[("w", a)], [("w", b)], [("v", a)], [("w", a), ("v", b)], [("v", b), ("w", a)]]
    assert len({weights_digest(case) for case in cases}) == len(cases)
    assert weights_digest([("w", a)]) == weights_digest([("w", a.clone())])


def test_a_weight_changed_in_any_way_is_quantised_anew() -> None:
    x = torch.randn(5, 6, generator=seeded(0))
    layer = linear_model()
    old = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    assert unequal(layer(x) - layer.bias, (old - layer.bias)) > 0
    layer = linear_model()
    old = layer(x)
    layer.weight.data = linear_model(5).weight.data
    layer.bias.data = linear_model(5).bias.data
    assert unequal(layer(x), linear_model(5)(x)) == 0
    layer.load_state_dict(linear_model(9).state_dict(), assign=True)
    assert unequal(layer(x), linear_model(9)(x)) == 0
