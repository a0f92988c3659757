"""The assertions on recorded runs and dumps, good and damaged, and the example that the documentation shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.testing import Names, assert_matches_golden, assert_mismatch_below, golden, guard
from tests.support.json_lines import write_lines
from tests.support.paths import ROOT

pytest_plugins = "pytester"
EXAMPLE = ROOT / "experiments" / "guard_your_stack"


def test_the_mismatch_of_runs_has_limits(deterministic_run: Path, native_run: Path, control_run: Path) -> None:
    assert_mismatch_below(deterministic_run, abs_mean=0.0, abs_max=0.0, k3=0.0, frac_unequal=0.0)
    assert_mismatch_below(native_run, abs_mean=5e-6, abs_max=1e-4, k3=1e-10)
    with pytest.raises(AssertionError, match=r"frac_unequal is 0\.\d+, above 0 \(as at iteration 0, sequence \d+"):
        assert_mismatch_below(native_run, frac_unequal=0.0)
    assert_mismatch_below(control_run, frac_unequal=0.0)
    with pytest.raises(UserError, match="no limit is given"):
        assert_mismatch_below(deterministic_run)
    with pytest.raises(UserError, match="abs_max = nan: must be 0 or more"):
        assert_mismatch_below(deterministic_run, abs_max=float("nan"))
    with pytest.raises(UserError, match="leave names out"):
        assert_mismatch_below(deterministic_run, abs_max=1.0, names=Names("a", "b"))


def test_the_mismatch_of_a_file_by_hand(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"rollout_log_probs": [-1.0, -2.0, 0.0], "old_log_probs": [-1.5, -2.0, 9.0], "response_mask": [1, 1, 0]},
        {"rollout_log_probs": [-1.0, -3.0], "old_log_probs": [-0.75, None], "response_mask": [1, 1]},
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    pairs = guard.pairs_of(path)
    found = {name: value for name, (value, _) in guard.mismatch_of(pairs).items()}
    # delta = -0.5, 0, 0.25 over three finite tokens; k3 is the same sum in another order
    k3 = pytest.approx((np.expm1(-0.5) + 0.5 + np.expm1(0.25) - 0.25) / 3, rel=1e-15)
    assert len(pairs) == 4
    assert found == {"abs_mean": 0.25, "abs_max": 0.5, "k3": k3, "frac_unequal": 2 / 3, "n_nonfinite": 1.0}
    with pytest.raises(AssertionError) as failure:
        assert_mismatch_below(path, abs_max=0.4)
    worst = "iteration 0, sequence 0, position 0: sampler -1.0 (bits bf800000), trainer -1.5 (bits bfc00000)"
    assert f"abs_max is 0.5, above 0.4 (as at {worst}" in str(failure.value)
    lost = "n_nonfinite is 1, above 0 (as at iteration 0, sequence 1, position 1"
    assert lost in str(failure.value)
    assert_mismatch_below(path, abs_max=0.5, abs_mean=0.25, k3=0.06, n_nonfinite=1)


def test_other_names_are_given_by_what_the_message_says(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"mine": [-1.0, -2.0], "yours": [-1.0, 9.0], "counts": [True, False]}])
    with pytest.raises(UserError, match=r"names=ppo_repro\.testing\.Names"):
        assert_mismatch_below(path, frac_unequal=0.0)
    assert_mismatch_below(path, frac_unequal=0.0, names=Names("mine", "yours", "counts"))
    with pytest.raises(UserError, match=r"names = 'mine': must be one of ppo_repro, verl"):
        assert_mismatch_below(path, frac_unequal=0.0, names="mine")
    rows = [{"rollout_log_probs": [-1.0], "old_log_probs": [-1.0], "rollout_logprobs": [-1.0], "old_logprobs": [-9.0]}]
    assert_mismatch_below(write_lines(tmp_path / "b.jsonl", rows), frac_unequal=0.0, names="verl")


def test_padding_is_refused_and_a_sharp_policy_may_be_allowed(tmp_path: Path) -> None:
    logprobs = [-0.5, *[0.0] * 5]  # of padding, or of tokens that a sharp policy is sure of
    path = write_lines(tmp_path / "a.jsonl", [{"rollout_log_probs": logprobs, "old_log_probs": logprobs}] * 3)
    with pytest.raises(AssertionError, match=r"both log-probs of 15 of 18 tokens are exactly 0.*mask.*frac_zero=1.0"):
        assert_mismatch_below(path, frac_unequal=0.0)
    assert_mismatch_below(path, frac_unequal=0.0, frac_zero=1.0)
    with pytest.raises(UserError, match="frac_zero = nan: must be from 0 to 1"):
        assert_mismatch_below(path, frac_unequal=0.0, frac_zero=float("nan"))


def test_a_frame_is_a_dump(deterministic_run: Path, native_run: Path) -> None:
    assert_mismatch_below(reader.read_tokens(deterministic_run), frac_unequal=0.0)
    with pytest.raises(AssertionError, match=r"the frame: of \d+ tokens frac_unequal is .* \(as at iteration 0, seq"):
        assert_mismatch_below(reader.read_tokens(native_run), frac_unequal=0.0)


def test_a_golden_run_is_written_once(deterministic_run: Path, native_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    with pytest.raises(AssertionError, match=r"golden\.json: there was no golden run, so .* was written to it"):
        assert_matches_golden(deterministic_run, path)
    assert_matches_golden(deterministic_run, path)
    with pytest.raises(AssertionError, match=r"table .*, iteration 0.*numerics_mode native .golden deterministic.*del"):
        assert_matches_golden(native_run, path)


def test_a_golden_run_may_record_other_side_tables(deterministic_run: Path, tmp_path: Path) -> None:
    """`records.level` says which side tables a run has, and is no result."""
    made, path = golden.golden_of(deterministic_run), tmp_path / "golden.json"
    assert made.side_tables
    for side_tables in ({}, made.side_tables | {"records/more/preparation.parquet": "00"}):
        path.write_text(made.model_copy(update={"side_tables": side_tables}).model_dump_json())
        assert_matches_golden(deterministic_run, path)


def test_what_differs_from_a_golden_run_is_named_and_the_environment_only_where_it_differs(
    deterministic_run: Path, tmp_path: Path
) -> None:
    made, path = golden.golden_of(deterministic_run), tmp_path / "golden.json"
    steps = [{**made.tables[0], "steps": "00"}, *made.tables[1:]]
    other = {**made.environment, "packages.torch": "1.0"}
    evaluation = next(file for file in made.side_tables or {} if "evaluations" in file)
    for change, message in (
        ({"tables": steps}, r"table steps, iteration 0: .*golden 00; the environment is the same"),
        ({"tables": steps, "environment": other}, r"environment differs: packages.torch \S+ \(golden 1.0\)"),
        ({"tables": [{**made.tables[0], "gone": "00"}, *made.tables[1:]]}, r"table gone, .*: digest None, golden 00"),
        ({"tables": made.tables[:-1]}, "number of iterations"),
        ({"side_tables": (made.side_tables or {}) | {evaluation: "00"}}, rf"{evaluation}: digest \w+, golden 00"),
        ({"fingerprint": "00"}, "final results"),
    ):
        path.write_text(made.model_copy(update=change).model_dump_json())
        with pytest.raises(AssertionError, match=message):
            assert_matches_golden(deterministic_run, path)
    path.write_text(made.model_dump_json(exclude={"side_tables"}))  # of an earlier version
    assert_matches_golden(deterministic_run, path)
    path.write_text("{}")
    with pytest.raises(UserError, match="is not a golden run"):
        assert_matches_golden(deterministic_run, path)


def test_the_example_guards_a_dump(pytester: pytest.Pytester) -> None:
    pytester.copy_example(str(EXAMPLE))
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=2)
    path = pytester.path / "tokens.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows[1]["inference_logprobs"] = rows[1]["inference_logprobs"][-1:] + rows[1]["inference_logprobs"][:-1]
    write_lines(path, rows)
    broken = pytester.runpytest("-p", "no:cacheprovider")
    broken.assert_outcomes(failed=2)
    broken.stdout.fnmatch_lines(["*tokens.jsonl: of * tokens*sequence 1, position*sampler*bits*trainer*bits*"])
