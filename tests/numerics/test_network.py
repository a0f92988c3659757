"""The kernels compute the definition, bit for bit: random models of any shape, and every family of transformers.

Batches, micro-batches, chunks, the cache, recomputation, threads and the CPU's instruction set change no bit; another
length of chains, another number of lanes, another order of terms and another slot of a sequence do.
"""

from __future__ import annotations

import copy
import ctypes
import platform
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

from ppo_repro.numerics import build, library
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.linear import linear
from ppo_repro.numerics.network import Cache, Lowered, Network
from ppo_repro.numerics.rows import Rows, ragged, slots_of
from ppo_repro.numerics.structs import address, ints
from tests.numerics import definition
from tests.numerics.definition import Array, F, Matrix, Model, parameters
from tests.numerics.definition_families import array, model_from
from tests.numerics.definition_rounding import Rounding
from tests.numerics.kernel_models import KEEP_ALL, KEEP_INPUTS, KernelModel
from tests.numerics.random_models import models
from tests.support.small_models import CONFIGS, MIXTURES, small_model

HERE = build.PLATFORMS[platform.system(), platform.machine()]
ABLE = tuple(variant for variant in HERE.variants if variant.needs <= frozenset(library.cpu_words("flags")))
FAMILIES = {**CONFIGS, **MIXTURES}
LENGTHS = (17, 133, 1, 40)
CONTEXT, SLOTS = 150, 8


def assert_same(found: Array, expected: Array, what: str) -> None:
    """Equal shapes and bits."""
    assert found.shape == expected.shape, what
    pairs = [np.ascontiguousarray(x, F).view(np.int32) for x in (found, expected)]
    assert np.array_equal(*pairs), f"{what}: {(pairs[0] != pairs[1]).sum()} of {found.size} differ"


def assert_all_same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert_same(found[name], x, name)


class Case:
    """Sequences of tokens and gradients of their hidden states, random but for the lengths."""

    def __init__(self, model: Model, lengths: Sequence[int], seed: int = 0) -> None:
        rng, (vocabulary, width) = np.random.default_rng(seed), model.embedding.shape
        self.model = model
        self.ids = [rng.integers(0, vocabulary, n) for n in lengths]
        self.d_hidden = [rng.standard_normal((n, width)).astype(F) for n in lengths]

    def by_definition(self, slots: int = SLOTS) -> tuple[list[Array], dict[str, Array]]:
        """Hidden states, and gradients by name."""
        passed = [definition.forward(self.model, sequence) for sequence in self.ids]
        return [of.hidden for of in passed], definition.gradients(self.model, passed, self.d_hidden, slots)

    def by_kernels(
        self, kernels: ctypes.CDLL, slots: int = SLOTS, each: int = 0, keep: int = KEEP_ALL, transposed: bool = False
    ) -> tuple[list[Array], dict[str, Array]]:
        """The same in micro-batches of `each` sequences; 0: one batch."""
        model, hidden = KernelModel(kernels, self.model, transposed), []
        memory = model.gradient_memory(len(self.ids), slots)
        for start in range(0, len(self.ids), each or len(self.ids)):
            part = slice(start, start + (each or len(self.ids)))
            cache = model.cache(len(self.ids[part]), max(map(len, self.ids[part])))
            found, passed = model.forward(cache, self.ids[part], keep)
            model.backward(passed, keep, self.d_hidden[part], memory)
            hidden += found
        return hidden, model.gradients(memory)


def assert_kernels_are_the_definition(
    model: Model, lengths: list[int], each: int, slots: int, keep: int, transposed: bool, cut: float
) -> None:
    case, kernels = Case(model, lengths), library.load()
    hidden, gradients = case.by_definition(slots)
    found, found_gradients = case.by_kernels(kernels, slots, each, keep, transposed)
    for x, y in zip(found, hidden, strict=True):
        assert_same(x, y, "hidden states")
    assert_all_same(found_gradients, gradients)
    ends = [int(n * cut) for n in lengths]
    if min(ends):
        of = KernelModel(kernels, model, transposed)
        cache = of.cache(len(lengths), max(lengths))
        first, _ = of.forward(cache, [s[:end] for s, end in zip(case.ids, ends, strict=True)])
        second, _ = of.forward(cache, [s[end:] for s, end in zip(case.ids, ends, strict=True)])
        for a, b, whole in zip(first, second, hidden, strict=True):
            assert_same(np.concatenate([a, b]), whole, "two chunks")


ANY_CASE = {
    "model": models(),
    "lengths": st.lists(st.sampled_from((1, 2, 15, 17, 130)), min_size=1, max_size=3),
    "each": st.integers(0, 2),
    "slots": st.sampled_from((1, 4, 8)),
    "keep": st.sampled_from((KEEP_INPUTS, KEEP_ALL)),
    "transposed": st.booleans(),
    "cut": st.sampled_from((0.3, 0.99)),
}


@settings(max_examples=10, deadline=None)
@given(**ANY_CASE)
def test_kernels_compute_the_definition_of_random_models(**case: Any) -> None:
    assert_kernels_are_the_definition(**case)


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(**ANY_CASE)
def test_kernels_compute_the_definition_of_many_models(**case: Any) -> None:
    assert_kernels_are_the_definition(**case)


