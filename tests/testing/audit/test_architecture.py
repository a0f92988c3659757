"""A stack that leaves an option of the architecture out: the right side is named, and the option, on many families."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.testing.audit.audit import Audit, audit
from ppo_repro.testing.audit.causes.models import of_models
from ppo_repro.testing.audit.patches import patched
from ppo_repro.testing.audit.stack import StackModel, StackSampling
from tests.testing.audit.families import FAMILIES, made
from tests.testing.audit.material import Material, cause_of

Fault = Callable[[PreTrainedModel], PreTrainedModel]


def config(**changes: Any) -> Fault:
    """The same weights in a model of another configuration, as its class builds it; `a__b` is an entry of a dict."""

    def fault(model: PreTrainedModel) -> PreTrainedModel:
        other = copy.deepcopy(model.config)
        for path, value in changes.items():
            field, _, key = path.partition("__")
            setattr(other, field, {**getattr(other, field), key: value} if key else value)
        built = type(model)(other).eval()
        built.load_state_dict(model.state_dict(), strict=False)
        return built

    return fault


def code(change: Callable[[Any], object]) -> Fault:
    """A copy of the model whose modules are changed."""

    def fault(model: PreTrainedModel) -> PreTrainedModel:
        other = copy.deepcopy(model)
        with torch.no_grad():
            change(other)
        return other

    return fault


def each(name: str, change: Callable[[Any], object]) -> Fault:
    """A change of each module with a name that ends so."""

    def of(model: Any) -> None:
        for path, module in list(model.named_modules()):
            if path.endswith(name):
                change(module)

    return code(of)


def no_norms(*names: str) -> Fault:
    def of(model: Any) -> None:
        for path, _ in list(model.named_modules()):
            if path.rpartition(".")[2] in names:
                model.set_submodule(path, nn.Identity())

    return code(of)


def interleaved(model: PreTrainedModel) -> PreTrainedModel:
    """Rows of queries and keys in the order that turns neighbours into halves."""

    def change(linear: Any) -> None:
        x = linear.weight.view(-1, 12, linear.in_features)
        linear.weight.copy_(torch.cat([x[:, 0::2], x[:, 1::2]], 1).reshape_as(linear.weight))

    return each("k_proj", change)(each("q_proj", change)(model))


def equally(model: Any) -> None:
    """Experts with equal weights."""
    for module in [m for m in model.modules() if "Router" in type(m).__name__]:
        module.register_forward_hook(lambda router, given, out: (out[0], torch.full_like(out[1], 1 / 3), out[2]))


def tiled(model: Any) -> None:
    """Heads of queries in the order in which head h uses key/value head h % 2."""
    for attention in [m for m in model.modules() if type(m).__name__.endswith("Attention")]:
        for linear, dim in ((attention.q_proj, 0), (attention.o_proj, 1)):
            heads = linear.weight.chunk(4, dim)
            linear.weight.copy_(torch.cat([heads[h] for h in (0, 2, 1, 3)], dim))


DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
CASES: dict[str, tuple[str, Fault, str]] = {
    "attention soft cap": ("gemma2", config(attn_logit_softcapping=None), "attn_logit_softcapping"),
    "final soft cap": ("gemma2", config(final_logit_softcapping=None), "final_logit_softcapping"),
    "sliding window": ("gemma2", config(layer_types=["full_attention"] * 2), "layer_types"),
    "window in other layers": ("gemma2", config(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    "window one too wide": ("mistral", config(sliding_window=6), "sliding_window 6 instead of 5"),
    "no window": ("mistral", config(sliding_window=None), "attention without its sliding window (sliding_window)"),
    "query_pre_attn_scalar": ("gemma2", config(query_pre_attn_scalar=16), "query_pre_attn_scalar 16 instead of 24"),
    "1 + weight": ("gemma2", each("norm", lambda n: n.weight.sub_(1.0)), "norms that scale by weight"),
    "embedding scale": ("gemma2", each("embed_tokens", lambda e: e.embed_scale.fill_(1.0)), "embeddings without"),
    "q and k norms": ("qwen3", no_norms("q_norm", "k_norm"), "without the norms"),
    "q and k norms, whole": ("olmo2", no_norms("q_norm", "k_norm"), "without the norms"),
    "q norm": ("qwen3", no_norms("q_norm"), "without the norm model.layers.*.self_attn.q_norm"),
    "attention bias": ("llama3", config(attention_bias=False), "attention_bias"),
    "attention bias that no field names": (
        "qwen2",
        each("_proj", lambda p: p.bias is not None and p.bias.zero_()),
        "without",
    ),
    "rope_theta": ("qwen3", config(rope_parameters__rope_theta=1e6), "rope_parameters.rope_theta 1e+06"),
    "rope theta of the other layers": (
        "gemma3",
        config(rope_parameters__sliding_attention={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
        "rope_parameters.sliding_attention",
    ),
    "rope linear": ("linear", config(rope_parameters=DEFAULT), "rope_parameters"),
    "rope llama3": ("llama3", config(rope_parameters=DEFAULT), "rope_parameters"),
    "rope yarn": ("yarn", config(rope_parameters=DEFAULT), "rope_parameters"),
    "yarn's factor of attention": (
        "yarn",
        config(rope_parameters__attention_factor=1.0),
        "rope_parameters.attention_factor",
    ),
    "partial rotary": ("gpt_neox", config(rope_parameters__partial_rotary_factor=1.0), "partial_rotary_factor"),
    "partial rotary, phi": ("phi", config(rope_parameters__partial_rotary_factor=1.0), "partial_rotary_factor"),
    "interleaved rope": ("yarn", interleaved, "rotary positions in the other order"),
    "logit scale": ("cohere", config(logit_scale=1.0), "logit_scale"),
    "logit scale 2": ("cohere2", config(logit_scale=1.0), "logit_scale"),
    "q and k norms, cohere": ("cohere", no_norms("q_norm", "k_norm"), ""),
    "granite embeddings": ("granite", config(embedding_multiplier=1.0), "embedding_multiplier"),
    "granite residuals": ("granite", config(residual_multiplier=1.0), "residual_multiplier"),
    "granite logits": ("granite", config(logits_scaling=1.0), "logits_scaling"),
    "granite attention": ("granite", config(attention_multiplier=12**-0.5), "attention_multiplier 0.2887"),
    "norm epsilon": ("qwen3", config(rms_norm_eps=1e-5), "rms_norm_eps"),
    "tied output": (
        "llama3",
        code(lambda m: m.lm_head.weight.copy_(m.model.embed_tokens.weight)),
        "the embedding as output matrix",
    ),
    "norm_topk_prob": ("qwen3_moe", config(norm_topk_prob=False), "norm_topk_prob"),
    "norm_topk_prob that is not asked": ("olmoe", config(norm_topk_prob=True), "norm_topk_prob"),
    "experts": ("olmoe", config(num_experts_per_tok=2), "num_experts_per_tok"),
    "parallel residual": ("gpt_neox", config(use_parallel_residual=False), "use_parallel_residual"),
    "sinks": ("gpt_oss", each("self_attn", lambda a: a.sinks.fill_(-torch.inf)), "self_attn.sinks"),
    "gelu": ("gpt_neox", config(hidden_act="gelu_pytorch_tanh"), "hidden_act gelu_pytorch_tanh instead of gelu"),
    "gelu, gemma": ("gemma2", config(hidden_activation="gelu"), "hidden_activation gelu instead of"),
    "deepseek factor": ("deepseek", config(routed_scaling_factor=1.0), "routed_scaling_factor"),
    "deepseek groups": ("deepseek", config(n_group=1), "n_group"),
    "DeepSeek's correction": ("deepseek", each("gate", lambda g: g.e_score_correction_bias.zero_()), "e_score"),
    "shared experts": (
        "deepseek",
        each("shared_experts", lambda e: e.down_proj.weight.zero_()),
        "without the shared experts",
    ),
    "equal experts": ("mixtral", code(equally), "experts weighed equally"),
    "scale of attention": (
        "qwen3",
        each("self_attn", lambda a: setattr(a, "scaling", 1.0)),
        "self_attn.scaling 1.0 instead of 0.25",
    ),
    "norms with a mean": (
        "qwen3",
        each("norm", lambda n: n.register_forward_pre_hook(lambda _, x: (x[0] - x[0].mean(-1, keepdim=True),))),
        "norms that subtract the mean",
    ),
    "norms without a mean": (
        "gpt_neox",
        each(
            "norm",
            lambda n: n.register_forward_hook(
                lambda m, x, out: x[0] * (x[0].square().mean(-1, keepdim=True) + m.eps).rsqrt() * m.weight + m.bias
            ),
        ),
        "norms that do not subtract the mean",
    ),
    "heads of keys": ("yarn", code(tiled), "queries with the keys of other heads"),
    "both soft caps": (
        "gemma2",
        config(attn_logit_softcapping=None, final_logit_softcapping=None),
        "(attn_logit_softcapping) and logits without their soft cap (final_logit_softcapping)",
    ),
    "all of Granite": (
        "granite",
        config(embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0),
        "(embedding_multiplier) and logits without their divisor (logits_scaling) and residuals",
    ),
    "scale by layer": ("gpt2", config(scale_attn_by_inverse_layer_idx=False), "scale_attn_by_inverse_layer_idx"),
}
ROTARY = ("qwen3", "llama3", "yarn", "gpt_neox", "gpt_oss", "olmoe")
QUICK = {"attention soft cap": True, "interleaved rope": False}  # whether the sampler is the wrong side
GIVEN = StackSampling(0.8)


def judged(m: Material, sampler: PreTrainedModel, trainer: PreTrainedModel) -> Audit:
    sides = (m.logprobs(m.logits(model)) for model in (sampler, trainer))
    return audit(StackModel(m.model, {}), m.dump(*sides), GIVEN)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_side_that_leaves_an_option_out_is_named_and_the_option(name: str) -> None:
    family, fault, words = CASES[name]
    m = made(family)
    other, is_sampler = fault(m.model), QUICK.get(name, list(CASES).index(name) % 2 == 0)
    found = judged(m, other, m.model) if is_sampler else judged(m, m.model, other)
    wrong, right = (found.sampler, found.trainer) if is_sampler else (found.trainer, found.sampler)
    assert right.is_right
    assert not wrong.is_right
    assert words in cause_of(wrong), cause_of(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_option_left_out_is_right_on_both_sides(family: str) -> None:
    m = made(family)
    found = judged(m, m.model, m.model)
    assert found.sampler.is_right
    assert found.trainer.is_right


def narrow_router(model: Any) -> None:
    """Routers whose product is in bfloat16; each family's own softmax and choice of experts follow in float32."""
    for module in [m for m in model.modules() if "Router" in type(m).__name__]:
        exact = module.weight.detach().clone()

        def rounded(router: Any, given: Any, exact: Tensor = exact) -> tuple[Tensor, ...]:
            router.weight.copy_(exact.bfloat16())
            return (given[0].bfloat16().float(), *given[1:])

        module.register_forward_pre_hook(rounded)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "gpt_oss", "deepseek"])
