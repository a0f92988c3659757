"""Random streams: one per name, the same bits everywhere and always."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.base.seeding import bell, permutation, sample_seed, words

names = st.lists(st.integers(-(2**63), 2**63) | st.text("ab01+-:", max_size=4), min_size=1, max_size=4)


def test_streams_are_pinned() -> None:
    """Golden values: another NumPy, or a change of the naming, must not pass unseen."""
    assert words(4, "golden", 1).tolist() == [
        0xB3982382944DAF87,
        0xC52A6D0F52061425,
        0xBC436AF57A54E940,
        0xE8C35C4904AFDBED,
    ]
    assert permutation(8, "golden", 1).tolist() == [5, 4, 0, 7, 2, 6, 1, 3]
    assert [x.hex() for x in bell(3, "golden", 1).tolist()] == [
        "0x1.7541c76a1fe97p-3",
        "-0x1.66e2e72e1cf04p-1",
        "0x1.e0d56305c276dp-1",
    ]
    assert sample_seed(1, 2, "3+4", 5) == 8221675706390392317


@given(names, st.data())
def test_every_part_of_a_name_and_its_type_counts(name: list[int | str], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(name) - 1))
    part = name[i]
    changed: list[list[int | str]] = [
        [*name[:i], part + 1 if isinstance(part, int) else part + "x", *name[i + 1 :]],
        [*name[:i], str(part) if isinstance(part, int) else f"{part} ", *name[i + 1 :]],
        [*name, 0],
        [*name, ""],
        name[:i] + name[i + 1 :],
    ]
    for other in changed:
        assert words(2, *other).tolist() != words(2, *name).tolist()


@given(st.integers(0, 300), names)
def test_a_permutation_holds_every_index_once_in_the_order_of_its_words(size: int, name: list[int | str]) -> None:
    found = permutation(size, *name)
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(size))
    drawn = words(size, *name).tolist()
    assert found.tolist() == sorted(range(size), key=lambda i: (drawn[i], i))


def test_sample_seeds_are_distinct_and_fit_a_signed_word() -> None:
    grid = list(itertools.product((0, 1, 2**63 - 1), range(12), ("1+2", "1+3", "11", "1", "é", ""), range(12)))
    seeds = [sample_seed(*names) for names in grid]
    assert all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == len(grid)
    assert max(seeds) > 2**62, "the whole range is used"
    assert min(seeds) < 2**60, "the whole range is used"


def test_bell_is_a_centred_sum_of_four_16_bit_uniforms() -> None:
    scale = 1.0 / math.sqrt(4 * 4 * (65536.0**2 - 1) / 12)  # the same two roundings as in the code
    for raw, found in zip(words(500, "one").tolist(), bell(500, "one").tolist(), strict=True):
        pieces = [(raw >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]
        assert found == (2 * sum(pieces) - 4 * 65535) * scale
