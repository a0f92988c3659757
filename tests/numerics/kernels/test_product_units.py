"""Exponents and units of a linear layer's gradient: the kernels against the eager definition, zeros included."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.numerics import backend
from ppo_repro.numerics.products import NOTHING, largest_product, product_units

EXPONENTS = st.one_of(st.just(NOTHING), st.integers(-100, 128))


@given(st.lists(st.tuples(EXPONENTS, EXPONENTS), min_size=1, max_size=9), st.integers(-200, 100))
def test_kernels_follow_the_definition(pairs: list[tuple[int, int]], shift: int) -> None:
    x, grad = (torch.tensor(column, dtype=torch.int64) for column in zip(*pairs, strict=True))
    backend.use("eager", 1)
    expected = largest_product(x, grad), product_units(x, grad, shift, 20)
    backend.use("float64", 1)
    got = largest_product(x, grad), product_units(x, grad, shift, 20)
    assert got[0] == expected[0]
    for a, b in zip(got[1], expected[1], strict=True):
        assert torch.equal(a.view(torch.int64), b.view(torch.int64))


def test_by_hand() -> None:
    x, grad = torch.tensor([3, NOTHING, -2]), torch.tensor([-5, 7, NOTHING])
    assert largest_product(x, grad) == -2
    assert largest_product(x[1:], grad[1:]) is None
    up, x_up = product_units(x, grad, 1, 20)
    assert up.tolist() == [16.0, 2.0**-1022, 2.0**-1022]
    assert x_up.tolist() == [2.0**17, 2.0**120, 2.0**22]
