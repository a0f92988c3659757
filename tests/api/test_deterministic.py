"""`deterministic(model)` behaves like the model it copies, and no layout of a batch changes a bit of its results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import ppo_repro
from ppo_repro.base.errors import UserError
from ppo_repro.numerics.lowering import is_deterministic
from tests.support.models import FAMILIES, VOCAB, bits, source_model, unequal
from tests.support.trained import collate, positions_in

ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17, 18, 19, 20, 21], [3, 4]]
LABELS = sum(len(row) - 1 for row in ROWS)
ROW = torch.tensor([[3, 4, 5]])
LAYOUTS = [(1, "right", 0), (2, "left", 0), (4, "left", 3), (3, "right", 2)]


def gradients(model: PreTrainedModel, rows: Sequence[Sequence[int]], micro: int, padding: str, extra: int) -> Tensor:
    """All gradients of the summed loss, collected over micro-batches in `.grad`, as one vector."""
    model.zero_grad()
    for start in range(0, len(rows), micro):
        tensors = collate(rows[start : start + micro], padding, extra)
        if is_deterministic(model):
            loss = model(**tensors, num_items_in_batch=LABELS).loss
        else:
            position_ids = positions_in(tensors["attention_mask"])
            loss = model(**tensors, position_ids=position_ids, num_items_in_batch=LABELS).loss
        loss.backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_gradients_in_grad_do_not_depend_on_the_layout(architecture: str) -> None:
    model = ppo_repro.deterministic(source_model(architecture), threads=1)
    expected = gradients(model, ROWS, len(ROWS), "right", 0)
    assert len(expected) == sum(p.numel() for p in model.parameters())
    assert bool((expected != 0).any())
    for layout in LAYOUTS:
        assert unequal(gradients(model, ROWS, *layout), expected) == 0, layout
    # the control: in another order of sequences the same terms are rounded otherwise
    assert unequal(gradients(model, ROWS[::-1], 2, "right", 0), expected) > 0


def test_gradients_of_stock_torch_depend_on_it(row_dependent: None) -> None:
    """The negative control: the same comparison on linear layers that depend on the number of rows."""
    model = source_model("llama")
    expected = gradients(model, ROWS, len(ROWS), "right", 0)
    for layout in LAYOUTS:
        assert unequal(gradients(model, ROWS, *layout), expected) > 0, layout


def test_gradients_go_on_from_grad_and_zeroing_begins_anew() -> None:
    model = ppo_repro.deterministic(source_model("llama"))
    first, last = collate(ROWS[:2], "right"), collate(ROWS[2:], "left")

    def backward(tensors: dict[str, Tensor]) -> Tensor:
        model(**tensors, num_items_in_batch=LABELS).loss.backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone()

    half = backward(first)
    whole = backward(last)
    assert unequal(half, whole) > 0
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        assert unequal(backward(first), half) == 0
    # from a gradient of the caller's, as after clipping
    for parameter in model.parameters():
        parameter.grad *= 0.5
    halved = backward(last)
    for parameter, part in zip(model.parameters(), half.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.grad = 0.5 * part.view(parameter.shape)
    assert unequal(backward(last), halved) == 0
    assert unequal(halved, whole) > 0


def test_frozen_parameters_take_no_gradient() -> None:
    model = ppo_repro.deterministic(source_model("llama"))
    model.model.requires_grad_(False)
    model(**collate(ROWS, "right")).loss.backward()
    assert model.lm_head.weight.grad is not None
    assert model.model.norm.weight.grad is None
    model.requires_grad_(False)
    assert not model(**collate(ROWS, "right")).loss.requires_grad
    model.requires_grad_(True)
    model.lm_head.requires_grad_(False)
    model.zero_grad()
    model(**collate(ROWS, "right")).loss.backward()
    assert model.lm_head.weight.grad is None
    assert model.model.norm.weight.grad is not None


def _hook(*_: object) -> None:
    raise AssertionError("called")


SILENT = {
    "a hook of a layer": lambda m: m.model.layers[0].register_forward_hook(_hook),
    "a hook of the trunk": lambda m: m.model.register_forward_pre_hook(_hook),
    "a backward hook of the head": lambda m: m.lm_head.register_full_backward_hook(_hook),
    "a forward of its own": lambda m: setattr(m.model.layers[0].mlp, "forward", _hook),
    "a hook of a weight": lambda m: m.lm_head.weight.register_hook(_hook),
    "a later hook of a weight": lambda m: m.lm_head.weight.register_post_accumulate_grad_hook(_hook),
    "another module": lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.Tanh()),
    "a parametrization": lambda m: torch.nn.utils.parametrizations.orthogonal(m.lm_head),
    "a cast": lambda m: m.half(),
    "fewer layers in the config": lambda m: setattr(m.config, "num_hidden_layers", 1),
    "another base of the rotary angles": lambda m: m.config.rope_parameters.update(rope_theta=5.0),
    "more tokens in the config": lambda m: setattr(m.config, "vocab_size", 10**6),
    "hidden states by the config": lambda m: setattr(m.config, "output_hidden_states", True),
    "a number of a norm": lambda m: setattr(m.model.norm, "variance_epsilon", 0.5),
    "a weight that is computed": lambda m: m.lm_head._parameters.update(weight=m.lm_head.weight * 1.0),
}


SEEN = "hook|of its own|replaced|need contiguous|no pass sees|deterministic numerics compute with 1e|computed from"


@pytest.mark.parametrize("change", SILENT)
def test_what_the_kernels_would_not_see_is_refused(change: str) -> None:
    model = ppo_repro.deterministic(source_model("llama"))
    model(ROW)
    SILENT[change](model)
    for compute in (
        lambda: model(ROW),
        lambda: ppo_repro.logprobs(model, ROW),
        lambda: ppo_repro.generate(model, [[1]], ppo_repro.Sampling(max_response_tokens=2), stop=[0]),
    ):
        with pytest.raises(UserError, match=SEEN) as error:
            compute()
        assert "\n" not in str(error.value)


def test_logits_of_padded_packed_and_single_rows_are_the_same_bits() -> None:
    model = ppo_repro.deterministic(source_model("qwen3"))
    alone = [model(torch.tensor([row])).logits[0] for row in ROWS]
    for padding in ("right", "left"):
        tensors = collate(ROWS, padding, 2)
        out = model(tensors["input_ids"], tensors["attention_mask"])
        assert out.loss is None
        for row, mask, expected in zip(out.logits, tensors["attention_mask"], alone, strict=True):
            assert unequal(row[mask.bool()], expected) == 0
            assert not bool(row[~mask.bool()].any())
    packed = torch.tensor([[token for row in ROWS for token in row]])
    positions = torch.tensor([[i for row in ROWS for i in range(len(row))]])
    assert unequal(model(packed, position_ids=positions).logits[0], torch.cat(alone)) == 0
    found = ppo_repro.logprobs(model, packed, position_ids=positions)[0].split([len(row) for row in ROWS])
    for row, logprobs in zip(ROWS, found, strict=True):
        assert unequal(logprobs, ppo_repro.logprobs(model, torch.tensor([row]))[0]) == 0
        assert float(logprobs[0].detach()) == 0.0
    last = model(collate(ROWS, "left")["input_ids"], collate(ROWS, "left")["attention_mask"], logits_to_keep=2).logits
    assert unequal(last[1], alone[1][-2:]) == 0


def test_loss_is_the_mean_over_labels_and_a_packed_row_predicts_no_first_token() -> None:
    model = ppo_repro.deterministic(source_model("llama"))
    with torch.no_grad():
        logprobs = torch.cat([ppo_repro.logprobs(model, torch.tensor([row]))[0, 1:] for row in ROWS])
        expected = -float(logprobs.double().sum()) / LABELS
        packed = torch.tensor([[token for row in ROWS for token in row]])
        positions = torch.tensor([[i for row in ROWS for i in range(len(row))]])
        losses = [
            model(**collate(ROWS, "right")).loss,
            model(**collate(ROWS, "left", 1)).loss,
            model(packed, position_ids=positions, labels=packed).loss,
        ]
    assert len({int(bits(loss)) for loss in losses}) == 1
    assert float(losses[0]) == pytest.approx(expected, rel=1e-6)  # float32


def test_generate_and_logprobs_agree_on_every_bit_and_no_slot_shows() -> None:
    model = ppo_repro.deterministic(source_model("qwen3"))
    sampling = ppo_repro.Sampling(temperature=0.7, max_response_tokens=6)
    responses = ppo_repro.generate(model, ROWS, sampling)
    for slots in (1, 3):
        for a, b in zip(ppo_repro.generate(model, ROWS, sampling, slots=slots), responses, strict=True):
            assert a.response_ids == b.response_ids
            assert unequal(a.logprobs, b.logprobs) == 0
    rows = [[*r.prompt_ids, *r.response_ids] for r in responses]
    tensors = collate(rows, "left")
    found = ppo_repro.logprobs(model, tensors["input_ids"], tensors["attention_mask"], temperature=0.7)
    for row, response in zip(found, responses, strict=True):
        assert unequal(row[len(row) - len(response.response_ids) :], response.logprobs) == 0
    assert [r.response_ids for r in ppo_repro.generate(model, ROWS, sampling, seed=1)] != [
        r.response_ids for r in responses
    ]
    row = torch.tensor([rows[0]])
    stock = (source_model("qwen3")(row).logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0]
    assert torch.allclose(stock, found[0][-len(stock) :], atol=1e-4)  # float32 sums in another order, nats


def test_a_response_with_a_seed_of_its_own_depends_on_no_other_prompt() -> None:
    model, sampling = ppo_repro.deterministic(source_model("qwen3")), ppo_repro.Sampling(max_response_tokens=6)
    seeds = [11 * index for index in range(len(ROWS))]
    responses = ppo_repro.generate(model, ROWS, sampling, seeds=seeds)
    backwards = ppo_repro.generate(model, ROWS[::-1], sampling, seeds=seeds[::-1])[::-1]
    assert [r.response_ids for r in backwards] == [r.response_ids for r in responses]
    without = ppo_repro.generate(model, ROWS, sampling), ppo_repro.generate(model, ROWS[::-1], sampling)[::-1]
    assert [r.response_ids for r in without[0]] != [r.response_ids for r in without[1]]


def through_data(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def through_numpy(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        values = parameter.detach().numpy()
        values *= 1.5


@pytest.mark.parametrize("change", [through_data, through_numpy])
def test_a_model_computes_with_the_weights_that_it_has(change: Callable[[PreTrainedModel], None]) -> None:
    """Also after changes that torch does not count."""
    model, stock = ppo_repro.deterministic(source_model("llama")), source_model("llama")
    before = model(ROW).logits
    change(model)
    stock.load_state_dict(model.state_dict())
    after = model(ROW).logits
    assert unequal(after, ppo_repro.deterministic(stock)(ROW).logits) == 0
    assert unequal(after, before) > 0


def whole_and_part(model: PreTrainedModel) -> Tensor:
    loss = model(ROW, labels=ROW).loss
    loss.backward(retain_graph=True)
    return loss


REFUSED: dict[str, tuple[Callable[[PreTrainedModel], object], str]] = {
    "a second backward": (lambda m: whole_and_part(m).backward(), "a second backward through one pass"),
    "second derivatives": (lambda m: m(ROW, labels=ROW).loss.backward(create_graph=True), "no second derivatives"),
    "a part": (lambda m: m(ROW, labels=ROW).loss.backward(inputs=[m.lm_head.weight]), "call backward.. without inputs"),
    "grad of autograd": (
        lambda m: torch.autograd.grad(m(ROW, labels=ROW).loss, [m.model.norm.weight]),
        "call backward.. without inputs",
    ),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_backward_pass_that_would_add_to_other_gradients_is_refused(call: str) -> None:
    model = ppo_repro.deterministic(source_model("qwen2"))
    whole_and_part(model)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    act, message = REFUSED[call]
    with pytest.raises(RuntimeError, match=message):
        act(model)
    added = 2.0 if call == "a second backward" else 1.0  # its first backward is right
    for name, p in model.named_parameters():
        assert unequal(p.grad, added * before[name]) == 0, name


def test_what_autograd_calls_at_a_parameter_sees_its_whole_gradient() -> None:
    """As DistributedDataParallel, which waits at these nodes for the gradients that it sends."""
    model = ppo_repro.deterministic(source_model("qwen3"))
    nodes, seen = [], {}
    for name, p in model.named_parameters():
        nodes.append(p.expand_as(p).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda *_, name=name, p=p: seen.update({name: p.grad.clone()}))
    whole_and_part(model)
    for name, p in model.named_parameters():
        assert unequal(seen[name], p.grad) == 0, name


def test_a_padding_token_may_be_set_before_and_after_the_copy() -> None:
    """As loops and transformers' Trainer do, with the tokenizer's."""
    source = source_model("llama")
    source.config.pad_token_id = 7
    model = ppo_repro.deterministic(source)
    model.config.pad_token_id = 8
    whole_and_part(model)


def test_a_model_that_gets_more_words_in_the_middle_goes_on() -> None:
    model = ppo_repro.deterministic(source_model("qwen3"))
    whole_and_part(model)
    model.resize_token_embeddings(VOCAB + 7, mean_resizing=False)
    model.zero_grad()
    whole_and_part(model)
    expected = copy.deepcopy(model)
    whole_and_part(expected)
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert unequal(p.grad, q.grad) == 0, name


SETTINGS: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast has no effect"),
    "default device": (lambda: torch.device("meta"), "default is torch.float32 on meta"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_torch_without_effect_is_refused(setting: str) -> None:
    model, (make, message) = ppo_repro.deterministic(source_model("llama")), SETTINGS[setting]
    with make(), pytest.raises(UserError, match=message):
        model(ROW)


def share_gradient(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.weight.grad = model.model.layers[0].mlp.gate_proj.weight.grad


def narrow_gradient(model: PreTrainedModel) -> None:
    model.model.norm.weight.grad.data = torch.zeros(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (share_gradient, r"gate_proj.weight and model.layers.0.mlp.up_proj.weight have one gradient in common"),
        (narrow_gradient, r"gradient of model.norm.weight is torch.float32 \[3\] on cpu; must be .* \[48\] on cpu"),
    ],
)
def test_a_gradient_to_which_nothing_can_be_added_is_refused(
    change: Callable[[PreTrainedModel], None], message: str
) -> None:
    model = ppo_repro.deterministic(source_model("llama"))
    whole_and_part(model)
    change(model)
    with pytest.raises(UserError, match=message):
        model(ROW, labels=ROW).loss.backward()


BETWEEN: dict[str, Callable[[PreTrainedModel], object]] = {
    "a step": lambda m: torch.nn.init.zeros_(m.lm_head.weight),
    "frozen": lambda m: m.model.norm.weight.requires_grad_(False),
    "replaced": lambda m: setattr(m.model.norm, "weight", torch.nn.Parameter(torch.ones(48))),
    "a hook": lambda m: m.model.norm.weight.register_hook(_hook),
}


@pytest.mark.parametrize("change", BETWEEN)
def test_a_change_before_the_backward_pass_is_refused(change: str) -> None:
    model = ppo_repro.deterministic(source_model("llama"))
    loss = model(ROW, labels=ROW).loss
    BETWEEN[change](model)
    with pytest.raises((RuntimeError, UserError), match=r"a weight was changed between the forward|has a hook"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    if change == "a hook":
        return
    model(ROW, labels=ROW).loss.backward()
