"""The load-balancing loss in a run: one result in every layout, its gradient beside float64, what is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from ppo_repro.errors import UserError
from ppo_repro.numerics import backend
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.experts import chosen_experts
from ppo_repro.numerics.layers.lowering import attach, lower
from ppo_repro.numerics.layers.routes import give_balances, routers
from ppo_repro.ppo.balancing import Balance
from ppo_repro.runs.summary import summarise
from ppo_repro.testing.small_models import olmoe_config, small_model
from tests.support.mixtures import LAYOUT, config_of, record, reference
from tests.support.models import CONTEXT, seeded, unequal

COEFFICIENT = "ppo.load_balancing_coef=0.3"
SHORT = ("ppo.iterations=1", "numerics.accuracy_sequences=0")


def fingerprint(folder: Path, *more: str) -> str:
    return summarise(record(folder, "qwen3_moe", *SHORT, *more)).fingerprint


@pytest.mark.slow
def test_a_run_with_it_has_one_fingerprint_in_two_layouts_and_another_without(tmp_path: Path) -> None:
    with_it = fingerprint(tmp_path / "one", COEFFICIENT)
    assert fingerprint(tmp_path / "other", COEFFICIENT, *LAYOUT) == with_it
    assert fingerprint(tmp_path / "without") != with_it, "a loss that does nothing would pass this test"


@pytest.mark.parametrize("kernels", ["eager", "float64"])
def test_gradients_with_it_are_those_of_float64_and_padding_has_none(kernels: str) -> None:
    backend.use(kernels, 1)
    k, tokens, weight = 2, 9, 0.7
    source = small_model(olmoe_config(num_experts=6, num_experts_per_tok=k, norm_topk_prob=True), 4)
    block = copy.deepcopy(source.model.layers[0].mlp).double()
    model = lower(source, CONTEXT)
    mixture = model.model.layers[0].mlp
    x, seed = (torch.randn(tokens + 2, 48, generator=seeded(n)) for n in (5, 6))
    is_real, seed[tokens:] = torch.arange(tokens + 2) < tokens, 0.0  # two of padding, which no loss sees
    wide = x[:tokens].double().requires_grad_()
    logits = wide @ block.gate.weight.t()
    counts = chosen_experts(logits.detach().float(), k).flatten().bincount(minlength=6)
    balance = Balance(counts, tokens, weight)
    parameters = block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj
    loss = (reference(wide, *parameters, k, True) * seed[:tokens].double()).sum()
    loss = loss + weight * 6 * ((counts.double() / tokens) * logits.softmax(-1).mean(0)).sum()
    loss.backward()

    def gradients(balances: list[Balance]) -> tuple[torch.Tensor, torch.Tensor]:
        accumulator = GradientAccumulator(model.named_parameters())
        attach(model, accumulator)
        give_balances(model, balances, is_real)
        for _ in range(2):
            accumulator.begin()
            narrow = x.clone().requires_grad_()
            mixture(narrow).backward(seed)
            found = accumulator.finish()
        assert found is not None and narrow.grad is not None
        return found["model.layers.0.mlp.gate.weight"], narrow.grad

    of_gate, of_inputs = gradients([balance] * len(routers(model)))
    assert wide.grad is not None and block.gate.weight.grad is not None
    for got, want in ((of_gate, block.gate.weight.grad), (of_inputs[:tokens], wide.grad)):
        error = float((got.double() - want).norm() / want.norm())
        assert error < 2e-6, "a few roundings to float32 one after another"
    assert not of_inputs[tokens:].any()
    assert unequal(gradients([])[0], of_gate) > 0.9 * of_gate.numel(), "without it the gate has another gradient"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.experts=null"], "needs a mixture of experts"),
        (["numerics.mode=native", "numerics.accuracy_sequences=0"], "needs numerics.mode = exact"),
    ],
)
def test_a_run_that_cannot_have_it_is_refused(more: list[str], message: str) -> None:
    with pytest.raises(UserError, match=rf"ppo\.load_balancing_coef {message}") as caught:
        config_of("mixtral", COEFFICIENT, *more)
    assert "\n" not in str(caught.value)
