"""Fingerprints of arrays: their definition, and that every word and place counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.kernels.core.fingerprint import fingerprint

ABOVE = 2**64


def defined(words: list[int]) -> int:
    total = 0
    for i, word in enumerate(words):
        factor = (i + 1) * 0x9E3779B97F4A7C15 % ABOVE
        factor = (factor ^ (factor >> 32)) * 0xBF58476D1CE4E5B9 % ABOVE
        total += word * (factor | 1)
    return total % ABOVE


words = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def of(values: list[int]) -> int:
    return fingerprint(np.array(values, np.uint32).view(np.float32))


def test_by_hand() -> None:
    assert of([]) == 0
    factor = (0x9E3779B97F4A7C15 ^ 0x9E3779B9) * 0xBF58476D1CE4E5B9 % ABOVE
    assert of([3]) == 3 * (factor | 1) % ABOVE


@given(words)
def test_it_is_what_its_definition_says(values: list[int]) -> None:
    assert of(values) == defined(values)


@given(words.filter(bool), st.data())
def test_one_word_that_changes_shows(values: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    changed = [*values]
    changed[place] ^= 1 << data.draw(st.integers(0, 31))
    assert of(changed) != of(values)


@given(words.filter(lambda values: len(set(values)) > 1), st.data())
def test_two_words_that_change_places_show(values: list[int], data: st.DataObject) -> None:
    first, second = data.draw(st.sampled_from([(i, j) for i in range(len(values)) for j in range(i)]))
    changed = [*values]
    changed[first], changed[second] = values[second], values[first]
    assert (of(changed) == of(values)) == (values[first] == values[second])


def test_signs_of_zeros_and_kinds_of_nan_count() -> None:
    assert len({of([word]) for word in (0, 1 << 31, 0x7FC00000, 0x7FC00001, 0xFFC00000)}) == 5


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_give_the_same(threads: int) -> None:
    x = np.random.default_rng(0).standard_normal((1001, 1003)).astype(np.float32)
    alone = fingerprint(x)
    pool.set_threads(threads)
    try:
        assert fingerprint(x) == alone
        x[1000, 1002] *= 2
        assert fingerprint(x) != alone
    finally:
        pool.set_threads(1)
