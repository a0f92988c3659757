"""Mixtures of experts: the law for ties, routing weights, sums in a fixed order, and gradients by integers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.accuracy.distances import compare, compare_gradients, typical
from ppo_repro.accuracy.scores import Float64, Text, in_float64
from ppo_repro.errors import NumericsError, UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics import backend
from ppo_repro.numerics.gradient_bins import GradientBins
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers import experts
from ppo_repro.numerics.layers.experts import ExactExperts, ExactRouter, chosen_experts, dispatch, ordered_sum
from ppo_repro.numerics.layers.lowering import attach, forget_operands, lower
from ppo_repro.testing.small_models import MIXTURES, fill, mixtral_config, olmoe_config, random_sequences, small_model
from tests.support.in_order import sum_in_order
from tests.support.mixtures import reference
from tests.support.models import CONTEXT, ragged, seeded, source_model, unequal

every_mixture = pytest.mark.parametrize("architecture", MIXTURES)
SEEDS = range(3)
PLAIN, OUTLIERS = 2.0, 4.0  # largest ratios exact / stock, those of test_accuracy.py


def router(weight: Tensor, count: int, normalised: bool) -> ExactRouter:
    stock = nn.Module()
    stock.weight, stock.top_k, stock.norm_topk_prob = nn.Parameter(weight), count, normalised
    return ExactRouter(stock, "router")


def test_the_law_for_ties_by_hand() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -2.0, -1.0, -1.0], [5.0, 4.0, 9.0, 7.0]])
    assert chosen_experts(logits, 2).tolist() == [[1, 2], [0, 1], [0, 2], [2, 3]]
    assert chosen_experts(logits, 1).tolist() == [[1], [0], [0], [2]]
    assert chosen_experts(logits, 4).tolist() == [[0, 1, 2, 3]] * 4


@given(st.lists(st.lists(st.sampled_from([-2.5, -1.0, 0.0, 0.5, 7.0]), min_size=6, max_size=6), min_size=1), st.data())
def test_the_law_for_ties_is_a_sort_by_falling_logit_then_rising_index(
    rows: list[list[float]], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 6))
    expected = [sorted(sorted(range(6), key=lambda e: (-row[e], e))[:count]) for row in rows]
    assert chosen_experts(torch.tensor(rows), count).tolist() == expected


@pytest.mark.parametrize("kernels", ["eager", "float64"])
def test_a_router_with_equal_rows_takes_the_lower_index_whatever_else_is_computed(kernels: str) -> None:
    backend.use(kernels, 1)
    generator = seeded(1)
    weight = torch.randn(8, 24, generator=generator)
    weight[6] = weight[2]
    x = torch.randn(200, 24, generator=generator)
    chosen = router(weight, 3, True)(x)[2]
    six, two = ((chosen == e).any(-1) for e in (6, 2))
    assert not (six & ~two).any() and int((two & ~six).sum()) > 3 and int(six.sum()) > 3
    alone = torch.cat([router(weight, 3, True)(x[t : t + 1])[2] for t in range(len(x))])
    assert torch.equal(chosen, alone)


def test_routing_weights_by_hand() -> None:
    logits = [math.log(4.0), math.log(2.0), math.log(1.0), math.log(1.0)]
    x, weight = torch.ones(1, 1), torch.tensor(logits)[:, None]
    _, plain, chosen = router(weight, 2, False)(x)
    _, renormalised, _ = router(weight, 2, True)(x)
    assert chosen.tolist() == [[0, 1]]
    # logs are rounded to float32 and exp is one of float32
    assert torch.allclose(plain, torch.tensor([[0.5, 0.25]]), atol=3e-7, rtol=0)
    assert torch.allclose(renormalised, torch.tensor([[2 / 3, 1 / 3]]), atol=3e-7, rtol=0)


@pytest.mark.parametrize("kernels", ["eager", "float64"])
@pytest.mark.parametrize(("count", "normalised"), [(3, True), (3, False), (1, False), (6, True)])
def test_a_mixture_and_its_gradients_are_those_of_the_definition(count: int, normalised: bool, kernels: str) -> None:
    backend.use(kernels, 1)
    config = {"num_experts": 6, "num_experts_per_tok": count, "norm_topk_prob": normalised}
    source = small_model(olmoe_config(**config), 4)
    block = copy.deepcopy(source.model.layers[0].mlp).double()
    mixture = lower(source, CONTEXT).model.layers[0].mlp
    accumulator = GradientAccumulator(source.named_parameters())
    attach(source, accumulator)
    x = torch.randn(9, 48, generator=seeded(5))
    seed = torch.randn(9, 48, generator=seeded(6))
    wide = x.double().requires_grad_()
    parameters = block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj
    expected = reference(wide, *parameters, count, normalised)
    expected.backward(seed.double())
    for _ in range(2):
        accumulator.begin()
        narrow = x.clone().requires_grad_()
        found = mixture(narrow)
        found.backward(seed)
        gradients = accumulator.finish()
    assert gradients is not None and narrow.grad is not None and wide.grad is not None
    prefix = "model.layers.0.mlp."
    names = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    pairs = [(found, expected), (narrow.grad, wide.grad)]
    pairs += [(gradients[prefix + n], p.grad) for n, p in zip(names, parameters, strict=True)]
    for got, want in pairs:
        error = float((got.detach().double() - want.detach()).norm() / want.detach().norm())
        assert error < 2e-6, "a few roundings to float32 one after another: 6e-7 was measured"


def masked_gradient(x: Tensor, seed: Tensor, rows: slice, kind: type) -> dict[str, Tensor]:
    """Integer sums, or bins, of a mixture's gradients from some tokens, on grids that are given."""
    source = small_model(mixtral_config(), 2)
    mixture = lower(source, CONTEXT).model.layers[0].mlp
    collected = kind(source.named_parameters())
    if isinstance(collected, GradientAccumulator):
        collected.grids = {name: 4 for name in collected.parameters}
        collected.begin()
    attach(source, collected)
    mixture(x[rows].clone().requires_grad_()).backward(seed[rows])
    names = [n for n in collected.parameters if n.startswith("model.layers.0.mlp.")]
    if isinstance(collected, GradientAccumulator):
        return {n: collected.sum_of(n).clone() for n in names}
    return {n: collected.gradient(n) for n in names}


