"""Adapters against the real peft: its folder format, its gradients in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.adapter_folder import TENSORS_NAME, save_adapter
from ppo_repro.models.lora import Lora, add_lora
from ppo_repro.models.lora_optimizer import DeterministicLoraOptimizer, make_lora_optimizer
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.optimizer import SLOTS
from ppo_repro.numerics.rows import slots_of
from ppo_repro.numerics.token_statistics import token_statistics
from tests.support.lora import ALPHA, RANK, SETTINGS, adapted, learn
from tests.support.models import CONTEXT, lay_out, ragged, seeded, source_model, unequal

FAMILIES = ("qwen3", "gpt2", "gpt_neox")


def randomise(lora: Lora) -> None:
    """Factors far from the start, the merged weights with them."""
    for seed, (name, factor) in enumerate(lora.factors().items()):
        spread = 0.1 if name.endswith("lora_B.weight") else factor.shape[1] ** -0.5
        factor.copy_(torch.randn(factor.shape, generator=seeded(seed)) * spread)
    lora.merge()


def close_to_merged(lora: Lora, weights: dict[str, Tensor]) -> None:
    """Weights of peft's merge beside ours, both in float32."""
    for name, layer in lora.layers.items():
        found = weights[f"{name}.weight"]
        ours, found = (x.t() if layer.transposed else x for x in (layer.weight.detach(), found))
        # each side rounds rank products, their sums, the scaling and the last sum: 2^-24 of what they are
        largest = layer.b.abs().amax(-1)[:, None] * layer.a.abs().amax(0)[None]
        bound = lora.scale * lora.rank * largest * (lora.rank + 2) * 2.0**-23 + ours.abs() * 2.0**-22
        assert bool(((ours - found).abs() <= bound).all()), name
        assert unequal(ours.contiguous(), layer.base) > ours.numel() // 2, name


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_peft_merges_a_trained_adapter_to_our_weights(architecture: str, mode: str, tmp_path: Path) -> None:
    policy, lora, optimizer = adapted(architecture, mode)
    learn(policy, optimizer, mode, 3)
    save_adapter(lora, tmp_path, "base")
    merged = PeftModel.from_pretrained(source_model(architecture), tmp_path).merge_and_unload()
    weights = merged.state_dict()
    close_to_merged(lora, weights)
    for name, parameter in policy.named_parameters():
        if name.removesuffix(".weight") not in lora.layers:
            assert unequal(weights[name], parameter) == 0, name


def peft_options(architecture: str, targets: list[str]) -> dict[str, object]:
    return {
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
        "fan_in_fan_out": architecture == "gpt2",
    }


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_saving_keeps_every_bit(mode: str, tmp_path: Path) -> None:
    policy, lora, optimizer = adapted("qwen2", mode, ("v_proj", "up_proj"))
    learn(policy, optimizer, mode, 2)
    save_adapter(lora, tmp_path, "base")
    saved = safetensors.torch.load_file(tmp_path / TENSORS_NAME)
    assert saved.keys() == {f"base_model.model.{name}" for name in lora.factors()}
    assert all(unequal(saved[f"base_model.model.{name}"], factor) == 0 for name, factor in lora.factors().items())


def gradients_of_peft(
    architecture: str, lora: Lora, prompts: list[list[int]], responses: list[list[int]]
) -> dict[str, Tensor]:
    """Autograd in float64 through x W^T + s (x A^T) B^T, each sequence alone under the model's own masks."""
    options = peft_options(architecture, list(lora.target_modules))
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, **options)
    model = get_peft_model(source_model(architecture), config, autocast_adapter_dtype=False).double()
    parameters = {
        name.removeprefix("base_model.model.").replace(".default", ""): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    with torch.no_grad():
        for name, factor in lora.factors().items():
            parameters[name].copy_(factor)
    assert parameters.keys() == lora.factors().keys()
    total = sum(map(len, responses))
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *response[:-1]]]), use_cache=False).logits[0]
        logprobs = logits[len(prompt) - 1 :].log_softmax(-1).gather(-1, torch.tensor(response)[:, None])
        (-logprobs.sum() / total).backward()
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def our_gradients(policy: PreTrainedModel, lora: Lora, backward: Callable[[], None]) -> dict[str, Tensor]:
    optimizer = make_lora_optimizer(policy, lora, SETTINGS, "deterministic")
    assert isinstance(optimizer, DeterministicLoraOptimizer)
    backward()
    merged = optimizer.sums.finish()
    return lora.factor_gradients(lambda layer: merged[f"{layer}.weight"])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_gradients_are_those_of_peft_in_float64(architecture: str) -> None:
    prompts, responses = ragged(8, 0, prompt=20)
    policy = make_policy(source_model(architecture), "deterministic", CONTEXT)
    lora = add_lora(policy, RANK, ALPHA, (), seed=5)
    randomise(lora)
    batch = lay_out(prompts, responses, slots=slots_of(range(8), 8, SLOTS))

    def backward() -> None:
        logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "deterministic")
        torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / len(logprobs)))

    found = our_gradients(policy, lora, backward)
    expected = gradients_of_peft(architecture, lora, prompts, responses)
    assert found.keys() == expected.keys()
    worst = max(float((found[n].double() - e).norm() / e.norm()) for n, e in expected.items())
    # float32 through two layers
    assert 0 < worst < 3e-6
