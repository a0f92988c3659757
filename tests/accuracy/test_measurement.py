"""A policy's accuracy: the same numbers as from copies of the model, and a damaged layer is named."""

from __future__ import annotations

from dataclasses import replace

import torch
from pytest import MonkeyPatch, mark
from torch import Tensor, nn

from ppo_repro.accuracy.distances import compare
from ppo_repro.accuracy.layers import layer_errors
from ppo_repro.accuracy.measurement import LENGTH, measure, text_of
from ppo_repro.accuracy.scores import Float64, Text, reference_scores, stock_scores
from ppo_repro.accuracy.stock import stations, stock_model, wide_model
from ppo_repro.models.networks import make_policy
from ppo_repro.numerics.arithmetic import contraction
from ppo_repro.records.accuracy import LARGEST_RATIO, sentence
from ppo_repro.testing.small_models import CONFIGS, CONTEXT, VOCAB
from tests.support.models import QUICK, source_model

every_family = mark.parametrize("architecture", CONFIGS)
TEXT = text_of({"a": range(2, 40), "b": range(VOCAB - 1, 5, -3), "c": range(0, VOCAB, 7)}, 4, CONTEXT)


def test_sequences_are_prompts_by_key_strung_together() -> None:
    prompts = {"b": (4, 5), "a": (1, 2, 3), "c": (6,)}
    assert text_of(prompts, 2, 5) == Text([[1], [6]], [[2, 3, 4, 5], [1, 2, 3, 4]])
    assert text_of({"long": range(200)}, 1, 500) == Text([[0]], [list(range(1, LENGTH))])
    assert text_of(prompts, 3, 2).tokens() == 3


@every_family
def test_the_models_are_the_unmodified_ones_to_the_bit(architecture: str) -> None:
    """The model in float64 widens its layers one by one; that shows in no bit, nor do the hooks stay in its way."""
    source = source_model(architecture)
    policy = make_policy(source, "exact", CONTEXT)
    found = stock_scores(stock_model(policy), TEXT)
    assert torch.equal(found.logits, stock_scores(source, TEXT).logits)
    wide = wide_model(policy)
    for _ in range(2):
        with Float64():
            scores = stock_scores(wide, TEXT)
        assert torch.equal(scores.logits, reference_scores(source, TEXT).logits)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


@every_family
def test_a_policy_is_accurate_and_stays_what_it_was(architecture: str) -> None:
    source = source_model(architecture)
    policy = make_policy(source, "exact", CONTEXT)
    before = {name: (x, x.data_ptr(), x.detach().clone()) for name, x in policy.named_parameters()}
    found = measure(policy, TEXT)
    assert found.tokens == 4 * (CONTEXT - 1) and not found.is_low and found.worst_layer == ""
    expected = compare(source, TEXT, CONTEXT).logprobs
    assert (found.exact_rms, found.exact_max) == (expected.deterministic.rms, expected.deterministic.largest)
    # each sequence alone or beside others: stock's bits may differ, no more
    assert 0.5 < found.ratio / expected.ratio("rms") < 2.0
    for name, x in policy.named_parameters():
        same, address, values = before[name]
        assert x is same and x.data_ptr() == address and torch.equal(x, values)
        assert x.grad is None and x.requires_grad
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in policy.modules())


@mark.parametrize("architecture", QUICK)
def test_the_layer_that_is_damaged_is_named(architecture: str) -> None:
    """The negative control: one station after the other rounds its outputs to bfloat16."""

    def damage(_: nn.Module, __: object, out: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        first, *rest = (out,) if isinstance(out, Tensor) else out
        rounded = first.to(torch.bfloat16).to(torch.float32)
        return rounded if isinstance(out, Tensor) else (rounded, *rest)

    policy = make_policy(source_model(architecture), "exact", CONTEXT)
    assert len(stations(policy)) >= 5
    for name, station in stations(policy).items():
        handle = station.register_forward_hook(damage)
        found = measure(policy, TEXT)
        handle.remove()
        assert found.is_low and found.ratio > 10 * LARGEST_RATIO
        assert found.worst_layer == name
        assert sentence(found).endswith(f"above 4: {name} lost most ({found.worst_layer_error:.2g} relative)")
        assert 1e-4 < found.worst_layer_error < 1e-2
    assert not measure(policy, TEXT).is_low, "the damage is undone"


@mark.parametrize("architecture", QUICK)
def test_coarse_grids_are_low_accuracy(architecture: str, monkeypatch: MonkeyPatch) -> None:
    fine = layer_errors(make_policy(source_model(architecture), "exact", CONTEXT), TEXT)
    monkeypatch.setattr(contraction, "WEIGHT_BITS", 12)
    policy = make_policy(source_model(architecture), "exact", CONTEXT)  # another: a layer keeps its weights' grids
    found, coarse = measure(policy, TEXT), layer_errors(policy, TEXT)
    assert found.is_low and found.ratio > 10 * LARGEST_RATIO
    assert found.worst_layer == max(coarse, key=coarse.__getitem__) and found.worst_layer_error > 1e-5
    assert max(fine.values()) < 2e-6


def test_a_ratio_that_is_no_number_is_low() -> None:
    policy = make_policy(source_model("llama"), "exact", CONTEXT)
    found = measure(policy, TEXT)
    assert not replace(found, ratio=LARGEST_RATIO).is_low
    assert replace(found, ratio=float("nan")).is_low and replace(found, ratio=LARGEST_RATIO + 0.1).is_low
