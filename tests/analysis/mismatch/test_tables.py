"""The summary of a recorded run, and the command that prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.mismatch import tables as mismatch


def test_exact_runs_have_no_mismatch_and_native_runs_do(deterministic_run: Path, native_run: Path) -> None:
    exact = mismatch.summary(deterministic_run).set_index(["metric", "reduction"])
    judged = exact[exact["ideal"].notna()]
    assert judged["value"].tolist() == judged["ideal"].tolist()
    native = mismatch.summary(native_run).set_index(["metric", "reduction"])["value"]
    assert native["frac_bitwise_equal", "token_mean"] < 1.0 and native["k3", "token_mean"] > 0.0
    assert native["abs_max", "token"] > 0.0 and native["ulp_max", "token"] > 0.0


def test_the_command_prints_the_summary(native_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mismatch.main([str(native_run)]) == 0
    assert "frac_bitwise_equal" in capsys.readouterr().out
    assert mismatch.main([str(native_run)] * 3) == 2
    said = capsys.readouterr()
    assert said.out == "" and "3 paths: one run or two, or files with --columns" in said.err
