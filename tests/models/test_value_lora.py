"""Adapters of a value model: its head is trained whole beside them, and what is frozen can be another model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForTokenClassification

from ppo_repro.models import low_rank
from ppo_repro.models.adapter_folder import save_value_adapter
from ppo_repro.models.batches import lay_out
from ppo_repro.models.lora import add_lora, share_frozen
from ppo_repro.models.lora_optimizer import make_lora_optimizer
from ppo_repro.models.networks import ValueModel, freeze, make_policy, make_value_model, value_predictions
from ppo_repro.numerics import library
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.linear import linear
from ppo_repro.numerics.optimizer import AdamWSettings, OptimizerState, make_optimizer, weights_digest
from ppo_repro.numerics.rows import alone, slots_of
from tests.support.lora import ALPHA, PROMPTS, RANK, RESPONSES, SETTINGS
from tests.support.models import CONTEXT, source_model, unequal
from tests.support.value_lora import adapted_value_model, learn_values

HEAD = {"head.weight", "head.bias"}


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_it_starts_as_it_was_and_trains_targets_and_head_alone(architecture: str, mode: str) -> None:
    targets = ("q_proj", "down_proj") if architecture == "qwen3" else ("c_attn",)
    before = dict(make_value_model(source_model(architecture), mode, CONTEXT, 0).named_parameters())
    model, lora, optimizer = adapted_value_model(architecture, mode, targets)
    assert weights_digest(model.named_parameters()) == weights_digest(before.items())
    learn_values(model, optimizer, 2)
    for name, parameter in model.named_parameters():
        trained = name in HEAD or name.removesuffix(".weight") in lora.layers
        assert (unequal(parameter, before[name]) > 0) == trained == parameter.requires_grad, name
    assert all(name.startswith("trunk.") and name.endswith(targets) for name in lora.layers)
    assert set(lora.whole) == HEAD


def test_a_first_step_worked_by_hand() -> None:
    """AdamW's first step is the learning rate in the direction of each gradient's sign, whatever its size."""
    settings = AdamWSettings(0.5, 0.9, 0.95, 1e-12, 0.0, 1.0)
    model = make_value_model(source_model("qwen3"), "deterministic", CONTEXT, 0)
    lora = add_lora(model, RANK, ALPHA, (), seed=5)
    before = model.head.weight.detach().clone()
    inputs = torch.eye(before.shape[1])[:2]  # gradients of the head's first two weights: 3 and -2; of its bias: 1

    def backward() -> None:
        outputs = linear(inputs, model.head, alone(2, slots_of(range(2), 2, 8)))
        torch.autograd.backward(outputs, torch.tensor([[3.0], [-2.0]]))

    report = make_lora_optimizer(model, lora, settings, "deterministic").step(backward)
    assert report.grad_norm == pytest.approx((9 + 4 + 1) ** 0.5, rel=1e-6)
    moved = (model.head.weight.detach() - before)[0]
    assert moved[:2].tolist() == pytest.approx([-0.5, 0.5], rel=1e-6) and not moved[2:].any()
    assert float(model.head.bias.detach()) == pytest.approx(-0.5, rel=1e-6)


def test_its_gradients_are_those_of_full_training() -> None:
    model, lora, optimizer = adapted_value_model("qwen3", "deterministic")
    whole = make_value_model(source_model("qwen3"), "deterministic", CONTEXT, 0)
    full = make_optimizer(whole, SETTINGS, "deterministic")
    seen: list[dict[str, Tensor]] = []
    for o in (optimizer, full):
        o.adamw.apply = lambda settings, gradients: seen.append(  # type: ignore[attr-defined]
            {name: g.clone() for name, g in gradients.items()}
        )
    learn_values(model, optimizer, 1)
    learn_values(whole, full, 1)
    ours, theirs = seen
    assert all(unequal(ours[name], theirs[name]) == 0 for name in HEAD)
    for name, layer in lora.layers.items():
        a, b = low_rank.factor_gradients(theirs[f"{name}.weight"], layer.a, layer.b, lora.scale)
        assert unequal(ours[f"{name}.lora_A.weight"], a) == unequal(ours[f"{name}.lora_B.weight"], b) == 0, name
        assert b.any()


LAYOUTS = ((0, "right", 1), (3, "left", 2), (1, "none", 1))


def trained(mode: str, layout: tuple[int, str, int]) -> str:
    micro_batch, padding, threads = layout
    library.use_threads(threads)
    model, _, optimizer = adapted_value_model("qwen3", mode)
    learn_values(model, optimizer, 2, micro_batch, padding)
    return weights_digest(model.named_parameters())


def test_no_layout_shows_in_it() -> None:
    assert len({trained("deterministic", layout) for layout in LAYOUTS}) == 1


@pytest.mark.usefixtures("row_dependent")
def test_in_native_numerics_every_layout_does() -> None:
    assert len({trained("native", layout) for layout in LAYOUTS}) == len(LAYOUTS)


def storages(*tensors: Tensor) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.mark.parametrize("mode", ["deterministic", "native"])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_shared_or_copied_the_same_bits_are_trained(architecture: str, mode: str) -> None:
    targets = ("q_proj", "up_proj") if architecture == "qwen3" else ("c_attn",)
    digests = []
    for shared in (False, True):
        model = make_value_model(source_model(architecture), mode, CONTEXT, 0)
        reference = freeze(make_policy(source_model(architecture), mode, CONTEXT))
        before = weights_digest(reference.named_parameters())
        lora = add_lora(model, RANK, ALPHA, targets, seed=5)
        if shared:
            lora = share_frozen(model, trunk_of(reference), lora)
        learn_values(model, make_lora_optimizer(model, lora, SETTINGS, mode), 3)
        assert weights_digest(reference.named_parameters()) == before
        digests.append(weights_digest([*model.named_parameters(), *lora.factors().items()]))
    assert digests[0] == digests[1]
    own = storages(*model.parameters()) - storages(*reference.parameters())
    assert own == storages(*lora.merged_weights().values(), *lora.whole.values())
    assert storages(*(layer.base for layer in lora.layers.values())) <= storages(*reference.parameters())


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj", "layers.1.mlp.up_proj", "norm", "embed_tokens"])
def test_other_weights_are_not_shared(name: str) -> None:
    """One bit of an adapted or of a frozen weight is enough; zeros of two signs are two numbers here."""
    model = make_value_model(source_model("qwen3"), "deterministic", CONTEXT, 0)
    reference = freeze(make_policy(source_model("qwen3"), "deterministic", CONTEXT))
    for m in (model.trunk, trunk_of(reference)):
        m.get_submodule(name).get_parameter("weight").detach().view(-1)[0] = 0.0
    lora = add_lora(model, RANK, ALPHA, ("q_proj",), seed=5)
    share_frozen(model, trunk_of(reference), lora)
    trunk_of(reference).get_submodule(name).get_parameter("weight").detach().view(-1)[0] = -0.0
    fresh = make_value_model(source_model("qwen3"), "deterministic", CONTEXT, 0)
    fresh.trunk.get_submodule(name).get_parameter("weight").detach().view(-1)[0] = 0.0
    with pytest.raises(ValueError, match=f"trunk.{name}: the two models have different weights"):
        share_frozen(fresh, trunk_of(reference), add_lora(fresh, RANK, ALPHA, ("q_proj",), seed=5))


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_going_on_from_a_state_is_going_on(mode: str) -> None:
    model, _, optimizer = adapted_value_model("qwen3", mode)
    learn_values(model, optimizer, 2)
    held = optimizer.state()
    saved = OptimizerState(
        *({n: x.clone() for n, x in part.items()} for part in (held.first, held.second)),
        dict(held.steps), {n: x.clone() for n, x in held.factors.items()},
    )  # fmt: skip
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    learn_values(model, optimizer, 1)
    digests = []
    for restored in (True, False):  # control: without the head of the saved model it goes on otherwise
        other, _, other_optimizer = adapted_value_model("qwen3", mode)
        for name in HEAD if restored else ():
            other.get_parameter(name).detach().copy_(weights[name])
        other_optimizer.load(saved)
        learn_values(other, other_optimizer, 1)
        digests.append(weights_digest(other.named_parameters()))
    assert digests[0] == weights_digest(model.named_parameters()) != digests[1]


def predictions(model: ValueModel) -> Tensor:
    with torch.no_grad():
        return value_predictions(model, lay_out(PROMPTS, RESPONSES, "right"))


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gpt_neox"])
def test_peft_predicts_the_same_values_from_the_saved_folder(architecture: str, tmp_path: Path) -> None:
    model, lora, optimizer = adapted_value_model(architecture, "deterministic")
    start = predictions(model)
    learn_values(model, optimizer, 3)
    ours = predictions(model)
    source_model(architecture).save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    save_value_adapter(lora, model, tmp_path / "adapter", str(tmp_path / "base"))
    base = AutoModelForTokenClassification.from_pretrained(tmp_path / "base", num_labels=1)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        with torch.no_grad():
            logits = loaded(input_ids=torch.tensor([[*prompt, *response[:-1]]])).logits[0, :, 0]
        found.append(logits[len(prompt) - 1 :])
    # two layers of float32
    assert torch.allclose(torch.cat(found), ours, rtol=0, atol=1e-4 * float(ours.abs().max()))
    assert float((ours - start).abs().max()) > 1e-2, "the adapter learnt nothing, so nothing was compared"