def test_a_router_in_bfloat16_is_named(family: str) -> None:
    m = made(family)
    found = judged(m, code(narrow_router)(m.model), m.model)
    assert found.trainer.is_right
    assert cause_of(found.sampler) == "unknown" or "router computed in bfloat16" in cause_of(found.sampler)


def narrow_table(model: Any) -> None:
    """Cosines and sines in bfloat16."""
    for module in [m for m in model.modules() if "RotaryEmbedding" in type(m).__name__]:
        module.register_forward_hook(lambda rotary, given, out: tuple(x.bfloat16().float() for x in out))


def narrow_frequencies(model: Any) -> None:
    """What `model.to(torch.bfloat16)` does to buffers, and `model.float()` does not undo."""
    for module in [m for m in model.modules() if "RotaryEmbedding" in type(m).__name__]:
        module.bfloat16().float()


@pytest.mark.parametrize("family", [n if n == "qwen3" else pytest.param(n, marks=pytest.mark.slow) for n in ROTARY])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (narrow_table, "rotary table computed in bfloat16, all else in float32"),
        pytest.param(narrow_frequencies, "rotary frequencies rounded to bfloat16", marks=pytest.mark.slow),
        pytest.param(
            lambda model: model.bfloat16().float(),
            "weights and rotary frequencies rounded to bfloat16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rotary_positions_in_bfloat16_are_named(family: str, fault: Any, words: str) -> None:
    m = made(family)
    found = judged(m, code(fault)(m.model), m.model)
    assert found.trainer.is_right
    assert cause_of(found.sampler) == words


@pytest.mark.slow
@pytest.mark.parametrize(
    "logprobs",
    [
        lambda x: (x / 0.8).bfloat16().log_softmax(-1),
        lambda x: (x.bfloat16() / 0.8).log_softmax(-1),
        lambda x: (x / 0.8).bfloat16().softmax(-1).log(),
        lambda x: (x / 0.8).bfloat16().softmax(-1).float().log(),
        lambda x: (x / 0.8).bfloat16().float().log_softmax(-1),
        lambda x: x.bfloat16().float().div(0.8).log_softmax(-1),
    ],
)
def test_a_log_softmax_in_bfloat16_has_no_other_cause(logprobs: Callable[[Tensor], Tensor]) -> None:
    m = made("qwen3")
    values = [logprobs(x)[range(len(r)), r].double() for x, r in zip(m.plain, m.responses, strict=True)]
    found = audit(StackModel(m.model, {}), m.dump(values, m.logprobs()), GIVEN)
    assert found.trainer.is_right
    assert cause_of(found.sampler) == "unknown" or cause_of(found.sampler).startswith("logits rounded to bfloat16")


@torch.no_grad()
def test_the_search_leaves_the_model_and_its_code_as_they_were() -> None:
    m = made("qwen3")
    code = sys.modules[type(m.model).__module__]
    before = m.logits(), dict(vars(code)), [set(vars(module)) for module in m.model.modules()]
    assert not judged(m, each("norm", lambda n: n.weight.mul_(1.1))(m.model), m.model).sampler.is_right
    assert all(torch.equal(a, b) for a, b in zip(m.logits(), before[0], strict=True))
    assert dict(vars(code)) == before[1]
    assert [set(vars(module)) for module in m.model.modules()] == before[2]


def test_a_patch_leaves_an_attribute_that_is_none_as_it_was() -> None:
    """Code of transformers has None for a kernel that is not installed."""
    code = SimpleNamespace(kernel=None)
    with patched(code, "kernel", abs), patched(code, "other", abs):
        assert vars(code) == {"kernel": abs, "other": abs}
    assert vars(code) == {"kernel": None}


@pytest.mark.parametrize("family", ["llama3", pytest.param("stablelm", marks=pytest.mark.slow)])
def test_each_option_is_tried_once(family: str) -> None:
    """A field may take 1 or 1.0, and the biases of one layer may be all biases."""
    words = [cause.words for cause in of_models(made(family).model, {})]
    assert len(set(words)) == len(words)
