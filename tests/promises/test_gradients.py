"""Gradients equal the definition, for every split into backward passes, chunks of logits and processes.

The numbers of a sequence do not depend on its minibatch, so the definition computes a few sequences once, and a drawn
minibatch only adds up what they contribute. Control: each backward pass takes its slots from its own size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ppo_repro.base.errors import PromiseBroken
from ppo_repro.base.ranks import Ranks
from ppo_repro.models.networks import ValueModel
from ppo_repro.numerics.definition import linear as linear_definition
from ppo_repro.numerics.definition.elementary import Array, F
from ppo_repro.numerics.definition.gradients import Addends, Contributions, column_addends, join_slots, slot_sums
from ppo_repro.numerics.definition.model import Matrix, parameters
from ppo_repro.numerics.definition.network import backward, forward
from ppo_repro.numerics.families import head_of, trunk_of
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.interface import Ints, ints
from ppo_repro.numerics.linear import add_to_bias, linear
from ppo_repro.numerics.lowering import Lowered
from ppo_repro.numerics.network import Network
from ppo_repro.numerics.sequences import Rows, ragged, slots_of_rank
from ppo_repro.numerics.shards import Shards
from ppo_repro.stages import forward as scoring
from tests.support.definition import array, assert_same, model_from
from tests.support.models import CONFIGS, MIXTURES, fill, small_model
from tests.support.thread_ranks import threads

SLOTS, CONTEXT, MOST = 8, 140, 20
LENGTHS = (1, 2, 1, 3, 5, 2, 8, 135)  # of the sequences of a subject: most are shorter than the experts are many
RESPONSES = (1, 1, 0, 2, 5, 1, 3, 130)  # how many last positions have logits in a loss


def sums_of_ranks(module: Sequence[tuple[str, nn.Parameter]], count: int) -> list[GradientSums]:
    """The sums of each rank, which own any elements: real shards have whole stretches, more than these models have."""
    rng = np.random.default_rng(count)
    cuts = {n: [0, *sorted(rng.integers(0, p.numel() + 1, count - 1).tolist()), p.numel()] for n, p in module}
    shards = [Shards(rank, cuts) for rank in threads(count)]
    return [GradientSums(module, SLOTS // count, of_rank) for of_rank in shards]


def finished(sums: Sequence[GradientSums]) -> list[dict[str, Tensor]]:
    """The gradients that each rank has after the ranks have added up, and spread their shards."""

    def of_rank(of: GradientSums) -> dict[str, Tensor]:
        own, shards = of.finish(), of._shards
        whole = {name: torch.full_like(p, torch.nan).view(-1) for name, p in of.trained.items()}
        for name, part in own.items():
            whole[name][shards.own(name)] = part.view(-1)
        shards.spread(whole)
        return {name: x.view(of.trained[name].shape) for name, x in whole.items()}

    with ThreadPoolExecutor(len(sums)) as pool:
        return list(pool.map(of_rank, sums))


@dataclass(frozen=True)
class Split:
    """How a minibatch is computed: ranks, and after how many of its sequences a backward pass ends."""

    ranks: int
    ends: frozenset[int]

    def passes(self, count: int) -> list[list[tuple[range, Ints]]]:
        """Of each rank the sequences of its backward passes, of `count` in all, and the slots [S + 1] of each pass."""
        found = []
        for rank in range(self.ranks):
            of_rank = Ranks(rank, self.ranks)
            mine, slots = of_rank.mine(count), slots_of_rank(count, SLOTS, of_rank)
            cuts = [mine.start, *sorted(e for e in self.ends if mine.start < e < mine.stop), mine.stop]
            parts = [range(a, b) for a, b in pairwise(cuts) if b > a]
            found.append([(p, ints(slots[p.start - mine.start : p.stop - mine.start + 1])) for p in parts])
        return found


WHOLE = Split(1, frozenset())
SELDOM = st.sampled_from((False, False, True))
# Hypothesis varies one drawn list many times before it draws another one; numbers from a seed have nothing in common
RANDOM = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def drawn_split(rng: np.random.Generator) -> tuple[int, Split]:
    """A number of sequences, and any split of these; in a third of cases fewer than slots, and ranks without any."""
    few = rng.random() < 1 / 3
    count = int(rng.integers(1, SLOTS + 1) if few else rng.integers(SLOTS + 1, MOST + 1))
    ends = np.flatnonzero(rng.random(count - 1) < rng.choice((0.2, 0.5))) + 1
    return count, Split(int(rng.choice((1, 2, 4, 8) if few else (1, 1, 1, 2, 4, 8))), frozenset(ends.tolist()))


def total_of(shape: tuple[int, ...], addends: Sequence[Addends]) -> Array:
    """The gradient by the definition, from the addends of each sequence."""
    return join_slots(slot_sums(shape, addends, SLOTS))


# ---------------------------------------------------------------------------------------------- layers that stand alone


def rows_of_sequences(rng: np.random.Generator) -> tuple[list[Array], Split]:
    """Of each sequence the positions of its rows, rising: none, one, some, or rows of several blocks of 128."""
    (count, split), stretch = drawn_split(rng), rng.choice((1, 1, 1, 9))
    rows = rng.choice((0, 0, 0, 1, 1, 2, 40), count)
    return [np.sort(rng.choice(stretch * n + 1, n, replace=False)) for n in rows], split


@settings(max_examples=100, deadline=None)
@given(RANDOM.map(rows_of_sequences), st.sampled_from((1, 7, 12, 25)), st.sampled_from((1, 5, 16, 33)), SELDOM, SELDOM)
def test_gradients_of_a_layer_are_the_definition(
    drawn: tuple[list[Array], Split], n: int, k: int, used: bool, open_end: bool
) -> None:
    """A head, a layer of a control network, one expert: any rows of any sequences, and a bias of its own.

    `used`: the sums have had a larger minibatch before. `open_end`: the last pass does not say that its slot is over.
    """
    positions, split = drawn
    rng, layer, alone = np.random.default_rng(n + k), nn.Linear(k, n), nn.Parameter(torch.zeros(n))
    x, d = ([rng.standard_normal((len(p), width)).astype(F) for p in positions] for width in (k, n))
    every, larger = [], split.passes(MOST)
    of_ranks = sums_of_ranks([*layer.named_parameters(), ("alone", alone)], split.ranks)
    for passes, before, sums in zip(split.passes(len(positions)), larger, of_ranks, strict=True):
        if open_end and passes:
            passes[-1] = passes[-1][0], ints([*passes[-1][1][:-1], passes[-1][1][-2]])
        for factor, done in ((3.0, before), (1.0, passes)) if used else ((1.0, passes),):
            sums.begin()
            for part, slots in done:
                own = [i % len(positions) for i in part]
                sequence = np.repeat(np.arange(len(part)), [len(positions[i]) for i in own])
                position = ints(np.concatenate([positions[i] for i in own]))
                rows = Rows(sequence=ints(sequence), position=position, slots=slots, sums=sums)
                y = linear(torch.from_numpy(np.concatenate([x[i] for i in own])), layer, rows)
                gradient = torch.from_numpy(np.concatenate([d[i] for i in own])) * factor
                y.backward(gradient)
                add_to_bias(alone, gradient, rows)
        every.append(sums)
    parts: list[Contributions] = [{} for _ in positions]
    matrix = Matrix(array(layer.weight), array(layer.bias))
    for grads, dy, rows_x, position in zip(parts, d, x, positions, strict=True):
        linear_definition.linear_backward(grads, "m", matrix, dy, rows_x, position)
        grads["alone"] = column_addends(dy, None, position)
    for gradients in finished(every):
        for ours, name in (("weight", "m.w"), ("bias", "m.bias"), ("alone", "alone")):
            expected = total_of(tuple(gradients[ours].shape), [grads[name] for grads in parts])
            assert_same(array(gradients[ours]), expected, name)


def test_a_bias_is_trained_though_weight_and_inputs_are_not() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    sums = GradientSums(list(layer.named_parameters()), SLOTS)
    rows = Rows(sequence=ints([0, 1]), position=ints([0, 0]), slots=ints([0, 3, 8]), sums=sums)
    linear(torch.ones(2, 3), layer, rows).backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert {name: g.tolist() for name, g in sums.finish().items()} == {"bias": [4, 6]}


def add_ones(sums: GradientSums, bias: nn.Parameter, *slots: int) -> None:
    """One backward pass of sequences of one row, whose gradient is 1; the last slot is of the sequence after them."""
    sequences = np.arange(len(slots) - 1)
    rows = Rows(sequence=ints(sequences), position=ints(0 * sequences), slots=ints(slots), sums=sums)
    add_to_bias(bias, torch.ones(len(sequences), 1), rows)


def test_a_pass_whose_sequences_are_none_or_come_too_late_is_refused() -> None:
    bias = nn.Parameter(torch.zeros(1))
    sums = GradientSums([("bias", bias)], SLOTS)
    add_ones(sums, bias, 0, 3, 3)
    with pytest.raises(PromiseBroken, match="a sequence of slot 2 comes after those of slot 3"):
        add_ones(sums, bias, 2, 4)
    with pytest.raises(ValueError, match="a backward pass without sequences"):
        add_ones(sums, bias, 4)
    add_ones(sums, bias, 3, 8)
    assert sums.finish()["bias"] == 3


def test_a_pass_adds_to_the_sums_that_it_is_given_and_nobody_steps_on_nothing() -> None:
    bias = nn.Parameter(torch.zeros(1))
    first, second = (GradientSums([("bias", bias)], SLOTS) for _ in range(2))
    add_ones(first, bias, 0, 4, 8)
    with pytest.raises(ValueError, match="no backward pass added to these sums"):
        second.finish()
    add_ones(second, bias, 0, 8)
    assert (first.finish()["bias"], second.finish()["bias"]) == (2, 1)
    first.begin()
    with pytest.raises(ValueError, match="no backward pass added to these sums"):
        first.finish()


def test_a_pass_that_gives_its_gradients_to_nobody_is_refused_before_it_computes() -> None:
    layer, rows = nn.Linear(3, 2), Rows(sequence=ints([0]), position=ints([0]), slots=ints([0, 8]))
    for where in (rows, None):
        with pytest.raises(ValueError, match="nothing receives the gradients of a linear layer"):
            linear(torch.ones(1, 3), layer, where)
    with pytest.raises(ValueError, match="nothing receives the gradients of a trunk"):
        subject(0).networks[False].over_batch(ragged([[1, 2]]), ints([0]))
    with torch.no_grad():
        linear(torch.ones(1, 3), layer)


# ------------------------------------------------------------------------------------------------------------- models

FEW: dict[str, Any] = {
    "vocab_size": 7,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "max_position_embeddings": CONTEXT,
}
KINDS: tuple[
    tuple[str, bool, dict[str, Any]], ...
] = (  # family, whether the head is scalar, changes of its configuration
    ("mixtral", False, {**FEW, "num_hidden_layers": 1, "num_local_experts": 16, "num_experts_per_tok": 1}),
    ("qwen3_moe", False, {**FEW, "num_experts": 16, "num_experts_per_tok": 2, "tie_word_embeddings": True}),
    ("gpt2", False, {"vocab_size": 7, "n_layer": 1, "n_head": 1, "n_positions": CONTEXT}),
    ("olmoe", True, {**FEW, "num_hidden_layers": 1, "num_experts": 9, "num_experts_per_tok": 2}),
    ("qwen2", False, {**FEW, "num_hidden_layers": 1, "tie_word_embeddings": True}),
    ("gpt_neox", True, {**FEW, "num_hidden_layers": 1}),
    ("gemma", False, {**FEW, "num_hidden_layers": 1}),
)


QUICK = 5  # the first kinds


class Subject:
    """A model with a head, some sequences, gradients of their logits, and what each sequence adds to all gradients."""

    def __init__(self, number: int) -> None:
        rng, (family, scalar, changes) = np.random.default_rng(number), KINDS[number % len(KINDS)]
        d, width = int(rng.choice((4, 8))), int(rng.choice((2, 3, 17)))
        shape = {"n_embd": d, "n_inner": width} if family == "gpt2" else {"hidden_size": d, "intermediate_size": width}
        if family in ("qwen3_moe", "gemma"):
            shape |= {"head_dim": 4}
        if family == "qwen3_moe":
            shape |= {"moe_intermediate_size": width}
        if family not in ("gpt2", "gpt_neox"):
            shape |= {"num_key_value_heads": 1}
        causal = small_model({**CONFIGS, **MIXTURES}[family](**{**changes, **shape}), number)
        self.trunk, self.head = trunk_of(causal), head_of(causal)
        self.module: nn.Module = causal
        if scalar:
            self.head = nn.Linear(d, 1)
            fill(self.head, number)
            self.module = ValueModel(self.trunk, self.head)
        self.networks = {r: Network(self.trunk, Lowered(CONTEXT, recompute=r)) for r in (False, True)}
        self.shapes = {name: p.shape for name, p in self.module.named_parameters()}
        self.ids = [rng.integers(0, 7, n) for n in LENGTHS]
        self.d_out = [rng.standard_normal((n, len(self.head.weight))).astype(F) for n in RESPONSES]
        self.where, self.tied = self._places(), self.head.weight is self.trunk.get_input_embeddings().weight
        self.parts = self._contributions()

    def _places(self) -> dict[str, Array]:
        """Of each array of the definition the places of its elements in all parameters, one parameter after another."""
        places, start = copy.deepcopy(self.module), 0
        for parameter in places.parameters():
            end = start + parameter.numel()
            parameter.data, start = torch.arange(start, end, dtype=torch.float32).view(parameter.shape), end
        trunk = places.trunk if isinstance(places, ValueModel) else trunk_of(places)
        head = places.head if isinstance(places, ValueModel) else head_of(places)
        found = {**parameters(model_from(trunk, 1)), "head.w": array(head.weight)}
        if head.bias is not None:
            found["head.bias"] = array(head.bias)
        return {name: x.astype(np.int64) for name, x in found.items()}

    def _contributions(self) -> list[Contributions]:
        model, bias = model_from(self.trunk, CONTEXT), self.head.bias
        matrix, found = Matrix(array(self.head.weight), None if bias is None else array(bias)), []
        for ids, d_out in zip(self.ids, self.d_out, strict=True):
            of, grads, first = forward(model, ids), Contributions(), len(ids) - len(d_out)
            d_hidden, position = np.zeros_like(of.hidden), np.arange(first, len(ids))
            rows = of.hidden[first:]
            d_hidden[first:] = linear_definition.linear_backward(grads, "head", matrix, d_out, rows, position)
            found.append(grads | backward(model, of, d_hidden))
        return found

    def by_definition(self, minibatch: Sequence[Sequence[int]]) -> dict[str, Array]:
        """Gradients of groups of sequences, each group in one slot; a weight that is used twice has the sum of both."""
        totals = {
            name: total_of(where.shape, [[a for i in group for a in self.parts[i][name]] for group in minibatch])
            for name, where in self.where.items()
        }
        if self.tied:
            totals["embedding"] = totals["head.w"] = totals["embedding"] + totals["head.w"]
        return totals

    def by_kernels(
        self,
        minibatch: Sequence[Sequence[int]],
        split: Split,
        recompute: bool = False,
        at_once: int = 1 << 24,
        used: bool = False,
    ) -> list[dict[str, Array]]:
        """The same on each rank as training computes it.

        `at_once`: rows of logits in memory. `used`: the sums have had a larger minibatch, whose last
        pass did not come.
        """
        every, larger = [], (list(minibatch) * MOST)[:MOST]
        of_ranks = sums_of_ranks(list(self.module.named_parameters()), split.ranks)
        for passes, before, sums in zip(split.passes(len(minibatch)), split.passes(MOST), of_ranks, strict=True):
            for groups, done in ((larger, before[:-1]), (minibatch, passes)) if used else ((minibatch, passes),):
                sums.begin()
                for part, slots in done:
                    sizes = [len(groups[i]) for i in part]
                    of_each = ints([*np.repeat(slots[:-1], sizes), slots[-1]])
                    self._pass([i for g in part for i in groups[g]], of_each, recompute, at_once, sums)
            every.append(sums)
        flat = [np.concatenate([array(g[name]).ravel() for name in self.shapes]) for g in finished(every)]
        return [{name: x[where] for name, where in self.where.items()} for x in flat]

    def _pass(self, sequences: list[int], slots: Ints, recompute: bool, at_once: int, sums: GradientSums) -> None:
        batch = ragged([self.ids[i] for i in sequences], slots=slots).with_sums(sums)
        own = [np.arange(end - len(self.d_out[i]), end) for i, end in zip(sequences, batch.start[1:], strict=True)]
        predictors, outputs = ints(np.concatenate(own)), len(self.head.weight)
        hidden, _ = self.networks[recompute].over_batch(batch, predictors)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scoring, "LOGITS_AT_ONCE", at_once * outputs)
            rows = batch.rows.select(predictors)
            (out,) = scoring.in_chunks(lambda h, _, where: (linear(h, self.head, where),), hidden, rows, outputs)
            out.backward(torch.from_numpy(np.concatenate([self.d_out[i] for i in sequences])))


subject = cache(Subject)


def minibatches(rng: np.random.Generator) -> tuple[list[list[int]], Split]:
    """Groups of a subject's sequences, each in one slot: of one sequence, or the two of a pair of preferences."""
    (count, split), each = drawn_split(rng), int(rng.choice((1, 1, 1, 2)))
    return rng.integers(0, len(LENGTHS), (count, each)).tolist(), split


