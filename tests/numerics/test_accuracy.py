"""Exact numerics are as close to the model in float64 as stock float32 is: every family, with and without outliers.

Every ratio is exact / stock, the geometric mean over random models: an error of float32 is partly luck.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from ppo_repro.accuracy.distances import Greedy, compare, compare_gradients, errors, typical
from ppo_repro.accuracy.scores import Float64, Text, in_float64, reference_scores, stock_scores
from ppo_repro.numerics.arithmetic.grid import quantise
from ppo_repro.numerics.layers.families import ROTARIES
from ppo_repro.numerics.layers.rotary import inverse_frequencies
from ppo_repro.testing.outliers import cases_of, linear_layers, outlier_model, sequences_of
from ppo_repro.testing.small_models import CONFIGS, CONTEXT
from tests.support.models import DISTINCT, source_model

SEEDS, MORE_SEEDS = range(3), range(3, 11)
PLAIN, OUTLIERS = 2.0, 4.0  # largest ratios exact / stock
RESOLVED = 1e-2  # relative error of stock gradients
QUICK = {(a, "plain") for a in DISTINCT} | {("qwen3", c) for c in cases_of("qwen3") if c != "large vocabulary"}
QUICK |= {("gpt2", "residual channel 1e4"), ("qwen2", "key bias 300")}
SUBJECTS = [
    pytest.param(a, c, id=f"{a}: {c}", marks=[] if (a, c) in QUICK else pytest.mark.slow)
    for a in CONFIGS
    for c in cases_of(a)
]
subjects = pytest.mark.parametrize(("architecture", "case"), SUBJECTS)


@dataclass(frozen=True)
class Ratios:
    """Exact / stock, each of several models."""

    rms: list[float]  # of the log-probs
    largest: list[float]
    greedy: list[Greedy]


def text_of(seed: int, case: str = "plain") -> Text:
    return Text(*sequences_of(case, seed))


@cache
def ratios(architecture: str, case: str, seeds: range) -> Ratios:
    found = [compare(outlier_model(architecture, case, seed), text_of(seed, case), CONTEXT) for seed in seeds]
    return Ratios(
        [c.logprobs.ratio("rms") for c in found],
        [c.logprobs.ratio("largest") for c in found],
        [c.greedy for c in found],
    )


def gradient_ratios(architecture: str, case: str, seeds: range) -> list[float]:
    """Exact / stock of each model whose gradients float32 resolves.

    With huge weights Gemma's softmax saturates, and the gradients of stock float32 itself may be off by their own size:
    the ratio of two such errors says nothing.
    """
    found = [compare_gradients(outlier_model(architecture, case, s), text_of(s, case), CONTEXT) for s in seeds]
    resolved = [c for c in found if max(c.stock.values()) < RESOLVED]
    assert resolved
    return [c.ratio() for c in resolved]


def bound(case: str) -> float:
    return PLAIN if case == "plain" else OUTLIERS


@subjects
def test_log_probs_are_as_close_to_float64_as_those_of_stock_float32(architecture: str, case: str) -> None:
    found = ratios(architecture, case, SEEDS)
    assert typical(found.rms) <= bound(case), found.rms
    assert typical(found.largest) <= bound(case), found.largest


@subjects
def test_greedy_tokens_are_those_of_float64_where_float32_can_tell(architecture: str, case: str) -> None:
    for found in ratios(architecture, case, SEEDS).greedy:
        assert found.wrong == 0 and found.unresolved < found.tokens / 20


@subjects
def test_gradients_are_as_close_to_float64_as_those_of_stock_float32(architecture: str, case: str) -> None:
    found = gradient_ratios(architecture, case, SEEDS)
    assert typical(found) <= bound(case), found


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "case"), [(a, c) for a in CONFIGS for c in cases_of(a)])
def test_more_models_are_as_accurate(architecture: str, case: str) -> None:
    found = ratios(architecture, case, MORE_SEEDS)
    assert typical(found.rms) <= bound(case) and typical(found.largest) <= bound(case), found
    assert all(g.wrong == 0 for g in found.greedy)
    assert typical(gradient_ratios(architecture, case, MORE_SEEDS)) <= bound(case)


def rounded(model: PreTrainedModel, bits: int | None) -> PreTrainedModel:
    """A copy whose matrices lie on grids of `bits` by row, or in bfloat16; a tied embedding shares its matrix."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in linear_layers(copied):
            integers, scale = quantise(weight, bits or 20)
            weight.copy_(weight.to(torch.bfloat16) if bits is None else integers * scale)
    return copied


@pytest.mark.parametrize("architecture", DISTINCT)
def test_a_model_on_coarse_grids_fails_every_bound(architecture: str) -> None:
    """The negative control: the exact numerics are given models rounded to bfloat16."""
    wrong = 0
    for seed in SEEDS:
        model, text = outlier_model(architecture, "plain", seed), text_of(seed)
        found = compare(model, text, CONTEXT, rounded(model, None))
        wrong += found.greedy.wrong
        assert min(found.logprobs.ratio("rms"), found.logprobs.ratio("largest")) > 100 * OUTLIERS
        assert compare_gradients(model, text, CONTEXT, rounded(model, None)).ratio() > 100 * OUTLIERS
    assert wrong > 0


@pytest.mark.parametrize("architecture", DISTINCT)
def test_weights_on_20_bits_fail_the_plain_bound(architecture: str) -> None:
    """A control with errors near the bound, in stock float32: weights on grids three bits narrower than they should."""
    found = []
    for seed in SEEDS:
        model, text = outlier_model(architecture, "plain", seed), text_of(seed)
        coarse = stock_scores(rounded(model, 20), text)
        found.append(
            errors(coarse.logprobs, stock_scores(model, text).logprobs, reference_scores(model, text).logprobs)
        )
    assert typical([e.ratio("rms") for e in found]) > PLAIN


@pytest.mark.parametrize(
    "case", ["residual channel 1e4", "MLP unit 1e4", "silent column", "weight 1e4 on a silent channel"]
)
@pytest.mark.parametrize("architecture", DISTINCT)
def test_an_outlier_leaves_stock_float32_accurate(architecture: str, case: str) -> None:
    """What makes the bounds meaningful: float32 keeps the digits that a row's grid could lose."""
    found = compare(outlier_model(architecture, case, 0), text_of(0), CONTEXT)
    assert found.logprobs.stock.rms < 3e-4 and found.logits.stock.rms < 3e-4


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_reference_is_float64_throughout(architecture: str) -> None:
    model, text = source_model(architecture), text_of(0)
    wide = in_float64(model)
    for module in wide.modules():
        if type(module) in ROTARIES:
            expected, _ = inverse_frequencies(model.config)
            assert torch.allclose(module.inv_freq, expected, rtol=1e-14, atol=0.0)
    expected = reference_scores(model, text)
    assert expected.logits.dtype == expected.logprobs.dtype == torch.float64
    # the guard can fail, and without it the reference would have the errors of float32
    with pytest.raises(TypeError, match="gave float32"), Float64():
        stock_scores(model, text)
    plain = stock_scores(copy.deepcopy(model).double(), text)
    difference = float((plain.logits - expected.logits).abs().max())
    assert (difference > 1e-8) == (architecture != "gpt2") and difference < 1e-3
