"""The benchmark of matrix products: its columns compute the product that torch's does, and one another's bits."""

import numpy as np
import pytest
import torch

from experiments.benchmarks import products
from ppo_repro.numerics import backend


def test_the_columns_of_a_shape_are_one_product() -> None:
    backend.use("amx" if backend.has_amx() else "float64", 1)
    rows, terms, columns = 64, 37, 24
    x, weight = products.numbers(rows, terms, "inputs"), products.numbers(columns, terms, "weight")
    both = [products.by_float64(x, weight, in_digits) for in_digits in (False, True)]
    for item in (item for items in both for item in items):
        item.compute()
    (y, sums), (y_digits, sums_digits) = ([item.result for item in items[:2]] for items in both)
    assert np.array_equal(y, y_digits) and np.array_equal(sums, sums_digits)
    torch.testing.assert_close(torch.from_numpy(y), torch.from_numpy(x @ weight.T), rtol=1e-5, atol=1e-5)
    expected = products.numbers(rows, columns, "gradient").T.astype(np.float64) @ x * products.GRADIENT_UP
    assert np.abs(sums / products.INPUT_UP - expected).max() < 1e-5 * np.abs(expected).max()


def test_the_table_has_a_row_for_each_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products, "SHAPES", ((64, 37, 24), (3, 8, 5)))
    monkeypatch.setattr(products, "SECONDS", 1e-4)
    products.main(["--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + 2
    assert all(line.count("|") == lines[1].count("|") for line in lines[1:])
