"""The summary of a recorded run, and the command that prints it."""

from __future__ import annotations

from pathlib import Path

from analysis.mismatch import tables as mismatch


def test_exact_runs_have_no_mismatch_and_native_runs_do(deterministic_run: Path, native_run: Path) -> None:
    exact = mismatch.summary(deterministic_run).set_index(["metric", "reduction"])
    judged = exact[exact["ideal"].notna()]
    assert judged["value"].tolist() == judged["ideal"].tolist()
    native = mismatch.summary(native_run).set_index(["metric", "reduction"])["value"]
    assert native["frac_bitwise_equal", "token_mean"] < 1.0 and native["k3", "token_mean"] > 0.0
    assert native["abs_max", "token"] > 0.0 and native["ulp_max", "token"] > 0.0
