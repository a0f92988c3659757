"""Shards of several ranks: the sums, the norm, the steps and the state of one process, and a part of its moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.base.ranks import Ranks
from ppo_repro.numerics.adamw import AdamW, AdamWSettings, OptimizerState
from ppo_repro.numerics.shards import STRETCH, Shards, divided, owned_whole, position_of, whole_cuts
from tests.support.thread_ranks import Thread, on_each

SIZES = {"a": 3 * STRETCH + 7, "b": 5, "c": STRETCH, "d": 40 * STRETCH + 1, "e": 9}
SETTINGS = AdamWSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
STEPS = 3


def random(seed: int, sizes: dict[str, int] = SIZES) -> dict[str, Tensor]:
    """Numbers of very different sizes, so that each order of a sum has other bits."""
    rng = np.random.default_rng(seed)
    return {
        name: torch.from_numpy((rng.standard_normal(n) * np.exp2(rng.integers(-8, 9, n))).astype("float32"))
        for name, n in sizes.items()
    }


@given(
    st.dictionaries(st.text("xyz", max_size=3), st.integers(0, 9 * STRETCH), max_size=5), st.sampled_from([1, 2, 4, 8])
)
def test_each_element_has_one_owner_and_each_stretch_too(sizes: dict[str, int], count: int) -> None:
    tensors = {name: torch.empty(n) for name, n in sizes.items()}
    assert sorted(position_of(rank, count) for rank in range(count)) == list(range(count))
    for name, n in sizes.items():
        owned = [divided(tensors, Ranks(rank, count)).own(name) for rank in range(count)]
        by_position = sorted(owned, key=lambda part: (part.start, part.stop))
        assert [0, *(part.stop for part in by_position)] == [*(part.start for part in by_position), n]
        assert all(part.start % STRETCH == 0 or part.start == n for part in owned)
        stretches = [-(-(part.stop - part.start) // STRETCH) for part in owned]
        assert max(stretches) - min(stretches) <= 1
    assert set(owned_whole(tensors, Ranks(0, count))) == set(sizes)


def test_whole_tensors_are_owned_in_equal_numbers_of_elements() -> None:
    owners = owned_whole({str(n): torch.empty(n) for n in (8, 5, 4, 3, 2)}, Ranks(0, 2))
    assert [sum(int(n) for n, owner in owners.items() if owner == position) for position in range(2)] == [11, 11]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(0, 99), st.booleans())
def test_sums_over_ranks_are_those_of_the_tree(count: int, seed: int, whole: bool) -> None:
    each = [random(100 * seed + rank) for rank in range(count)]

    def cuts(ranks: Ranks) -> Shards:
        owners = owned_whole(each[0], ranks)
        return (
            Shards(ranks, {n: whole_cuts(x, owners[n], ranks) for n, x in each[0].items()})
            if whole
            else divided(each[0], ranks)
        )

    def work(ranks: Ranks) -> dict[str, Tensor]:
        shards, flat = cuts(ranks), {name: x.clone() for name, x in each[ranks.rank].items()}
        shards.add_up(flat)
        for name, x in flat.items():
            own = shards.own(name)
            x[: own.start], x[own.stop :] = torch.nan, torch.nan
        shards.spread(flat)
        return flat

    for name in SIZES:
        tree = [of_rank[name] for of_rank in each]
        while len(tree) > 1:
            tree = [a + b for a, b in zip(tree[::2], tree[1::2], strict=True)]
        for found in on_each(count, work):
            assert torch.equal(found[name], tree[0]), name


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_rank_sends_what_it_does_not_own_once_each_way(count: int) -> None:
    """(R - 1) / R of the elements to add up, and as many to spread: R - 1 times all of them over R ranks."""

    def sent(ranks: Thread) -> list[int]:
        shards, found = divided(random(0), ranks), []
        for exchange in (shards.add_up, shards.spread):
            before = ranks.sent
            exchange(random(0))
            found.append(ranks.sent - before)
        return found

    by_rank = on_each(count, sent)
    assert [sum(column) for column in zip(*by_rank, strict=True)] == [(count - 1) * sum(SIZES.values())] * 2


def test_a_ring_has_other_bits() -> None:
    """Control: four ranks added one after another."""
    each = [random(rank)["d"] for rank in range(4)]
    assert not torch.equal(each[0] + each[1] + each[2] + each[3], (each[0] + each[1]) + (each[2] + each[3]))


def trained(
    ranks: Ranks, shards: Callable[[AdamW], None] = lambda adam: None
) -> tuple[dict[str, Tensor], list[float], OptimizerState]:
    """Weights, norms and state after some steps, whose gradients all ranks have; `shards` may break something first."""
    weights = random(0)
    adam = AdamW(weights, divided(weights, ranks))
    shards(adam)
    norms = []
    for step in range(1, STEPS + 1):
        own = {name: adam.shards.own_shard(name, g) for name, g in random(step).items()}
        norms.append(adam.apply(SETTINGS, own))
    return weights, norms, adam.state()


@pytest.mark.parametrize("count", [2, 4, 8])
def test_steps_and_state_are_those_of_one_process(count: int) -> None:
    (alone,), every = on_each(1, trained), on_each(count, trained)
    for weights, norms, _ in every:
        assert norms == alone[1]
        assert all(torch.equal(weights[name], alone[0][name]) for name in SIZES)
    state = every[0][2]
    for name in SIZES:
        assert torch.equal(state.first[name], alone[2].first[name])
        assert torch.equal(state.second[name], alone[2].second[name])
    assert all(not of.first and not of.second for _, _, of in every[1:]), "only the first one writes"


def test_a_state_goes_on_with_any_number_of_ranks() -> None:
    def resumed(ranks: Ranks) -> list[Tensor]:
        weights = {name: x.clone() for name, x in half[0].items()}
        adam = AdamW(weights, divided(weights, ranks))
        adam.load(half[2])
        adam.apply(SETTINGS, {name: adam.shards.own_shard(name, g) for name, g in random(STEPS + 1).items()})
        return list(weights.values())

    half = on_each(4, trained)[0]
    expected = on_each(1, resumed)[0]
    for count in (2, 8):
        for found in on_each(count, resumed):
            assert all(map(torch.equal, found, expected))


def off_by_one(adam: AdamW) -> None:
    """The second half begins one element later on one rank: its owner leaves an element to nobody."""
    if adam.shards.ranks.rank == 1:
        cuts = {**adam.shards.cuts, "d": [x + (0 < x < SIZES["d"]) for x in adam.shards.cuts["d"]]}
        adam.__init__(adam.parameters, Shards(adam.shards.ranks, cuts))  # type: ignore[misc]


def of_another_rank(adam: AdamW) -> None:
    """Moments of the same sizes that belong to other elements."""
    for moments in (adam.first, adam.second):
        for _name, own in moments.items():
            own.copy_(torch.linspace(0.1, 1.0, len(own)) * (1 + adam.shards.ranks.rank))


@pytest.mark.parametrize("broken", [off_by_one, of_another_rank])
def test_what_is_shared_out_wrongly_is_another_run(broken: Callable[[AdamW], None]) -> None:
    """Controls."""
    ((expected, _norms, _),) = on_each(1, trained)

    def work(ranks: Ranks) -> tuple[dict[str, Tensor], list[float], OptimizerState]:
        return trained(ranks, broken)

    try:
        found: Sequence[tuple[dict[str, Tensor], list[float], OptimizerState]] = on_each(2, work)
    except RuntimeError:  # messages of other sizes
        return
    assert any(not torch.equal(weights[name], expected[name]) for weights, *_ in found for name in SIZES)
