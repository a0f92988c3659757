"""The tables of a recorded run agree with what training counted, and the command prints them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis.mismatch import parity
from analysis.mismatch import tables as mismatch
from analysis.mismatch.token import mismatch_token
from analysis.pairs.runs import run_pairs
from ppo_repro.errors import UserError
from ppo_repro.records import reader


def test_exact_runs_have_no_mismatch_and_native_runs_do(deterministic_run: Path, native_run: Path) -> None:
    exact = mismatch.summary(deterministic_run).set_index(["metric", "reduction"])
    judged = exact[exact["ideal"].notna()]
    assert judged["value"].tolist() == judged["ideal"].tolist()
    native = mismatch.summary(native_run).set_index(["metric", "reduction"])["value"]
    assert native["frac_bitwise_equal", "token_mean"] < 1.0 and native["k3", "token_mean"] > 0.0
    assert native["abs_max", "token"] > 0.0 and native["ulp_max", "token"] > 0.0


@pytest.mark.parametrize("kind", ["deterministic", "native"])
def test_the_numbers_are_those_that_training_counted(kind: str, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(f"{kind}_run")
    measured = list(mismatch.measure(run_pairs(run)))
    update = mismatch.tables(measured).update.set_index(["iteration", "metric", "reduction"])["value"]
    recorded = reader.read_iterations(run)
    assert [one.iteration for one in measured] == recorded["iteration"].tolist()
    for row in recorded.itertuples():
        found = update[row.iteration]
        assert found["n_tokens", "count"] == row.tokens
        equal = round(found["frac_bitwise_equal", "token_mean"] * row.tokens)
        assert row.tokens - equal == row.unequal_old_rollout_logprobs
        # recorded as a float32 difference
        assert np.float32(found["abs_max", "token"]) == np.float32(row.max_abs_old_rollout)
    counted = parity.parity(run)
    assert counted.tokens == recorded["tokens"].sum()
    unequal = sum(int((~mismatch_token(part)["bitwise_equal"]).sum()) for part in run_pairs(run))
    assert unequal == counted.unequal_old_rollout_logprobs == recorded["unequal_old_rollout_logprobs"].sum()
    assert mismatch.whole(measured).iteration == -1


def test_nothing_to_compare_is_said() -> None:
    for empty in (lambda: mismatch.summary_of([]), lambda: mismatch.tables([]), lambda: mismatch.whole([])):
        with pytest.raises(UserError, match="there is no token to compare"):
            empty()


def test_the_command_prints_the_summary(native_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mismatch.main([str(native_run)]) == 0
    assert "frac_bitwise_equal" in capsys.readouterr().out
    assert mismatch.main([str(native_run)] * 3) == 2
    said = capsys.readouterr()
    assert said.out == "" and "3 paths: one run or two, or files with --columns" in said.err