ANY_CASE = {
    "drawn": RANDOM.map(minibatches),
    "recompute": st.booleans(),
    "at_once": st.sampled_from((1, 5, 1 << 24)),
    "used": SELDOM,
}


def assert_gradients(
    number: int, drawn: tuple[list[list[int]], Split], recompute: bool, at_once: int, used: bool
) -> None:
    of, (minibatch, split) = subject(number), drawn
    expected = of.by_definition(minibatch)
    (whole,) = of.by_kernels(minibatch, WHOLE)
    for name, x in expected.items():
        assert_same(whole[name], x, f"{name}, one backward pass")
    for rank, found in enumerate(of.by_kernels(minibatch, split, recompute, at_once, used)):
        for name, x in expected.items():
            assert_same(found[name], x, f"{name}, rank {rank} of {split}")


@settings(max_examples=100, deadline=None)
@given(number=st.integers(0, QUICK - 1), **ANY_CASE)
def test_gradients_of_a_model_are_the_definition(**case: Any) -> None:
    assert_gradients(**case)


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(number=st.integers(0, 20 * len(KINDS)), **ANY_CASE)
def test_gradients_of_many_models_are_the_definition(**case: Any) -> None:
    assert_gradients(**case)


def test_gradients_that_are_added_pass_by_pass_have_other_bits() -> None:
    """Control: two backward passes that do not know of each other, as in other software."""
    of, minibatch = subject(0), [[i % len(LENGTHS)] for i in range(MOST)]
    expected, halves = of.by_definition(minibatch), (minibatch[:7], minibatch[7:])
    first, second = (of.by_kernels(half, WHOLE)[0] for half in halves)
    assert any(not np.array_equal(first[name] + second[name], x) for name, x in expected.items())
    for name, x in expected.items():
        assert np.allclose(first[name] + second[name], x, rtol=1e-4, atol=1e-5), name
