"""Low-rank adapters of policies and value models: they start as the base and learn as peft does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.mode import Mode
from ppo_repro.base.processes import SLOTS
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.folders import ADAPTER_TENSORS, save_adapter
from ppo_repro.models.lora import Lora, add_lora, share_frozen
from ppo_repro.models.networks import ValueModel, make_policy, make_value_model, policy_logits, value_predictions
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.interface import Ints
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sequences import slots_of
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.weights import weights_digest
from tests.support.models import CONTEXT, ragged, scored, seeded, source_model, unequal

SETTINGS = AdamWSettings(learning_rate=2e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0)
RANK, ALPHA, COUNT = 4, 12.0, 9
PROMPTS, RESPONSES = ragged(COUNT, 3, prompt=12)
TOKENS = sum(map(len, RESPONSES))
HEAD = {"head.weight", "head.bias"}
TARGETS = {"qwen3": ("q_proj", "down_proj"), "gpt2": ("c_attn",)}

kinds = pytest.mark.parametrize("kind", ["policy", "value model"])
modes = pytest.mark.parametrize("mode", ["deterministic", "native"])


def slots(sequences: range) -> Ints:
    """The slots of some of the sequences, of which all together are a minibatch."""
    return slots_of(sequences, COUNT, SLOTS)


@dataclass
class Subject:
    model: PreTrainedModel | ValueModel
    lora: Lora
    optimizer: Optimizer
    mode: Mode

    @classmethod
    def of(cls, kind: str, architecture: str, mode: Mode, targets: tuple[str, ...] = ()) -> Subject:
        model = fresh(kind, architecture, mode)
        lora = add_lora(model, RANK, ALPHA, targets, seed=5)
        return cls(model, lora, Optimizer(model, SETTINGS, mode, adapter=lora), mode)

    def learn(self, steps: int) -> Subject:
        learn(self.model, self.optimizer, self.mode, steps)
        return self


def fresh(kind: str, architecture: str, mode: Mode) -> PreTrainedModel | ValueModel:
    source = source_model(architecture)
    return make_policy(source, mode, CONTEXT) if kind == "policy" else make_value_model(source, mode, CONTEXT, 0)


def learn(model: PreTrainedModel | ValueModel, optimizer: Optimizer, mode: Mode, steps: int) -> None:
    """Some steps on the same sequences: with random advantages, or towards random values."""
    drawn = torch.randn(COUNT, generator=seeded(4)).tolist()
    by_token = torch.tensor([x for x, response in zip(drawn, RESPONSES, strict=True) for _ in response])

    def loss(batch: TokenBatch, first: int, last: int) -> Tensor:
        batch = batch.with_sums(optimizer.sink)
        if isinstance(model, ValueModel):
            losses = (value_predictions(model, batch) - by_token[first:last]) ** 2
        else:
            logprobs, entropies = token_statistics(policy_logits(model, batch), batch.targets, 0.9, None, mode)
            losses = -logprobs * by_token[first:last] - 0.01 * entropies
        torch.autograd.backward(losses, torch.full_like(losses, 1.0 / TOKENS))
        return losses.detach()

    def backward() -> None:
        scored(PROMPTS, RESPONSES, "right", 0, loss, slots)

    for _ in range(steps):
        optimizer.step(backward)


@kinds
@modes
@pytest.mark.parametrize("architecture", TARGETS)
def test_targets_and_the_head_of_a_value_model_change_and_nothing_else(
    kind: str, architecture: str, mode: Mode
) -> None:
    before = dict(fresh(kind, architecture, mode).named_parameters())
    s = Subject.of(kind, architecture, mode, TARGETS[architecture]).learn(3)
    for name, parameter in s.model.named_parameters():
        is_trained = name in HEAD or (name.endswith(".weight") and name.removesuffix(".weight") in s.lora.layers)
        assert (unequal(parameter, before[name]) > 0) == is_trained == parameter.requires_grad, name
    assert all(name.endswith(TARGETS[architecture]) for name in s.lora.layers)
    assert set(s.lora.whole) == (set() if kind == "policy" else HEAD)
    # control: a model that is trained whole changes everywhere
    whole = fresh(kind, architecture, mode)
    learn(whole, Optimizer(whole, SETTINGS, mode), mode, 3)
    assert all(unequal(p, before[name]) > 0 for name, p in whole.named_parameters())


# ------------------------------------------------------------------------------------------ weights that are shared


def storages(*tensors: Tensor) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def base_of(kind: str, reference: PreTrainedModel) -> PreTrainedModel:
    return reference if kind == "policy" else trunk_of(reference)


@kinds
@modes
@pytest.mark.parametrize("architecture", TARGETS)
def test_shared_or_copied_the_same_bits_are_trained(kind: str, architecture: str, mode: Mode) -> None:
    digests = []
    for shared in (False, True):
        model, reference = (
            fresh(kind, architecture, mode),
            make_policy(source_model(architecture), mode, CONTEXT).requires_grad_(False),
        )
        before = weights_digest(reference.named_parameters())
        lora = add_lora(model, RANK, ALPHA, TARGETS[architecture], seed=5)
        if shared:
            lora = share_frozen(model, base_of(kind, reference), lora)
        learn(model, Optimizer(model, SETTINGS, mode, adapter=lora), mode, 3)
        assert weights_digest(reference.named_parameters()) == before
        digests.append(weights_digest([*model.named_parameters(), *lora.factors().items()]))
    assert digests[0] == digests[1]
    own = storages(*model.parameters()) - storages(*reference.parameters())
    assert own == storages(*(layer.weight for layer in lora.layers.values()), *lora.whole.values())
    assert storages(*(layer.base for layer in lora.layers.values())) <= storages(*reference.parameters())


# ------------------------------------------------------------------------------------------------- beside the real peft

OF_PEFT = ("qwen3", "gpt2", "gpt_neox", pytest.param("phi3", marks=pytest.mark.slow))


@modes
@pytest.mark.parametrize("architecture", OF_PEFT)
def test_peft_merges_a_saved_adapter_to_our_weights(architecture: str, mode: Mode, tmp_path: Path) -> None:
    s = Subject.of("policy", architecture, mode).learn(3)
    save_adapter(s.lora, tmp_path, "base")
    saved = safetensors.torch.load_file(tmp_path / ADAPTER_TENSORS)
    assert all(unequal(saved[f"base_model.model.{name}"], factor) == 0 for name, factor in s.lora.factors().items())
    weights = PeftModel.from_pretrained(source_model(architecture), tmp_path).merge_and_unload().state_dict()
    for name, layer in s.lora.layers.items():
        pair = layer.weight.detach(), weights[f"{name}.weight"]
        ours, found = (x.t() if layer.transposed else x for x in pair)
        # each side rounds rank products, their sums, the scaling and the last sum: 2^-24 of what they are
        largest = layer.b.abs().amax(-1)[:, None] * layer.a.abs().amax(0)[None]
        bound = s.lora.scale * RANK * largest * (RANK + 2) * 2.0**-23 + ours.abs() * 2.0**-22
        assert bool(((ours - found).abs() <= bound).all()), name
        assert unequal(ours.contiguous(), layer.base) > ours.numel() // 2, name
    for name, parameter in s.model.named_parameters():
        if name.removesuffix(".weight") not in s.lora.layers:
            assert unequal(weights[name], parameter) == 0, name


def gradients_of_peft(architecture: str, lora: Lora) -> dict[str, Tensor]:
    """Autograd in float64 through x W^T + s (x A^T) B^T, each sequence alone under the model's own masks."""
    options: dict[str, Any] = {"target_modules": list(lora.target_modules), "fan_in_fan_out": architecture == "gpt2"}
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", lora_dropout=0.0, **options)
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
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *response[:-1]]]), use_cache=False).logits[0]
        logprobs = logits[len(prompt) - 1 :].log_softmax(-1).gather(-1, torch.tensor(response)[:, None])
        (-logprobs.sum() / TOKENS).backward()
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("architecture", OF_PEFT)
def test_gradients_are_those_of_peft_in_float64(architecture: str) -> None:
    s = Subject.of("policy", architecture, "deterministic").learn(3)
    batch = lay_out(PROMPTS, RESPONSES, slots=slots(range(COUNT))).with_sums(s.optimizer.sink)
    s.optimizer.sums.begin()
    logprobs, _ = token_statistics(policy_logits(s.model, batch), batch.targets, 1.0, None, "deterministic")
    torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / TOKENS))
    found = s.lora.gradients(s.optimizer.sums.finish())
    expected = gradients_of_peft(architecture, s.lora)
    assert found.keys() == expected.keys()
    worst = max(float((found[n].double() - e).norm() / e.norm()) for n, e in expected.items())
    # float32 through two layers
    assert 0 < worst < 3e-6
