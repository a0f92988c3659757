"""Rounded layers: the law's numbers beside an emulation in float64, one result under every layout, old ones without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.accuracy.scores import Text, exact_scores, policy_scores, reference_scores, stock_scores
from ppo_repro.errors import UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import checkpoint_gradients, make_policy, policy_logits
from ppo_repro.numerics import backend
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.lowering import attach
from ppo_repro.numerics.layers.precision import Precision
from ppo_repro.numerics.layers.rounded import round_model, view_of
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.optimizer import collect, weights_digest
from ppo_repro.numerics.trunk.weights import unpack
from ppo_repro.ranks import ALONE
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from tests.support.models import CONTEXT, MIXTURES, ragged, scored, source_model, unequal
from tests.support.number_formats import Formats, Qwen3InFloat64

BFLOAT16 = Precision("bfloat16", "bfloat16", None, "bfloat16", None, "bfloat16")
# weights alone, then weights and activations; each format of a cache and of logits once
PRECISIONS = {
    "bfloat16 weights": Precision("bfloat16", "bfloat16"),
    "bfloat16": BFLOAT16,
    "float16 weights": Precision("float16", "float16", logits="float16"),
    "float16": Precision("float16", "float16", None, "float16", "float8_e5m2", "float16"),
    "e4m3 weights": Precision("float8_e4m3", "bfloat16"),
    "e4m3": Precision("float8_e4m3", "bfloat16", "float8_e4m3", "bfloat16", "float8_e4m3"),
    "e5m2 weights": Precision("float8_e5m2"),
    "e5m2": Precision("float8_e5m2", None, "float8_e5m2", None, "int8"),
    "int8 weights": Precision("int8"),
    "int8": Precision("int8", None, "int8", None, None, "int8"),
    "cache": Precision(kv_cache="bfloat16"),
    "logits": Precision(logits="float8_e4m3"),
}
every_precision = pytest.mark.parametrize(
    "precision",
    [pytest.param(p, id=n, marks=[] if p == BFLOAT16 else pytest.mark.slow) for n, p in PRECISIONS.items()],
)
PROMPTS, RESPONSES = ragged(5, 3)
TEXT = Text(PROMPTS, RESPONSES)


def rounded(precision: Precision, architecture: str = "qwen3") -> PreTrainedModel:
    return round_model(make_policy(source_model(architecture), "exact", CONTEXT), precision, "test")


def emulated(precision: Precision) -> tuple[Qwen3InFloat64, dict[str, Tensor]]:
    source = source_model("qwen3")
    weights = {name: p.detach().double().requires_grad_() for name, p in source.named_parameters()}
    names = ("weights", "other_weights", "linear_inputs", "activations", "kv_cache", "logits", "gradients")
    formats = (getattr(precision, name) for name in names)
    return Qwen3InFloat64(weights, source.config, Formats(*formats)), weights


def emulated_logprobs(model: Qwen3InFloat64) -> Tensor:
    parts = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model.logits([*prompt, *response[:-1]])[len(prompt) - 1 :]
        parts.append(logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(parts)


def test_the_emulation_without_rounding_is_the_model_in_float64() -> None:
    reference = reference_scores(source_model("qwen3"), TEXT).logprobs
    with torch.no_grad():
        found = emulated_logprobs(emulated(Precision())[0])
    assert float((found - reference).abs().max()) < 1e-12


@every_precision
def test_the_error_is_that_of_the_emulation_in_float64(precision: Precision) -> None:
    reference = reference_scores(source_model("qwen3"), TEXT).logprobs
    with torch.no_grad():
        expected = emulated_logprobs(emulated(precision)[0]) - reference
    found = policy_scores(rounded(precision), TEXT).logprobs.double() - reference
    assert float(found.abs().max()) > 1e-4, "nothing was rounded"
    # float32 moves a number across a rounding boundary now and then; all other tokens have the emulation's error
    distance = (found - expected).abs()
    assert float(distance.median()) < 2e-5
    assert float(distance.square().mean().sqrt()) < 0.35 * float(expected.square().mean().sqrt())


def test_more_rounding_is_a_larger_error_of_the_expected_size() -> None:
    reference = reference_scores(source_model("qwen3"), TEXT).logprobs

    def rms(precision: Precision) -> float:
        return float((policy_scores(rounded(precision), TEXT).logprobs - reference).square().mean().sqrt())

    # spacing of numbers: 2^-8 in bfloat16, 2^-11 in float16, 2^-4 in e4m3, 2^-3 in e5m2, relative
    weights = {f: rms(Precision(f)) for f in ("float16", "bfloat16", "float8_e4m3", "float8_e5m2", "int8")}
    assert 4 < weights["bfloat16"] / weights["float16"] < 16
    assert 7 < weights["float8_e4m3"] / weights["bfloat16"] < 32
    assert 1.2 < weights["float8_e5m2"] / weights["float8_e4m3"] < 4
    assert weights["int8"] < weights["float8_e4m3"]
    assert rms(Precision()) < 1e-5 < weights["float16"]


@every_precision
def test_padding_micro_batches_threads_and_backends_change_no_bit(precision: Precision) -> None:
    def logits(kernels: str, threads: int, padding: str, micro_batch: int) -> Tensor:
        backend.use(kernels, threads)
        policy = rounded(precision)
        with torch.no_grad():
            return scored(PROMPTS, RESPONSES, padding, micro_batch, lambda batch, *_: policy_logits(policy, batch))

    first = logits("eager", 1, "right", 0)
    for layout in (("float64", 1, "none", 0), ("float64", 2, "left", 2), ("eager", 1, "none", 3)):
        assert unequal(logits(*layout), first) == 0, layout
    coarser = replace(precision, activations="float16", logits=None)
    if coarser != precision:
        precision = coarser
        assert unequal(logits("eager", 1, "right", 0), first) > 0, "any precision would pass"


@every_precision
def test_sampling_over_a_cache_gives_the_bits_of_a_whole_pass(precision: Precision) -> None:
    backend.use("float64", 1)
    policy = rounded(precision)
    requests = [Request(tuple(prompt), seed) for seed, prompt in enumerate(PROMPTS)]
    by_layout = []
    for slots, chunk, prefix_cache in ((5, 0, True), (2, 3, False)):
        engine = TorchEngine(policy, frozenset([1]), "exact", CONTEXT, slots, chunk, prefix_cache)
        by_layout.append(engine.generate(requests, Sampling(1.0, 0, 1.0, 7)))
    first, second = ([c.response_ids for c in found] for found in by_layout)
    assert first == second
    text = Text(PROMPTS, [list(ids) for ids in first])
    expected = policy_scores(policy, text).logprobs
    for found in by_layout:
        assert unequal(torch.cat([c.logprobs for c in found]), expected) == 0
    assert unequal(policy_scores(rounded(Precision()), text).logprobs, expected) > 0


def gradients(policy: PreTrainedModel, micro_batch: int, padding: str) -> dict[str, Tensor]:
    accumulator = GradientAccumulator(policy.named_parameters())
    attach(policy, accumulator)

    def backward() -> None:
        def score(batch, *_):  # type: ignore[no-untyped-def]
            logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "exact")
            torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / TEXT.tokens()))
            return logprobs.detach()

        scored(PROMPTS, RESPONSES, padding, micro_batch, score)

    return collect(accumulator, backward, lay_out(PROMPTS, RESPONSES, "right").real_tokens, ALONE)[0]


@pytest.mark.parametrize(
    "form", [None, *(pytest.param(f, marks=pytest.mark.slow) for f in ("bfloat16", "float8_e5m2"))]
)
def test_gradients_pass_through_and_are_rounded_where_that_is_asked(form: str | None) -> None:
    precision = replace(BFLOAT16, gradients=form)
    model, weights = emulated(precision)
    (-emulated_logprobs(model).sum() / TEXT.tokens()).backward()
    found = gradients(rounded(precision), 0, "right")
    plain = gradients(rounded(BFLOAT16), 0, "right")
    for name, gradient in found.items():
        expected = weights[name].grad
        assert expected is not None
        scale = float(expected.abs().max())
        off = float((gradient.double() - expected).abs().median()) / scale
        # numbers that float32 moves across a boundary change later ones by a step of the format: of bfloat16 2^-8 of a
        # number, of e5m2 2^-3
        assert off < 3e-3 * (2**5 if form == "float8_e5m2" else 1), name
        assert (unequal(gradient, plain[name]) > 0) == (form is not None), name


@pytest.mark.slow
def test_gradients_are_the_same_under_every_layout() -> None:
    precision = replace(BFLOAT16, gradients="bfloat16", linear_inputs="float8_e4m3")
    first = gradients(rounded(precision), 0, "right")
    recomputed = rounded(precision)
    checkpoint_gradients(recomputed)
    for policy, micro_batch, padding in ((rounded(precision), 2, "none"), (recomputed, 1, "left")):
        found = gradients(policy, micro_batch, padding)
        assert {name for name in first if unequal(first[name], found[name])} == set()
    backend.use("float64", 2)
    found = gradients(rounded(precision), 3, "left")
    assert {name for name in first if unequal(first[name], found[name])} == set()
    assert {name for name in first if unequal(first[name], gradients(rounded(BFLOAT16), 3, "left")[name])}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "qwen2 sliding"])
def test_the_families_keep_names_parameters_and_bits_of_what_is_not_rounded(architecture: str) -> None:
    source = make_policy(source_model(architecture), "exact", CONTEXT)
    policy = round_model(view_of(source), BFLOAT16, "test")
    assert [(n, id(p)) for n, p in policy.named_parameters()] == [(n, id(p)) for n, p in source.named_parameters()]
    assert weights_digest(policy.named_parameters()) == weights_digest(source.named_parameters())
    before = policy_scores(make_policy(source_model(architecture), "exact", CONTEXT), TEXT).logprobs
    assert unequal(policy_scores(source, TEXT).logprobs, before) == 0, "the view changed its model"
    assert 1e-4 < float((policy_scores(policy, TEXT).logprobs - before).abs().max()) < 0.5


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_rounded_mixture_has_the_error_of_stock_bfloat16_and_the_same_bits_in_every_layout(architecture: str) -> None:
    model = rounded(BFLOAT16, architecture)
    with torch.no_grad():
        together, alone = (
            scored(PROMPTS, RESPONSES, *layout, lambda batch, *_: policy_logits(model, batch))
            for layout in (("none", 0), ("left", 1))
        )
    assert unequal(together, alone) == 0
    source = source_model(architecture)
    reference = reference_scores(source, TEXT).logits
    stock = stock_scores(source_model(architecture).bfloat16(), TEXT).logits
    rms = [float((x.double() - reference).square().mean().sqrt()) for x in (together, stock, policy_of(source))]
    # the same places are rounded but inside attention, and a flipped route weighs more than a rounding
    assert 1 / 3 < rms[0] / rms[1] < 3 and rms[0] > 100 * rms[2]


def policy_of(source: PreTrainedModel) -> Tensor:
    """Logits without rounding."""
    return exact_scores(source, TEXT, CONTEXT).logits


def test_a_changed_weight_is_rounded_again() -> None:
    source = make_policy(source_model("qwen3"), "exact", CONTEXT)
    view = round_model(view_of(source), BFLOAT16, "test")
    for seed in (0, 1, 2):
        source.load_state_dict(source_model("qwen3", seed).state_dict())
        expected = round_model(make_policy(source_model("qwen3", seed), "exact", CONTEXT), BFLOAT16, "test")
        assert unequal(policy_scores(view, TEXT).logprobs, policy_scores(expected, TEXT).logprobs) == 0


def test_without_rounding_the_model_and_its_path_stay() -> None:
    backend.use("float64", 1)
    policy = make_policy(source_model("qwen3"), "exact", CONTEXT)
    modules = [id(m) for m in policy.modules()]
    assert [id(m) for m in round_model(policy, Precision(), "test").modules()] == modules
    assert unpack(policy.model) is not None
    assert unpack(rounded(Precision(logits="bfloat16")).model) is not None
    for precision in PRECISIONS.values():
        assert precision.only_logits or unpack(rounded(precision).model) is None


@pytest.mark.parametrize("architecture", ["gemma", "gpt2", "gpt_neox"])
def test_other_structures_are_refused(architecture: str) -> None:
    with pytest.raises(UserError, match=r"^field: needs a Llama, .*, Mixtral or OLMoE model, not .*; remove it$"):
        round_model(make_policy(source_model(architecture), "exact", CONTEXT), BFLOAT16, "field")
