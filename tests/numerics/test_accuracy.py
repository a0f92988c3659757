"""Deterministic numerics are as close to the model in float64 as stock float32 is, with and without outliers.

Every ratio is deterministic / stock, the geometric mean over random models: an error of float32 is partly luck.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from experiments.benchmarks.float64 import GradientComparison, compare, compare_gradients, typical
from ppo_repro.models.networks import make_policy, rounded_view
from ppo_repro.numerics.rounding import NumberFormats
from ppo_repro.runs.accuracy import Text, measure
from tests.numerics.outliers import cases_of, linear_layers, outlier_model
from tests.support.models import CONFIGS, CONTEXT, MIXTURES, random_sequences

SEEDS, MORE_SEEDS = range(3), range(3, 11)
PLAIN, OUTLIERS = 1.5, 2.0  # largest ratios
WORST = 4.0  # largest ratio of the parameters with the largest errors, which may be sums that cancel
DISTINCT = ("qwen3", "gpt2", "qwen3_moe")
QUICK = {(a, "plain") for a in DISTINCT} | {("qwen3", c) for c in cases_of("qwen3")} | {("qwen3_moe", "MLP unit 1e4")}
ALL = [(a, c) for a in (*CONFIGS, *MIXTURES) for c in cases_of(a)]
subjects = pytest.mark.parametrize(
    ("architecture", "case"),
    [pytest.param(a, c, id=f"{a}: {c}", marks=[] if (a, c) in QUICK else pytest.mark.slow) for a, c in ALL],
)


def model_of(architecture: str, case: str, seed: int) -> PreTrainedModel:
    return outlier_model(architecture, case, seed)


def text_of(seed: int) -> Text:
    """Prompts and responses of 320 response tokens."""
    return Text(*random_sequences(seed, 8, 40))


def parameter_ratios(of: GradientComparison) -> list[float]:
    """Of each parameter whose gradient has an error in both numerics."""
    return [of.deterministic[name] / stock for name, stock in of.stock.items() if stock and of.deterministic[name]]


def assert_close(architecture: str, case: str, seeds: range) -> None:
    """Log-probs, greedy tokens and gradients; the bound of a case is that of its largest errors."""
    bound = PLAIN if case == "plain" else OUTLIERS
    found = [compare(model_of(architecture, case, seed), text_of(seed), CONTEXT) for seed in seeds]
    for kind in ("rms", "largest"):
        ratios = [c.logprobs.ratio(kind) for c in found]
        assert typical(ratios) <= bound, (kind, ratios)
    assert all(c.greedy.wrong == 0 and c.greedy.unresolved < c.greedy.tokens / 20 for c in found)
    gradients = [compare_gradients(model_of(architecture, case, seed), text_of(seed), CONTEXT) for seed in seeds]
    assert typical([r for c in gradients for r in parameter_ratios(c)]) <= bound
    worst = [c.ratio() for c in gradients]
    assert typical(worst) <= WORST, worst


@subjects
def test_log_probs_greedy_tokens_and_gradients_are_as_close_to_float64_as_stock_float32(
    architecture: str, case: str
) -> None:
    assert_close(architecture, case, SEEDS)


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "case"), ALL)
def test_more_models_are_as_accurate(architecture: str, case: str) -> None:
    assert_close(architecture, case, MORE_SEEDS)


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose matrices are rounded to bfloat16; a tied embedding shares its matrix."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in linear_layers(copied):
            weight.copy_(weight.to(torch.bfloat16))
    return copied


@pytest.mark.parametrize("architecture", DISTINCT[:2])
def test_a_model_in_bfloat16_fails_every_bound(architecture: str) -> None:
    """The negative control: deterministic numerics are given models rounded to bfloat16."""
    wrong = 0
    for seed in SEEDS:
        model, text = model_of(architecture, "plain", seed), text_of(seed)
        found = compare(model, text, CONTEXT, rounded(model))
        wrong += found.greedy.wrong
        assert min(found.logprobs.ratio("rms"), found.logprobs.ratio("largest")) > 100 * OUTLIERS
        gradients = compare_gradients(model, text, CONTEXT, rounded(model))
        assert gradients.ratio() > 100 * WORST
        assert typical(parameter_ratios(gradients)) > 100 * OUTLIERS
    assert wrong > 0


def bfloat16(policy: PreTrainedModel) -> PreTrainedModel:
    """The policy with weights and results of bfloat16, and exact products: what mixed precision has at best."""
    every = dict.fromkeys(("weights", "other_weights", "activations", "kv_cache"), "bfloat16")
    return rounded_view(policy, NumberFormats(**every))


@pytest.mark.parametrize("architecture", DISTINCT)
def test_precision_high_lies_between_float32_and_bfloat16(architecture: str) -> None:
    """Without outliers: 13 bits and a scale of 128 numbers against 8 bits and a scale of each."""
    source, text = outlier_model(architecture, "plain", 0), text_of(0)
    highest, high = (measure(make_policy(source, "deterministic", CONTEXT, p), text) for p in ("highest", "high"))
    narrow = measure(bfloat16(make_policy(source, "deterministic", CONTEXT)), text)
    assert 100 * highest.deterministic_rms < high.deterministic_rms < narrow.deterministic_rms / 4


@pytest.mark.parametrize("size", [30.0, 300.0, 1e4])
@pytest.mark.parametrize("architecture", DISTINCT)
def test_precision_high_keeps_what_lies_beside_a_residual_outlier(architecture: str, size: float) -> None:
    assert_below_bfloat16(outlier_model(architecture, "residual channel 1e4", 0, size))


@pytest.mark.parametrize("case", ["MLP unit 1e4", "weight 1e4 on a silent channel"])
@pytest.mark.parametrize("architecture", DISTINCT)
def test_precision_high_keeps_what_lies_beside_a_silent_outlier(architecture: str, case: str) -> None:
    assert_below_bfloat16(outlier_model(architecture, case, 0))


def assert_below_bfloat16(source: PreTrainedModel) -> None:
    text = text_of(0)
    high = measure(make_policy(source, "deterministic", CONTEXT, "high"), text)
    narrow = measure(bfloat16(make_policy(source, "deterministic", CONTEXT)), text)
    assert high.deterministic_rms < narrow.deterministic_rms
