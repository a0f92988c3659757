"""The benchmark of single operations: it runs, and compares what computes the same."""

import pytest
import torch

from experiments.benchmarks import operations


def test_the_table_has_a_row_for_each_operation(capsys: pytest.CaptureFixture[str]) -> None:
    operations.main(["--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + len(operations.pairs())


def test_both_sides_of_a_pair_give_nearly_the_same() -> None:
    by_name = {pair.name: pair for pair in operations.pairs()}
    norm = by_name["gradient norm"]
    torch.testing.assert_close(torch.tensor(norm.exact()), norm.stock(), rtol=1e-4, atol=0.0)
    for exact, stock in zip(
        by_name["log-prob and entropy"].exact(), by_name["log-prob and entropy"].stock(), strict=True
    ):
        torch.testing.assert_close(exact, stock, rtol=1e-4, atol=1e-4)
