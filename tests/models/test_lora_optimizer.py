"""Steps on the factors of an adapter: AdamW on gradients that come from those of the merged weights."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

from ppo_repro.models.lora import AdaptedLayer, Lora
from ppo_repro.models.lora_optimizer import DeterministicLoraOptimizer, make_lora_optimizer
from ppo_repro.numerics.optimizer import AdamW, AdamWSettings, weights_digest

SETTINGS = AdamWSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0)
N, K, RANK = 4, 6, 2
GRADIENTS = {"adapted": torch.arange(24.0).view(N, K) - 11, "head": torch.tensor([[1.0, -2.0, 0.5, 4.0]])}


def adapted() -> tuple[nn.ModuleDict, Lora]:
    model = nn.ModuleDict({"adapted": nn.Linear(K, N, bias=False), "head": nn.Linear(N, 1, bias=False)})
    weight, head = (model[name].get_parameter("weight") for name in ("adapted", "head"))
    with torch.no_grad():
        weight.copy_(torch.arange(24.0).view(N, K) / 16)
        head.fill_(0.25)
    a, b = torch.arange(12.0).view(RANK, K) / 8, torch.ones(N, RANK)
    layer = AdaptedLayer(weight, weight.detach().clone(), a, b, False)
    lora = Lora(RANK, 4.0, ("adapted",), {"adapted": layer}, False, {"head.weight": head})
    lora.merge()
    return model, lora


def step(optimizer: DeterministicLoraOptimizer, model: nn.ModuleDict) -> float:
    def backward() -> None:
        for name, gradient in GRADIENTS.items():
            weight = model[name].get_parameter("weight")
            use = optimizer.sums.use("linear", weight)
            with use.adding([7, 8]) as sums:
                numbers = (ctypes.c_float * weight.numel()).from_address(sums.level[0] + 4 * use.offset(weight))
                numbers[:] = gradient.flatten().tolist()

    return optimizer.step(backward).grad_norm


def test_a_step_is_adamw_on_the_gradients_of_the_factors() -> None:
    model, lora = adapted()
    begun = {name: tensor.detach().clone() for name, tensor in lora.trained().items()}
    expected = AdamW({name: tensor.clone() for name, tensor in begun.items()})
    gradients = {**lora.factor_gradients(GRADIENTS.__getitem__), "head.weight": GRADIENTS["head"]}
    norm = expected.apply(SETTINGS, {name: gradient.contiguous() for name, gradient in gradients.items()})
    optimizer = make_lora_optimizer(model, lora, SETTINGS, "deterministic")
    assert isinstance(optimizer, DeterministicLoraOptimizer)
    assert step(optimizer, model) == norm
    for name, tensor in lora.trained().items():
        assert torch.equal(tensor, expected.parameters[name]) and not torch.equal(tensor, begun[name])
    layer = lora.layers["adapted"]
    assert torch.equal(layer.weight, layer.base + (layer.b @ layer.a) * 2.0)


def test_an_adapter_goes_on_from_the_state() -> None:
    digests = []
    for cut in (False, True):
        model, lora = adapted()
        optimizer = DeterministicLoraOptimizer(model, lora, SETTINGS, 8)
        step(optimizer, model)
        if cut:
            state, head = optimizer.state(), lora.whole["head.weight"].detach()
            model, lora = adapted()
            with torch.no_grad():
                lora.whole["head.weight"].copy_(head)
            optimizer = DeterministicLoraOptimizer(model, lora, SETTINGS, 8)
            optimizer.load(state)
        step(optimizer, model)
        digests.append(weights_digest(model.named_parameters()))
    assert digests[0] == digests[1]


def test_the_state_of_full_training_is_refused() -> None:
    model, lora = adapted()
    full = AdamW(dict(model.named_parameters())).state()
    with pytest.raises(ValueError, match=r"on one side only: adapted\.lora_A\.weight, adapted\.lora_B\.weight"):
        DeterministicLoraOptimizer(model, lora, SETTINGS, 8).load(full)
