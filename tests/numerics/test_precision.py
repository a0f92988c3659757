"""Rounding on purpose: numbers as in torch, rows as in the definition, errors of the expected size, one set of bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.accuracy.distances import deterministic_scores
from ppo_repro.accuracy import Text, policy_scores, reference_scores, stock_scores
from ppo_repro.models.networks import make_policy, policy_logits, rounded_view
from ppo_repro.numerics import library
from ppo_repro.numerics.network import Lowered, lower
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.numerics.precision import FORMATS, NARROW, Precision, round_rows
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from tests.numerics.definition_rounding import rounded as rounded_by_definition
from tests.support.float32 import LARGEST, bits, tensor
from tests.support.models import CONTEXT, EVERY_FAMILY, ragged, scored, seeded, source_model, unequal

TORCH = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
STEPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3": 2.0**-4, "float8_e5m2": 2.0**-3, "int8": 0.5 / 127}


def unscaled(values: list[float], form: str) -> list[int]:
    return bits(round_rows(tensor(values), form, scaled=False))


def hard_cases(name: str) -> Tensor:
    """Numbers of a format, middles of neighbours, the float32 numbers beside both, and all finite bfloat16 numbers."""
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    every = every[torch.isfinite(every)]
    numbers = every.to(TORCH[name]).float().unique()
    numbers = numbers[torch.isfinite(numbers)]
    points = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    up, down = (torch.nextafter(points, torch.full_like(points, end)) for end in (math.inf, -math.inf))
    return torch.cat([points, up, down, every, tensor([LARGEST, -LARGEST, 0.0, -0.0])])


@pytest.mark.parametrize("name", TORCH)
def test_a_rounded_number_is_that_of_torch(name: str) -> None:
    x = hard_cases(name)
    # beyond the largest number of 8 bits torch gives infinity or NaN, and serving stacks the largest number
    within = x[x.abs() <= torch.finfo(TORCH[name]).max] if name in NARROW else x[torch.isfinite(x)]
    cast = within.to(TORCH[name]).float()
    assert bits(round_rows(within, name, scaled=False)) == bits(cast)
    for other in set(TORCH) - {name}:
        assert bits(round_rows(within, other, scaled=False)) != bits(cast), "another format would pass"


@pytest.mark.parametrize("name", FORMATS[1:])
def test_rows_are_those_of_the_definition_and_do_not_see_each_other(name: str) -> None:
    sizes = torch.exp2(torch.randint(-4, 11, (400, 1), generator=seeded(1)))
    x = torch.randn(400, 65, generator=seeded(0)) * sizes
    found, largest = round_rows(x, name), x.abs().amax(-1, keepdim=True)
    assert bits(found) == bits(torch.from_numpy(rounded_by_definition(name, x.numpy())))
    assert 0.01 * STEPS[name] < float(((found - x).abs() / largest).max()) < 1.01 * STEPS[name]
    assert bits(found) == bits(torch.cat([round_rows(row[None], name) for row in x]))


# ------------------------------------------------------------------------------------------ models that round

BFLOAT16 = Precision("bfloat16", "bfloat16", "float32", "bfloat16", "float32", "bfloat16")
# weights alone, then weights and activations; each format of a cache and of logits once
PRECISIONS = {
    "bfloat16 weights": Precision("bfloat16", "bfloat16"),
    "bfloat16": BFLOAT16,
    "float16 weights": Precision("float16", "float16", logits="float16"),
    "float16": Precision("float16", "float16", "float32", "float16", "float8_e5m2", "float16"),
    "e4m3 weights": Precision("float8_e4m3", "bfloat16"),
    "e4m3": Precision("float8_e4m3", "bfloat16", "float8_e4m3", "bfloat16", "float8_e4m3"),
    "e5m2 weights": Precision("float8_e5m2"),
    "e5m2": Precision("float8_e5m2", "float32", "float8_e5m2", "float32", "int8"),
    "int8 weights": Precision("int8"),
    "int8": Precision("int8", "float32", "int8", "float32", "float32", "int8"),
    "cache": Precision(kv_cache="bfloat16"),
    "logits": Precision(logits="float8_e4m3"),
}
every_precision = pytest.mark.parametrize(
    "precision",
    [pytest.param(p, id=n, marks=[] if n in ("bfloat16", "e4m3") else pytest.mark.slow) for n, p in PRECISIONS.items()],
)
PROMPTS, RESPONSES = ragged(5, 3)
TEXT = Text(PROMPTS, RESPONSES)


def rounded(precision: Precision, architecture: str = "qwen3", recompute: bool = False) -> PreTrainedModel:
    policy = make_policy(source_model(architecture), "deterministic", CONTEXT)
    return lower(policy, Lowered(CONTEXT, precision, recompute))


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@every_precision
def test_neither_the_batch_nor_threads_nor_the_cache_change_a_bit(precision: Precision) -> None:
    def logits(of: Precision, threads: int, micro_batch: int) -> Tensor:
        library.use_threads(threads)
        policy = rounded(of)
        with torch.no_grad():
            return scored(PROMPTS, RESPONSES, "none", micro_batch, lambda batch, *_: policy_logits(policy, batch))

    first = logits(precision, 1, 0)
    assert unequal(logits(precision, 2, 2), first) == 0 and unequal(logits(precision, 1, 1), first) == 0
    assert unequal(logits(Precision(), 1, 0), first) > 0, "any precision would pass"
    policy = rounded(precision)
    requests = [Request(tuple(prompt), seed) for seed, prompt in enumerate(PROMPTS)]
    expected = None
    for slots, chunk, prefix_cache in ((5, 0, True), (2, 3, False)):
        engine = TorchEngine(policy, frozenset([1]), "deterministic", CONTEXT, slots, chunk, prefix_cache)
        found = engine.generate(requests, Sampling(1.0, 0, 1.0, 7))
        text = Text(PROMPTS, [list(c.response_ids) for c in found])
        expected = policy_scores(policy, text).logprobs if expected is None else expected
        assert unequal(torch.cat([c.logprobs for c in found]), expected) == 0


@pytest.mark.parametrize("architecture", EVERY_FAMILY)
def test_a_view_rounds_as_stock_bfloat16_does_and_leaves_its_model_alone(architecture: str) -> None:
    policy = make_policy(source_model(architecture), "deterministic", CONTEXT)
    digest = weights_digest(policy.named_parameters())
    view = rounded_view(policy, BFLOAT16)
    assert [(n, id(p)) for n, p in view.named_parameters()] == [(n, id(p)) for n, p in policy.named_parameters()]
    found, plain = policy_scores(view, TEXT).logits, policy_scores(policy, TEXT).logits
    assert weights_digest(policy.named_parameters()) == digest
    assert unequal(plain, deterministic_scores(source_model(architecture), TEXT, CONTEXT).logits) == 0
    reference = reference_scores(source_model(architecture), TEXT).logits
    stock = stock_scores(source_model(architecture).bfloat16(), TEXT).logits
    # the same places are rounded but inside attention, and a flipped route weighs more than a rounding
    assert 1 / 3 < rms(found - reference) / rms(stock - reference) < 3
    assert rms(found - reference) > 100 * rms(plain - reference)