@settings(max_examples=4, deadline=None)
@given(
    models(),
    st.sampled_from(("bfloat16", "float16")),
    st.sampled_from(("float32", "float8_e4m3", "int8")),
    st.sampled_from(("float32", "bfloat16", "float8_e5m2", "int8")),
)
def test_kernels_round_as_the_definition(model: Model, wide: str, inputs: str, cached: str) -> None:
    sampler, kernels = replace(model, rounding=Rounding(wide, inputs, cached)), library.load()
    case = Case(sampler, (130, 3))
    of = KernelModel(kernels, sampler)
    found, _ = of.forward(of.cache(2, 130), case.ids)
    for x, ids in zip(found, case.ids, strict=True):
        assert_same(x, definition.forward(sampler, ids).hidden, "hidden states")


def row_dot(kernels: ctypes.CDLL, a: Array, b: Array) -> float:
    """sum a b in float64, not rounded."""
    function = kernels.row_dot
    function.restype, function.argtypes = ctypes.c_double, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    return float(function(address(a), address(b), len(a)))


def two_rows(seed: int, n: int) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((2, n)) * 2.0 ** rng.integers(-30, 30, (2, n))).astype(F)


@given(st.integers(0, 2**32), st.integers(1, 70))
def test_row_sums_are_the_definition_before_they_are_rounded(seed: int, n: int) -> None:
    a, b = two_rows(seed, n)
    assert row_dot(library.load(), a, b) == definition.row_sum(a, b)


# ------------------------------------------------------------------------------------------ transformers' families


def trunk_of(family: str) -> Any:
    config = FAMILIES[family]()
    config.max_position_embeddings = CONTEXT
    return small_model(config, 0).base_model


@cache
def case_of(family: str) -> Case:
    return Case(model_from(trunk_of(family), CONTEXT), LENGTHS)


@cache
def reference(family: str) -> tuple[list[Array], dict[str, Array]]:
    return case_of(family).by_definition()


