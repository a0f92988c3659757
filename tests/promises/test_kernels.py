"""The C kernels add in the defined order, for every model family, instruction set, shape, batch and cache.

The definition is `ppo_repro/numerics/definition`. Controls: libraries of another order of sums, other slots.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from ppo_repro.numerics import build, families, library
from ppo_repro.numerics.definition import linear as linear_definition
from ppo_repro.numerics.definition.elementary import Array, F
from ppo_repro.numerics.definition.gradients import Contributions, join_slots, slot_sums
from ppo_repro.numerics.definition.model import Matrix, parameters
from ppo_repro.numerics.definition.network import forward
from ppo_repro.numerics.definition.network import gradients as gradients_by_definition
from ppo_repro.numerics.definition.product import Precision, product
from ppo_repro.numerics.definition.rounding import Rounding
from ppo_repro.numerics.definition.row_sums import row_sum
from ppo_repro.numerics.description import ACTIVATIONS
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.interface import ffi, ints, pointer
from ppo_repro.numerics.linear import linear
from ppo_repro.numerics.lowering import Lowered
from ppo_repro.numerics.network import Network
from ppo_repro.numerics.rounding import EXACT, NumberFormats
from ppo_repro.numerics.sequences import Rows, ragged, slots_of
from tests.support.broken import broken_library
from tests.support.definition import array, assert_same, model_from
from tests.support.models import CONFIGS, EVERY_FAMILY, MIXTURES, small_model
from tests.support.variants import ABLE, FASTEST, opened, using

FAMILIES = {**CONFIGS, **MIXTURES}
OTHERS = [variant for variant in ABLE if variant not in FASTEST.variants]
LENGTHS = (17, 133, 1, 40)
CONTEXT, SLOTS = 150, 8


class Case:
    """A trunk, sequences of tokens, and gradients of their hidden states, random but for the lengths."""

    def __init__(
        self, trunk: PreTrainedModel, lengths: Sequence[int], seed: int = 0, precision: Precision = "highest"
    ) -> None:
        rng = np.random.default_rng(seed)
        self.trunk, self.model, self.precision = trunk, model_from(trunk, CONTEXT, precision), precision
        vocabulary, width = self.model.embedding.shape
        self.ids = [rng.integers(0, vocabulary, n) for n in lengths]
        self.d_hidden = [rng.standard_normal((n, width)).astype(F) for n in lengths]

    @cache  # noqa: B019
    def by_definition(self) -> tuple[list[Array], dict[str, Array]]:
        """Hidden states, and gradients by name."""
        passed = [forward(self.model, sequence) for sequence in self.ids]
        return [of.hidden for of in passed], gradients_by_definition(self.model, passed, self.d_hidden, SLOTS)

    def by_kernels(
        self, each: int = 0, recompute: bool = False, slots: int = SLOTS
    ) -> tuple[list[Array], dict[str, Array]]:
        """The same as training computes it, in micro-batches of `each` sequences; 0: one batch."""
        count = len(self.ids)
        network = Network(self.trunk, Lowered(CONTEXT, recompute=recompute, precision=self.precision))
        sums, hidden = GradientSums(self.trunk.named_parameters(), slots), []
        for start in range(0, count, each or count):
            part = range(start, min(start + (each or count), count))
            batch = ragged([self.ids[i] for i in part], slots=slots_of(part, count, slots)).with_sums(sums)
            found, _ = network.over_batch(batch, ints(np.arange(len(batch.ids))))
            found.backward(torch.tensor(np.concatenate([self.d_hidden[i] for i in part])))
            hidden += [x.detach().numpy() for x in found.split(batch.lengths.tolist())]
        gradients, named = sums.finish(), copy.deepcopy(self.trunk)
        for name, parameter in named.named_parameters():
            parameter.data = gradients[name]
        return hidden, parameters(model_from(named, 1))

    def over_cache(self, chunks: Sequence[int], rounding: NumberFormats = EXACT) -> list[Array]:
        """Hidden states in chunks of these sizes in turn, the sequences in seats of a cache in another order."""
        network = Network(self.trunk, Lowered(CONTEXT, rounding, self.precision))
        network.prepare()
        cache, count = network.make_cache(len(self.ids) + 1, CONTEXT), len(self.ids)
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        past, found, turn = [0] * count, [list[Array]() for _ in self.ids], 0
        while going := [i for i in range(count) if past[i] < len(self.ids[i])]:
            ends = [past[i] + chunks[turn % len(chunks)] for i in going]
            batch = ragged(
                [self.ids[i][past[i] : e] for i, e in zip(going, ends, strict=True)], [past[i] for i in going]
            )
            states, _ = network.over_cache(batch, cache, [count - i for i in going])
            for i, part in zip(going, states.split(batch.lengths.tolist()), strict=True):
                found[i].append(part.numpy())
                past[i] += len(part)
            turn += 1
        return [np.concatenate(parts) for parts in found]

    def assert_kernels_are_the_definition(self, each: int = 0, recompute: bool = False) -> None:
        hidden, gradients = self.by_definition()
        found, found_gradients = self.by_kernels(each, recompute)
        for x, y in zip(found, hidden, strict=True):
            assert_same(x, y, "hidden states")
        assert found_gradients.keys() == gradients.keys()
        for name, x in gradients.items():
            assert_same(found_gradients[name], x, name)


def trunk_of(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    config = FAMILIES[family](**changes)
    config.max_position_embeddings = CONTEXT
    return small_model(config, seed).base_model


@cache
def case_of(family: str, precision: Precision = "highest") -> Case:
    return Case(trunk_of(family), LENGTHS, precision=precision)


HEAD_WIDTHS = (4, 8, 18, 64, 136)
# the parts of a GPT-NeoX head that rotate: pairs, so the kernels refuse an odd number of elements
ROTATING = {d: [part for part in (0.25, 0.5, 1.0) if d * part % 2 == 0] for d in HEAD_WIDTHS}


@st.composite
def trunks(draw: st.DrawFn) -> PreTrainedModel:
    """A trunk of any family with odd widths, one or two layers, and settings that change what is computed."""
    family = draw(st.sampled_from([name for name in FAMILIES if " " not in name]))
    known, fields = families.FAMILIES[family], vars(FAMILIES[family]())
    kv_heads, each = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, d, layers = kv_heads * each, draw(st.sampled_from(HEAD_WIDTHS)), draw(st.integers(1, 2))
    width, vocabulary = draw(st.sampled_from((1, 7, 16, 33, 130))), draw(st.sampled_from((3, 16, 97)))
    common: dict[str, Any] = {"vocab_size": vocabulary, "pad_token_id": draw(st.sampled_from((None, 0, 2)))}
    activation = draw(st.sampled_from(sorted(ACTIVATIONS)))
    if family == "gpt2":
        shape = {"n_embd": heads * d, "n_head": heads, "n_layer": layers, "n_inner": width}
        more = {"scale_attn_by_inverse_layer_idx": draw(st.booleans()), "activation_function": activation}
    else:
        hidden = heads * (d if family in ("gpt_neox", "olmoe") else draw(st.sampled_from((1, 3, 16, 17, 65))))
        shape = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
        shape |= {"moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size": width}
        more = {known.names.activation: activation}
        if family == "gpt_neox":
            more |= {"use_parallel_residual": draw(st.booleans())}
            more |= {"rotary_pct": draw(st.sampled_from(ROTATING[d]))}
        else:
            shape |= {"num_key_value_heads": kv_heads, "head_dim": d}
        if family == "phi3":
            rope = {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": draw(st.sampled_from(ROTATING[d])),
            }
            more |= {"rope_parameters": rope}
        if known.rotary == "by no_rope_layers":
            more |= {"no_rope_layers": draw(st.sampled_from(([0, 0], [0, 1], [1, 0])))}
        if known.residual_scale:
            more |= {known.residual_scale: draw(st.sampled_from((0.22, 1.0, 3.0)))}
        if "attention_bias" in fields:
            more |= {"attention_bias": draw(st.booleans())}
        if known.windows == "by layer_types":
            kinds = st.sampled_from(("full_attention", "sliding_attention"))
            more |= {"layer_types": draw(st.lists(kinds, min_size=layers, max_size=layers))}
            more |= {"sliding_window": draw(st.sampled_from((1, 131))), "use_sliding_window": True}
        if known.windows == "every layer":
            more |= {"sliding_window": draw(st.sampled_from((None, 1, 131))), "use_sliding_window": True}
        if known.score_cap:
            more |= {known.score_cap: draw(st.sampled_from((None, 0.3, 5.0)))}
        if family in ("qwen3_moe", "olmoe"):
            more |= {"norm_topk_prob": draw(st.booleans()), "num_experts_per_tok": draw(st.integers(1, 3))}
    return trunk_of(family, draw(st.integers(0, 1000)), **common, **shape, **more)


ANY_CASE = {
    "trunk": trunks(),
    "lengths": st.lists(st.sampled_from((1, 2, 15, 17, 130)), min_size=1, max_size=3),
    "each": st.integers(0, 2),
    "recompute": st.booleans(),
    "chunks": st.lists(st.sampled_from((1, 7, 60)), min_size=1, max_size=3),
}


def assert_any_case(trunk: PreTrainedModel, lengths: list[int], each: int, recompute: bool, chunks: list[int]) -> None:
    case = Case(trunk, lengths)
    case.assert_kernels_are_the_definition(each, recompute)
    for x, y in zip(case.over_cache(chunks), case.by_definition()[0], strict=True):
        assert_same(x, y, "chunks over a cache")


@settings(max_examples=12, deadline=None)
@given(**ANY_CASE)
def test_kernels_compute_the_definition_of_random_models(**case: Any) -> None:
    assert_any_case(**case)


@pytest.mark.parametrize("activation", {number: name for name, number in ACTIVATIONS.items()}.values())
def test_kernels_compute_the_definition_of_every_activation(activation: str) -> None:
    Case(trunk_of("llama", hidden_act=activation), (17, 2)).assert_kernels_are_the_definition(1, recompute=True)


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(**ANY_CASE)
def test_kernels_compute_the_definition_of_many_models(**case: Any) -> None:
    assert_any_case(**case)


@pytest.mark.parametrize(("d", "part"), [(d, part) for d, parts in ROTATING.items() for part in parts])
def test_kernels_compute_the_definition_whatever_part_of_a_head_rotates(d: int, part: float) -> None:
    trunk = trunk_of("gpt_neox", hidden_size=2 * d, num_attention_heads=2, rotary_pct=part)
    Case(trunk, (17, 2)).assert_kernels_are_the_definition()


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_micro_batches_threads_recomputation_and_the_cache_compute_the_definition(
    family: str, precision: Precision
) -> None:
    case = case_of(family, precision)
    for each, threads, recompute in ((4, 1, False), (1, 2, False), (3, 3, True)):
        library.set_threads(threads)
        case.assert_kernels_are_the_definition(each, recompute)
    for x, y in zip(case.over_cache((7, 60, 60, 1)), case.by_definition()[0], strict=True):
        assert_same(x, y, "chunks over a cache")


@settings(max_examples=5, deadline=None)
@given(
    trunks(),
    st.sampled_from(("bfloat16", "float16")),
    st.sampled_from(("float32", "float8_e4m3", "int8")),
    st.sampled_from(("float32", "bfloat16", "float8_e5m2", "int8")),
)
def test_kernels_round_as_the_definition(trunk: PreTrainedModel, wide: str, inputs: str, cached: str) -> None:
    case = Case(trunk, (130, 3))
    model = replace(case.model, rounding=Rounding(wide, inputs, cached))
    rounding = NumberFormats(activations=wide, linear_inputs=inputs, kv_cache=cached)
    for x, ids in zip(case.over_cache((130,), rounding), case.ids, strict=True):
        assert_same(x, forward(model, ids).hidden, "hidden states")


@pytest.mark.parametrize("family", MIXTURES)
def test_given_routes_are_the_definition(family: str) -> None:
    """Tokens go to experts that are given, and the network says where they went."""
    case = case_of(family)
    network = Network(case.trunk, Lowered(CONTEXT))
    model = network.model.struct
    mixtures, chosen, experts = model.mixtures, model.chosen, model.experts
    rng, ids = np.random.default_rng(0), case.ids[0]
    routes = rng.permuted(np.tile(np.arange(experts), (len(ids), mixtures, 1)), axis=-1)[..., :chosen]
    routes = np.sort(routes, -1)
    batch = ragged([ids], routes=torch.from_numpy(routes))
    with torch.no_grad():
        found, seen = network.over_batch(batch, ints(np.arange(len(ids))), seen=True)
    assert np.array_equal(seen.reshape(routes.shape), routes)
    expected = forward(case.model, ids, routes.swapaxes(0, 1)).hidden
    assert_same(found.numpy(), expected, "hidden states")
    assert not np.array_equal(expected, case.by_definition()[0][0])


def test_equal_experts_are_chosen_as_the_definition_chooses() -> None:
    trunk = trunk_of("qwen3_moe")
    trunk.get_parameter("layers.1.mlp.gate.weight").data.zero_()
    case = Case(trunk, LENGTHS[:1])
    assert_same(case.over_cache((40,))[0], case.by_definition()[0][0], "hidden states")


@pytest.mark.parametrize("bias", [False, True])
def test_heads_compute_the_definition(bias: bool) -> None:
    """Rows of some positions of two sequences; positions, not counted rows, bound the blocks."""
    torch.manual_seed(0)
    layer, rows = nn.Linear(49, 35, bias), np.array([*range(3, 131, 2), *range(120, 150)])
    x, d = torch.randn(len(rows), 49, requires_grad=True), torch.randn(len(rows), 35)
    sequence = ints(np.arange(len(rows)) >= 64)
    sums = GradientSums(layer.named_parameters(), SLOTS)
    slots = slots_of(range(2), 2, SLOTS)
    y = linear(x, layer, Rows(sequence=sequence, position=ints(rows), slots=slots, sums=sums))
    y.backward(d)
    matrix = Matrix(array(layer.weight), array(layer.bias) if bias else None)
    assert_same(array(y), linear_definition.linear(array(x), matrix), "y")
    assert_same(array(x.grad), product(array(d), matrix.w.T), "dx")
    parts: list[Contributions] = [{}, {}]
    for index, grads in enumerate(parts):
        own = sequence == index
        linear_definition.linear_backward(grads, "m", matrix, array(d)[own], array(x)[own], rows[own])
    for name, gradient in sums.finish().items():
        added = [grads["m.w" if name == "weight" else "m.bias"] for grads in parts]
        expected = join_slots(slot_sums(tuple(gradient.shape), added, SLOTS))
        assert_same(array(gradient), expected, name)


def row_dot(kernels: library.Kernels, a: Array, b: Array) -> float:
    """sum a b in float64, not rounded."""
    return float(kernels.row_dot(pointer(torch.from_numpy(a)), pointer(torch.from_numpy(b)), len(a)))


def two_rows(seed: int, n: int) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((2, n)) * 2.0 ** rng.integers(-30, 30, (2, n))).astype(F)


@given(st.integers(0, 2**32), st.integers(1, 70))
def test_row_sums_are_the_definition_before_they_are_rounded(seed: int, n: int) -> None:
    a, b = two_rows(seed, n)
    assert row_dot(library.load(), a, b) == row_sum(a, b)


# ---------------------------------------------------------------------------------------------- other libraries


@pytest.mark.parametrize("variant", OTHERS, ids=[variant.name for variant in OTHERS])
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("family", ["qwen3", "gemma", "gpt2", "olmoe"])
def test_every_instruction_set_computes_the_definition(
    variant: build.Variant, family: str, precision: Precision
) -> None:
    with using(opened(variant)):
        case_of(family, precision).assert_kernels_are_the_definition()


def kernels_of_another_order(folder: Path, file: str, *changes: tuple[str, str]) -> library.Kernels:
    path = broken_library(folder, file, *changes)
    kernels = ffi.dlopen(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "KNOWN_ANSWERS", {precision: kernels.known_answer(precision) for precision in (0, 1)})
        return library.open_library(path)


SHORT = ("interface.h", ("BLOCK = 128", "BLOCK = 64"))
FALLING = (
    "tiles.c",
    ("w_panel + k * w_step);", "w_panel + (terms - 1 - k) * w_step);"),
    ("k * x_step;", "(terms - 1 - k) * x_step;"),
)


@pytest.mark.slow  # `test_known_answer.py` refuses such a library in a second
@pytest.mark.parametrize("change", [SHORT, FALLING], ids=["short", "falling"])
def test_chains_of_another_order_give_other_bits(change: Any, tmp_path: Path) -> None:
    """Control: chains of 64 terms, and chains by falling index."""
    with using(kernels_of_another_order(tmp_path, *change)):
        found, found_gradients = case_of("qwen3").by_kernels()
    hidden, gradients = case_of("qwen3").by_definition()
    assert not np.array_equal(found[1], hidden[1])
    assert any(not np.array_equal(found_gradients[name], x) for name, x in gradients.items())


@pytest.mark.slow
def test_row_sums_of_other_lanes_give_other_bits(tmp_path: Path) -> None:
    """Control: 8 lanes. Only sums that are not rounded to float32 yet can tell."""
    kernels = kernels_of_another_order(tmp_path, "arithmetic.h", ("LANES = 16", "LANES = 8"))
    assert any(row_dot(kernels, *two_rows(seed, 48)) != row_sum(*two_rows(seed, 48)) for seed in range(9))


def test_another_slot_of_a_sequence_gives_other_bits() -> None:
    """Control: the number of slots is part of the written order, and the order of sequences is."""
    case = case_of("qwen3")
    turned = copy.copy(case)
    turned.ids, turned.d_hidden = ([x[1], x[2], x[3], x[0]] for x in (case.ids, case.d_hidden))
    hidden, gradients = case.by_definition()
    for of, slots in ((case, 1), (case, 2), (turned, SLOTS)):
        found, other = of.by_kernels(slots=slots)
        for x, y in zip(found if of is case else [found[3], *found[:3]], hidden, strict=True):
            assert_same(x, y, "hidden states")
        assert any(not np.array_equal(other[name], x) for name, x in gradients.items())
