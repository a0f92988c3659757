"""A policy's accuracy: the same numbers as from copies of the model; a rounded model is found."""

from __future__ import annotations

import torch
from pytest import mark

from experiments.benchmarks.float64 import compare
from ppo_repro.models.networks import make_policy, rounded_view
from ppo_repro.numerics.rounding import NumberFormats
from ppo_repro.records.notes import LARGEST_RATIO
from ppo_repro.runs.accuracy import LENGTH, Text, measure, text_of
from tests.support.models import CONTEXT, FAMILIES, VOCAB, source_model

every_family = mark.parametrize("architecture", FAMILIES)
TEXT = text_of({"a": range(2, 40), "b": range(VOCAB - 1, 5, -3), "c": range(0, VOCAB, 7)}, 4, CONTEXT)


def test_sequences_are_prompts_by_key_strung_together() -> None:
    prompts = {"b": (4, 5), "a": (1, 2, 3), "c": (6,)}
    assert text_of(prompts, 2, 5) == Text([[1], [6]], [[2, 3, 4, 5], [1, 2, 3, 4]])
    assert text_of({"long": range(200)}, 1, 500) == Text([[0]], [list(range(1, LENGTH))])
    assert text_of(prompts, 3, 2).tokens() == 3


@every_family
def test_a_policy_is_accurate_and_stays_what_it_was(architecture: str) -> None:
    source = source_model(architecture)
    policy = make_policy(source, "deterministic", CONTEXT)
    before = {name: (x, x.detach().clone()) for name, x in policy.named_parameters()}
    found = measure(policy, TEXT)
    assert found.tokens == 4 * (CONTEXT - 1)
    assert not found.is_low
    expected = compare(source, TEXT, CONTEXT).logprobs
    assert (found.deterministic_rms, found.deterministic_max) == (
        expected.deterministic.rms,
        expected.deterministic.largest,
    )
    # each sequence alone or beside others: stock's bits may differ, no more
    assert 0.5 < found.ratio / expected.ratio("rms") < 2.0
    for name, x in policy.named_parameters():
        same, values = before[name]
        assert x is same
        assert torch.equal(x, values)
        assert x.grad is None
        assert x.requires_grad
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in policy.modules())


def test_a_model_that_rounds_is_low_accuracy() -> None:
    """The negative control: weights as bfloat16 has them."""
    policy = make_policy(source_model("qwen3"), "deterministic", CONTEXT)
    found = measure(rounded_view(policy, NumberFormats(weights="bfloat16")), TEXT)
    assert found.is_low
    assert found.ratio > 10 * LARGEST_RATIO["float32"]
    assert found.sentence().endswith("above 4")


def test_precision_high_is_measured_beside_bfloat16() -> None:
    source = source_model("qwen3")
    found = measure(make_policy(source, "deterministic", CONTEXT, "high"), TEXT, "bfloat16")
    assert not found.is_low
    assert f"; stock bfloat16 {found.stock_rms:.2g} and" in found.sentence()
    coarse = rounded_view(make_policy(source, "deterministic", CONTEXT), NumberFormats(weights="float8_e4m3"))
    assert measure(coarse, TEXT, "bfloat16").is_low