def by_network(family: str, each: int, lowered: Lowered) -> tuple[list[Array], dict[str, Array]]:
    """Hidden states and gradients as training computes them, the gradients by the definition's names."""
    trunk, case, count = trunk_of(family), case_of(family), len(LENGTHS)
    network, sums, hidden = Network(trunk, lowered), GradientSums(trunk.named_parameters(), SLOTS), []
    for start in range(0, count, each):
        part = range(start, min(start + each, count))
        batch = ragged([case.ids[i] for i in part], slots=slots_of(part, count, SLOTS))
        found, _ = network.over_batch(batch, ints(np.arange(len(batch.ids))))
        found.backward(torch.tensor(np.concatenate([case.d_hidden[i] for i in part])))
        hidden += [x.detach().numpy() for x in found.split(batch.lengths.tolist())]
    gradients = sums.finish()
    wide = copy.deepcopy(trunk)
    for name, parameter in wide.named_parameters():
        parameter.data = gradients[name]
    return hidden, parameters(model_from(wide, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_training_computes_the_definition(family: str) -> None:
    hidden, gradients = reference(family)
    for each, threads, recompute in ((4, 1, False), (1, 2, False), (3, 3, True)):
        library.set_threads(threads)
        found, found_gradients = by_network(family, each, Lowered(CONTEXT, recompute=recompute))
        for x, y in zip(found, hidden, strict=True):
            assert_same(x, y, "hidden states")
        assert_all_same(found_gradients, gradients)
    library.set_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_over_the_cache_computes_the_definition(family: str) -> None:
    """Sequences in any slots of a cache, in chunks, at last token by token, with others that are at other positions."""
    case, (hidden, _) = case_of(family), reference(family)
    network = Network(trunk_of(family), Lowered(CONTEXT))
    network.prepare()
    cache = Cache(network.struct, len(LENGTHS) + 1, CONTEXT)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    slots, past = [4, 0, 3, 1], [0] * len(LENGTHS)
    found: list[list[Array]] = [[] for _ in LENGTHS]
    while going := [i for i, n in enumerate(LENGTHS) if past[i] < n]:
        ends = {i: past[i] + (7 if past[i] == 0 else 60 if LENGTHS[i] - past[i] > 60 else 1) for i in going}
        batch = ragged([case.ids[i][past[i] : ends[i]] for i in going], [past[i] for i in going])
        states, _ = network.over_cache(batch, cache, [slots[i] for i in going])
        for i, part in zip(going, states.split(batch.lengths.tolist()), strict=True):
            found[i].append(part.numpy())
            past[i] += len(part)
    for parts, whole in zip(found, hidden, strict=True):
        assert len(parts) > 1 or len(whole) == 1
        assert_same(np.concatenate(parts), whole, "hidden states")


@pytest.mark.parametrize("family", MIXTURES)
def test_given_routes_are_the_definition(family: str) -> None:
    """Tokens go to experts that are given, and the network says where they went."""
    case, trunk = case_of(family), trunk_of(family)
    network = Network(trunk, Lowered(CONTEXT))
    mixtures, chosen, experts = network.struct.mixtures, network.struct.chosen, network.struct.experts
    rng, ids = np.random.default_rng(0), case.ids[0]
    routes = rng.permuted(np.tile(np.arange(experts), (len(ids), mixtures, 1)), axis=-1)[..., :chosen]
    routes = np.sort(routes, -1)
    batch = ragged([ids], routes=torch.from_numpy(routes))
    with torch.no_grad():
        found, seen = network.over_batch(batch, ints(np.arange(len(ids))), seen=True)
    assert np.array_equal(seen.reshape(routes.shape), routes)
    expected = definition.forward(case.model, ids, routes.swapaxes(0, 1)).hidden
    assert_same(found.numpy(), expected, "hidden states")
    assert not np.array_equal(expected, reference(family)[0][0])


@pytest.mark.parametrize("bias", [False, True])
def test_heads_compute_the_definition(bias: bool) -> None:
    """Rows of some positions of two sequences; positions, not counted rows, bound the blocks."""
    torch.manual_seed(0)
    layer, rows = nn.Linear(49, 35, bias), np.array([*range(3, 131, 2), *range(120, 150)])
    x = torch.randn(len(rows), 49, requires_grad=True)
    d = torch.randn(len(rows), 35)
    sequence, position = ints(rows * 0), ints(rows)
    sequence[64:] = 1
    sums = GradientSums(layer.named_parameters(), SLOTS)
    y = linear(x, layer, Rows(sequence, position, slots_of(range(2), 2, SLOTS)))
    y.backward(d)
    matrix = Matrix(array(layer.weight), array(layer.bias) if bias else None)
    assert_same(array(y), definition.linear(array(x), matrix), "y")
    assert_same(array(x.grad), definition.product(array(d), matrix.w.T), "dx")
    parts: list[definition.Contributions] = [{}, {}]
    for index, grads in enumerate(parts):
        own = sequence == index
        definition.linear_backward(grads, "m", matrix, array(d)[own], array(x)[own], position[own])
    for name, gradient in sums.finish().items():
        added = [grads["m.w" if name == "weight" else "m.bias"] for grads in parts]
        expected = definition.join_slots(definition.slot_sums(tuple(gradient.shape), added, SLOTS))
        assert_same(array(gradient), expected, name)


# ---------------------------------------------------------------------------------------------- other instructions


@pytest.mark.parametrize("variant", ABLE[1:], ids=[variant.name for variant in ABLE[1:]])
@pytest.mark.parametrize("family", ["qwen3", "gemma", "gpt2", "olmoe"])
def test_every_instruction_set_computes_the_definition(variant: build.Variant, family: str) -> None:
    hidden, gradients = reference(family)
    kernels = library.open_library(library.locate(variant, build.SOURCES))
    found, found_gradients = case_of(family).by_kernels(kernels)
    for x, y in zip(found, hidden, strict=True):
        assert_same(x, y, "hidden states")
    assert_all_same(found_gradients, gradients)


def kernels_of_another_law(folder: Path, flag: str) -> ctypes.CDLL:
    (path,) = build.compile_variants(HERE._replace(variants=ABLE[:1]), folder, flag)
    answer = ctypes.CDLL(str(path)).known_answer
    answer.restype = ctypes.c_uint64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "KNOWN_ANSWER", answer())
        return library.open_library(path)


@pytest.mark.parametrize("flag", ["-DBLOCK_TERMS=64", "-DFALLING_TERMS"])
def test_chains_of_another_order_give_other_bits(flag: str, tmp_path: Path) -> None:
    """Negative control: chains of 64 terms, and chains by falling index."""
    found, found_gradients = case_of("qwen3").by_kernels(kernels_of_another_law(tmp_path, flag))
    hidden, gradients = reference("qwen3")
    assert not np.array_equal(found[1], hidden[1])
    assert any(not np.array_equal(found_gradients[name], x) for name, x in gradients.items())


def test_row_sums_of_other_lanes_give_other_bits(tmp_path: Path) -> None:
    """Negative control: 8 lanes. Only sums that are not rounded to float32 yet can tell."""
    kernels = kernels_of_another_law(tmp_path, "-DLANE_COUNT=8")
    assert any(row_dot(kernels, *two_rows(seed, 48)) != definition.row_sum(*two_rows(seed, 48)) for seed in range(9))


def test_another_slot_of_a_sequence_gives_other_bits() -> None:
    """Negative control: the number of slots is part of the law, and the order of sequences is."""
    case = case_of("qwen3")
    turned = copy.copy(case)
    turned.ids, turned.d_hidden = ([x[1], x[2], x[3], x[0]] for x in (case.ids, case.d_hidden))
    hidden, gradients = reference("qwen3")
    for of, slots in ((case, 1), (case, 2), (turned, SLOTS)):
        found, other = of.by_kernels(library.load(), slots)
        for x, y in zip(found if of is case else [found[3], *found[:3]], hidden, strict=True):
            assert_same(x, y, "hidden states")
        assert any(not np.array_equal(other[name], x) for name, x in gradients.items())