@pytest.mark.parametrize("kernels", ["eager", "float64"])
def test_a_tokens_share_of_an_experts_gradient_does_not_depend_on_other_tokens(kernels: str) -> None:
    backend.use(kernels, 1)
    x, seed = torch.randn(12, 48, generator=seeded(1)), torch.randn(12, 48, generator=seeded(2))
    whole = masked_gradient(x, seed, slice(None), GradientAccumulator)
    parts = [masked_gradient(x, seed, slice(t, t + 1), GradientAccumulator) for t in range(12)]
    for name, total in whole.items():
        assert int((total != 0).sum()) > total.numel() / 4
        assert torch.equal(total, sum((p[name] for p in parts[1:]), parts[0][name])), name
    backwards = masked_gradient(x.flip(0), seed.flip(0), slice(None), GradientBins)
    for name, gradient in masked_gradient(x, seed, slice(None), GradientBins).items():
        assert unequal(gradient, backwards[name]) == 0


def test_the_terms_of_a_token_are_added_by_rising_expert_index() -> None:
    generator = seeded(3)
    terms = torch.randn(5, 400, generator=generator).double() * 10.0 ** torch.randint(
        0, 12, (5, 400), generator=generator
    )
    # another order gives other sums, so the order has to be a law
    assert unequal(ordered_sum(terms), ordered_sum(terms.flip(0))) > 20
    assert unequal(ordered_sum(terms), sum_in_order(terms)) == 0


def test_rows_are_sorted_by_expert_and_found_again() -> None:
    chosen = torch.tensor([[1, 3], [0, 1], [1, 2]])
    way = dispatch(chosen, 5)
    assert way.tokens.tolist() == [1, 0, 1, 2, 2, 0] and way.counts == [1, 3, 1, 1, 0]
    assert way.tokens[way.places].tolist() == [[0, 0], [1, 1], [2, 2]]


def scores_alone_and_together(architecture: str) -> int:
    """How many logits differ between sequences one by one and all in one row, computed by the kernels in use."""
    policy = make_policy(source_model(architecture), "exact", CONTEXT)
    prompts, responses = ragged(8, 3)
    with torch.no_grad():
        together = policy_logits(policy, lay_out(prompts, responses, "none"))
        alone = [policy_logits(policy, lay_out([p], [r], "left")) for p, r in zip(prompts, responses, strict=True)]
    return unequal(together, torch.cat(alone))


@every_mixture
@pytest.mark.parametrize("kernels", ["eager", "float64"])
def test_what_else_is_in_the_batch_changes_no_bit(architecture: str, kernels: str) -> None:
    backend.use(kernels, 1)
    assert scores_alone_and_together(architecture) == 0


def _by_batch(logits: Tensor, count: int) -> Tensor:
    """A law for ties broken on purpose: with many rows the higher index wins."""
    if len(logits) < 20:
        return chosen_experts(logits, count)
    return (logits.shape[1] - 1 - chosen_experts(logits.flip(-1), count)).sort(-1).values


