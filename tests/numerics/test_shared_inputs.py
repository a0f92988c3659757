"""Layers that share an input prepare it once: never with numbers that are no longer there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ppo_repro.numerics import backend, products
from ppo_repro.numerics.products import PreparedWeight, add_products, input_exponents, row_exponents
from tests.support.float32 import bits


@pytest.fixture(
    params=["float64", pytest.param("amx", marks=pytest.mark.skipif(not backend.has_amx(), reason="no AMX"))]
)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    backend.use(request.param, 1)
    yield request.param


def numbers(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def fresh(x: torch.Tensor, weight: torch.Tensor) -> list[int]:
    """The contraction where nothing can have been kept."""
    return bits(PreparedWeight("w").contract(x.clone(), weight, 1))


def test_the_second_layer_takes_what_the_first_one_prepared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    for module, name in ((products.amx, "quantise_rows"), (products.float64_inputs, "quantise_inputs")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, original=original: rows.append(len(x)) or original(x))
    x, first, second = numbers(5, 70, 0), numbers(6, 70, 1), numbers(33, 70, 2)
    results = [bits(PreparedWeight("w").contract(x, w, 1)) for w in (first, second)]
    assert rows.count(5) == 1, "prepared twice or never"
    assert results == [fresh(x, first), fresh(x, second)]


def test_changed_numbers_are_prepared_again(kind: str) -> None:
    x, weight, prepared = numbers(5, 70, 0), numbers(6, 70, 1), PreparedWeight("w")
    before = bits(prepared.contract(x, weight, 1))
    x[2] *= 3.0
    after = bits(prepared.contract(x, weight, 1))
    assert after == fresh(x, weight) != before


def test_another_tensor_in_the_same_place_is_prepared_again(kind: str) -> None:
    """Freed memory is used again at once; what was made of the old numbers must not be taken for the new ones."""
    weight, prepared = numbers(6, 70, 1), PreparedWeight("w")
    for seed in range(30):
        x = numbers(5, 70, seed)
        assert bits(prepared.contract(x, weight, 1)) == fresh(x, weight)
        del x


def test_views_of_one_tensor_are_told_apart(kind: str) -> None:
    x, weight, prepared = numbers(8, 140, 0), numbers(6, 70, 1), PreparedWeight("w")
    for view in (x[:4, :70], x[4:, :70], x[:4, 70:], x.view(16, 70), x[:, ::2]):
        assert bits(prepared.contract(view, weight, 1)) == fresh(view, weight)


def test_gradients_of_layers_that_share_an_input(kind: str) -> None:
    x, grads = numbers(9, 70, 0), [numbers(9, 6, 1), numbers(9, 40, 2)]

    def sums(inputs: torch.Tensor, grad: torch.Tensor) -> list[int]:
        exponents = input_exponents(inputs)
        assert exponents is not None
        assert torch.equal(exponents, row_exponents(inputs.clone()))
        up = torch.full((9,), 2.0**10, dtype=torch.float64)
        out = torch.zeros(grad.shape[1], 70, dtype=torch.int64)
        add_products(grad, up, 14, inputs, torch.exp2((20 - exponents).to(torch.float64)), 20, out, False)
        return out.flatten().tolist()

    shared = [sums(x, grad) for grad in grads]
    assert shared == [sums(x.clone(), grad) for grad in grads]
    x[0] = 0.5
    assert sums(x, grads[0]) == sums(x.clone(), grads[0]) != shared[0]


def test_threads_do_not_take_what_another_one_prepares(kind: str) -> None:
    """Side by side on inputs of their own, whose keys alternate: one slot for both would give one the other's."""
    backend.use(kind, 2)
    weight, inputs = numbers(6, 70, 1), [numbers(5, 70, seed) for seed in range(2)]
    expected = [fresh(x, weight) for x in inputs]

    def results(mine: torch.Tensor) -> set[tuple[int, ...]]:
        prepared = PreparedWeight("w")
        return {tuple(bits(prepared.contract(mine, weight, 1))) for _ in range(300)}

    found = backend.side_by_side(lambda: results(inputs[0]), lambda: results(inputs[1]))
    assert found == ({tuple(expected[0])}, {tuple(expected[1])})
    made = backend.side_by_side(
        lambda: products._operands.of(inputs[0], ("here",), lambda: "one"),
        lambda: products._operands.of(inputs[0], ("here",), lambda: "two"),
    )
    assert made == ("one", "two")


def test_what_runs_side_by_side_records_gradients_where_its_caller_does(kind: str) -> None:
    backend.use(kind, 2)
    assert backend.side_by_side(torch.is_grad_enabled, torch.is_grad_enabled) == (True, True)
    with torch.no_grad():
        assert backend.side_by_side(torch.is_grad_enabled, torch.is_grad_enabled) == (False, False)
