"""Adapters against the real peft: its folder format in both directions, its gradients in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.errors import UserError
from ppo_repro.models.adapter_folder import CONFIG_NAME, TENSORS_NAME, load_adapter, save_adapter
from ppo_repro.models.lora import ExactLoraOptimizer, Lora, add_lora, linear_layers, make_lora_optimizer
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.optimizer import weights_digest
from tests.models.test_lora import ALPHA, RANK, SETTINGS, adapted, learn
from tests.support.models import CONTEXT, lay_out, ragged, seeded, source_model, unequal

FAMILIES = ("qwen3", "gpt2", "gpt_neox")


def randomise(lora: Lora) -> None:
    """Factors far from the start, the merged weights with them."""
    for seed, (name, factor) in enumerate(lora.factors().items()):
        spread = 0.1 if name.endswith("lora_B.weight") else factor.shape[1] ** -0.5
        factor.copy_(torch.randn(factor.shape, generator=seeded(seed)) * spread)
    lora.merge()


def close_to_merged(lora: Lora, weights: dict[str, Tensor]) -> None:
    """Weights of peft's merge, in float32, beside ours of 20-bit operands."""
    for name, layer in lora.layers.items():
        found = weights[f"{name}.weight"]
        ours, found = (x.t() if layer.transposed else x for x in (layer.weight.detach(), found))
        # each operand is within 2^-20 of the largest of its row; peft's own products and sums are float32's, and the
        # product, its scaling and the last sum are rounded once each: 2^-23 of what they are
        largest = layer.b.abs().amax(-1)[:, None] * layer.a.abs().amax(0)[None]
        bound = lora.scale * lora.rank * largest * (2.0**-19 + lora.rank * 2.0**-24) + ours.abs() * 2.0**-22
        assert bool(((ours - found).abs() <= bound).all()), name
        assert unequal(ours.contiguous(), layer.base) > ours.numel() // 2, name


@pytest.mark.parametrize("mode", ["exact", "native"])
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


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_adapter_saved_by_peft_is_a_start(architecture: str, tmp_path: Path) -> None:
    targets = ["c_attn", "c_fc"] if architecture == "gpt2" else sorted(linear_layers(source_model(architecture)))[:3]
    theirs = get_peft_model(
        source_model(architecture), LoraConfig(r=3, lora_alpha=8, **peft_options(architecture, targets))
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=seeded(0)))
    theirs.save_pretrained(tmp_path, save_embedding_layers=False)
    policy = make_policy(source_model(architecture), "exact", CONTEXT)
    lora = load_adapter(policy, tmp_path)
    assert (lora.rank, lora.alpha, lora.target_modules) == (3, 8.0, tuple(sorted(targets)))
    close_to_merged(lora, theirs.merge_and_unload().state_dict())
    before = weights_digest(policy.named_parameters())
    learn(policy, make_lora_optimizer(policy, lora, SETTINGS), "exact", 1)
    assert weights_digest(policy.named_parameters()) != before


def peft_options(architecture: str, targets: list[str]) -> dict[str, object]:
    return {
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
        "fan_in_fan_out": architecture == "gpt2",
    }


@pytest.mark.parametrize("mode", ["exact", "native"])
def test_saving_and_loading_keeps_every_bit(mode: str, tmp_path: Path) -> None:
    policy, lora, optimizer = adapted("qwen2", mode, ("v_proj", "up_proj"))
    learn(policy, optimizer, mode, 2)
    save_adapter(lora, tmp_path, "base")
    again = make_policy(source_model("qwen2"), mode, CONTEXT)
    loaded = load_adapter(again, tmp_path)
    assert weights_digest(again.named_parameters()) == weights_digest(policy.named_parameters())
    assert weights_digest(loaded.factors().items()) == weights_digest(lora.factors().items())
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [f"{n}.weight" for n in lora.layers]


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
    optimizer = make_lora_optimizer(policy, lora, SETTINGS)
    assert isinstance(optimizer, ExactLoraOptimizer)
    for _ in range(2):
        optimizer.accumulator.begin()
        backward()
        merged = optimizer.accumulator.finish()
    assert merged is not None
    return lora.factor_gradients(merged.__getitem__)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_gradients_are_those_of_peft_in_float64(architecture: str) -> None:
    prompts, responses = ragged(8, 0, prompt=20)
    policy = make_policy(source_model(architecture), "exact", CONTEXT)
    lora = add_lora(policy, RANK, ALPHA, (), seed=5)
    randomise(lora)
    batch = lay_out(prompts, responses, "right")

    def backward() -> None:
        logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "exact")
        torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / len(logprobs)))

    found = our_gradients(policy, lora, backward)
    expected = gradients_of_peft(architecture, lora, prompts, responses)
    assert found.keys() == expected.keys()
    worst = max(float((found[n].double() - e).norm() / e.norm()) for n, e in expected.items())
    # operands of 20 bits through two layers, as for a model that is trained whole
    assert 0 < worst < 3e-5


def saved_by_us(folder: Path) -> None:
    save_adapter(adapted("qwen3", "exact", ("q_proj",))[1], folder, "base")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"use_dora": True}, "use_dora = True: not supported"),
        ({"use_rslora": True}, "use_rslora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"layers_to_transform": 0}, "layers_to_transform = 0"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"r": 0}, "r = 0"),
        ({"r": True}, "r = True"),
        ({"r": 5}, r"is \[4, 48\], this model needs \[5, 48\]"),
        ({"lora_alpha": "16"}, "lora_alpha = '16'"),
        ({"target_modules": "all-linear"}, "target_modules = 'all-linear'"),
        ({"target_modules": []}, "target_modules = "),
        ({"target_modules": ["q_proj", "v_proj"]}, r"has no .*v_proj.lora_A.weight"),
        ({"target_modules": ["0.self_attn.q_proj"]}, "layers.1.*is in no layer"),
        ({"target_modules": ["wq"]}, "'wq' names no layer"),
    ],
)
def test_what_an_adapter_cannot_be_is_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    saved_by_us(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load_adapter(make_policy(source_model("qwen3"), "exact", CONTEXT), tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    policy = make_policy(source_model("qwen3"), "exact", CONTEXT)
    with pytest.raises(UserError, match=CONFIG_NAME):
        load_adapter(policy, tmp_path)
    saved_by_us(tmp_path)
    content = (tmp_path / TENSORS_NAME).read_bytes()
    (tmp_path / TENSORS_NAME).write_bytes(content[:-10])
    with pytest.raises(UserError, match=f"{TENSORS_NAME}: cannot be read"):
        load_adapter(policy, tmp_path)
    tensors = {n: t.to(torch.float64) for n, t in safetensors.torch.load(content).items()}
    safetensors.torch.save_file(tensors, tmp_path / TENSORS_NAME)
    with pytest.raises(UserError, match=r"is torch\.float64"):
        load_adapter(policy, tmp_path)
    (tmp_path / CONFIG_NAME).write_text("[]")
    with pytest.raises(UserError, match="one JSON object"):
        load_adapter(policy, tmp_path)