@pytest.mark.parametrize(("law", "differs"), [(chosen_experts, False), (_by_batch, True)])
def test_a_law_for_ties_that_sees_the_batch_is_found(
    law: Callable[[Tensor, int], Tensor], differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: all rows of a router are equal, so every choice is a tie."""
    source = source_model("mixtral")
    for layer in source.model.layers:
        layer.mlp.gate.weight.data[:] = layer.mlp.gate.weight.data[0]
    monkeypatch.setattr("tests.numerics.layers.test_experts.source_model", lambda _: source)
    monkeypatch.setattr(experts, "chosen_experts", law)
    assert (scores_alone_and_together("mixtral") > 0) is differs


def outlier_mixture(architecture: str, seed: int, kind: str) -> PreTrainedModel:
    """A random mixture with a large channel that its readers silence, or an expert's unit of 1e3."""
    model = small_model(MIXTURES[architecture](), seed)
    layer = model.model.layers[1]
    with torch.no_grad():
        if kind == "silent channel":
            layer.post_attention_layernorm.weight[3] = 1e4
            layer.mlp.gate.weight[:, 3] *= 1e-6
            layer.mlp.experts.gate_up_proj[:, :, 3] *= 1e-6
        elif kind == "unit":
            half = layer.mlp.experts.gate_up_proj.shape[1] // 2
            layer.mlp.experts.gate_up_proj[:, half + 5] *= 1e3
            layer.mlp.experts.down_proj[:, :, 5] *= 1e-3
        elif kind == "channel of a weight":
            layer.post_attention_layernorm.weight[3] = 1e-6
            layer.mlp.experts.gate_up_proj[:, :, 3] *= 1e4
    return model


def text_of(seed: int) -> Text:
    return Text(*random_sequences(seed, 8, 40))


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("qwen3_moe", "plain"), ("olmoe", "silent channel")]
    + [pytest.param(a, "plain", marks=pytest.mark.slow) for a in ("mixtral", "olmoe")]
    + [pytest.param("mixtral", "unit", marks=pytest.mark.slow)]
    + [pytest.param("qwen3_moe", "channel of a weight", marks=pytest.mark.slow)],
)
def test_log_probs_and_gradients_are_as_close_to_float64_as_those_of_stock_float32(
    architecture: str, kind: str
) -> None:
    bound = PLAIN if kind == "plain" else OUTLIERS
    models = [(outlier_mixture(architecture, seed, kind), text_of(seed)) for seed in SEEDS]
    found = [compare(model, text, CONTEXT) for model, text in models]
    assert typical([c.logprobs.ratio("rms") for c in found]) <= bound
    assert typical([c.logprobs.ratio("largest") for c in found]) <= bound
    assert all(c.greedy.wrong == 0 and c.greedy.unresolved < c.greedy.tokens / 20 for c in found)
    assert typical([compare_gradients(model, text, CONTEXT).ratio() for model, text in models]) <= bound


@every_mixture
def test_routes_are_those_of_float64_where_float32_can_tell(architecture: str) -> None:
    """Each layer's router on the inputs that float64 gives it; a near-tie is a gap below float32's rounding."""
    source = source_model(architecture, 1)
    policy, compared = make_policy(source, "exact", CONTEXT), 0
    wide = in_float64(source)
    with Float64(), torch.no_grad():
        seen: list[tuple[str, Tensor, Tensor]] = []
        routers = [(n, m) for n, m in wide.named_modules() if n.endswith("mlp.gate")]
        for name, module in routers:
            module.register_forward_hook(lambda _, args, out, name=name: seen.append((name, args[0], out[0])))
        wide(input_ids=torch.randint(0, 89, (4, 40), generator=seeded(2)), use_cache=False)
    assert len(seen) == len(routers) > 0
    for name, x, logits in seen:
        mine = policy.get_submodule(name)
        top = logits.topk(mine.top_k + 1, -1)
        # the inputs themselves are rounded to float32 here, and a logit is a sum of 48 products
        clear = top.values[:, -2] - top.values[:, -1] > 1e-5
        expected = top.indices[:, :-1].sort(-1).values
        got = mine(x.reshape(-1, x.shape[-1]).float())[2]
        assert torch.equal(got[clear], expected[clear]) and int(clear.sum()) > 0.99 * len(clear)
        compared += int(clear.sum())
    assert compared > 150


def test_a_router_that_is_not_finite_is_named() -> None:
    with pytest.raises(NumericsError, match="router"):
        router(torch.full((4, 3), 3e38), 2, True)(torch.full((1, 3), 3e38))
    with pytest.raises(NumericsError, match="gate_up_proj of expert 1"):
        model = source_model("mixtral")
        with torch.no_grad():
            model.model.layers[0].mlp.experts.gate_up_proj[1, 0, 0] = math.inf
        block = lower(model, CONTEXT).model.layers[0].mlp
        block.experts(torch.ones(1, 48), torch.ones(1, 2), torch.tensor([[0, 1]]))


def test_clipped_queries_and_keys_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"clip_qkv = 0\.5: exact numerics do not support it"):
        make_policy(small_model(olmoe_config(clip_qkv=0.5), 0), "exact", CONTEXT)


def test_every_weight_of_a_mixture_is_prepared_and_forgotten() -> None:
    model = lower(small_model(mixtral_config(), 0), CONTEXT)
    parts = [m for m in model.modules() if isinstance(m, ExactExperts)]
    assert [len(p.prepared_down) for p in parts] == [4, 4]
    fill(model, 1)
    with torch.no_grad():
        policy_logits(model, lay_out([[3, 4]], [[5, 6]], "right"))
    held = [p for part in parts for p in (*part.prepared_gate_up, *part.prepared_down) if p._prepared]
    forget_operands(model)
    assert held and not any(p._prepared for p in held)
