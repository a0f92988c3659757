"""`verify` computes every stage again from the records alone, and names one changed bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ppo_repro.records import manifest, reader
from ppo_repro.runs.verify_stages import STAGES, Stage
from tests.support.cli import Cli
from tests.support.language import tiny_run
from tests.support.runs import recomputed
from tests.support.synthetic_run import cut_back, rewrite_cell

# without a final state, which names the chain of records that it follows
SMALLEST = ("model.warm_start_steps=4", "evaluation.every=2", "checkpoints.final_state=false")
ADAPTIVE = "{kind: adaptive, target_kl: 0.5}"


def record(out: Path, *more: str) -> Path:
    return tiny_run(out, *SMALLEST, *more)


def require_recomputed(run_dir: Path, left_out: Sequence[str] = ()) -> None:
    found = recomputed(run_dir)
    assert found.difference is None, found.lines()
    # at least one coefficient or learning rate in each iteration
    assert all(count >= 2 for count in found.compared.values()), found.compared
    said = [f"{stage}: {count:,} values identical in 2 iterations" for stage, count in found.compared.items()]
    assert found.lines() == [*said, *left_out]
    assert len(found.lines()) == len(STAGES)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything adaptive at once."""
    folder = tmp_path_factory.mktemp("replay")
    return record(
        folder,
        *("reward.whiten=scale", "ppo.iterations=3"),
        f"kl={{charge: word, estimator: exact, direction: reference_policy, controller: {ADAPTIVE}}}",
        *("ppo.objective={kind: kl_penalty, target_kl: 0.01}", "ppo.schedule=cosine", "ppo.early_stop_kl=0.5"),
        "value={learning_rate: 1e-3, normalize_returns: true}",
    )


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


def test_verify_computes_every_stage_again_from_the_records(cli: Cli, recorded: Path) -> None:
    found = cli.json("verify", recorded)["recomputed"]
    assert found["difference"] is None
    assert found["iterations"] == 3
    # all columns of these stages that the configuration fills
    tokens, updates = (
        sum(e.tables[name].rows for e in manifest.load(recorded).iterations) for name in ("tokens", "updates")
    )
    assert found["compared"]["advantages"] == 3 * tokens
    assert found["compared"]["rewards"] > 4 * tokens
    assert found["compared"]["losses"] > 9 * updates
    whole, *lines = cli.done("verify", recorded).splitlines()
    assert whole.startswith("whole: complete, 3 iterations")
    assert [line.split(":")[0] for line in lines] == list(STAGES)


def test_so_does_a_native_lean_run_and_no_model_is_needed(tmp_path: Path) -> None:
    """Given its log-probs, the rest of a run has one set of bits in either numerics."""
    run_dir = record(tmp_path, "numerics.mode=native", "records.level=lean", "checkpoints.every=1")
    shutil.rmtree(run_dir / "checkpoints")
    require_recomputed(run_dir)


def test_what_a_lean_run_did_not_record_is_left_out(tmp_path: Path) -> None:
    run_dir = record(tmp_path, "records.level=lean", "kl={placement: loss, estimator: exact}")
    require_recomputed(
        run_dir, ["losses: not computed in 2 iterations, because column updates.kl_terms is not recorded"]
    )


def test_an_unfinished_run_is_computed_as_far_as_it_went(cli: Cli, copy: Path) -> None:
    cut_back(copy, 2, "interrupted")
    found = cli.json("verify", copy)
    assert (found["status"], found["recomputed"]["iterations"]) == ("interrupted", 2)
    cut_back(copy, 0, "interrupted")
    assert cli.json("verify", copy)["recomputed"] is None


def flip(run_dir: Path, table: str, column: str, row: int = 3, bit: int = 0) -> int:
    """Change one bit of a value, and every digest that knew it, so that no file is damaged; returns the row."""
    row = min(row, reader.read_moment(run_dir, manifest.load(run_dir), 1, verify=False)[table].num_rows - 1)

    def change(values: np.ndarray) -> np.ndarray:
        values.view(f"u{values.dtype.itemsize}")[row] ^= 1 << bit
        return values

    rewrite_cell(run_dir, table, 1, column, change)
    return row


CELLS: list[tuple[Stage, str, str]] = [
    ("rewards", "sequences", "scores"),
    ("rewards", "tokens", "kl_penalties"),
    ("rewards", "tokens", "raw_rewards"),
    ("advantages", "tokens", "returns"),
    ("losses", "updates", "ratios"),
    ("losses", "updates", "value_losses"),
    ("losses", "steps", "approx_kl"),
    ("coefficients", "iterations", "kl_coef"),
    ("coefficients", "iterations", "return_scale"),
    ("coefficients", "steps", "learning_rate"),
    ("summary", "iterations", "max_abs_old_rollout"),
]


@pytest.mark.parametrize(("stage", "table", "column"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_a_flipped_bit_of_a_result_is_named(cli: Cli, copy: Path, stage: Stage, table: str, column: str) -> None:
    row = flip(copy, table, column)
    code, out, _ = cli("verify", copy, "--json")
    found = json.loads(out)["recomputed"]
    difference = found["difference"]
    assert (code, found["stage"]) == (1, stage)
    assert [difference[name] for name in ("table", "iteration", "column", "row")] == [table, 1, column, row]
    assert int(difference["left_bits"], 16) ^ int(difference["right_bits"], 16) == 1
    assert difference["unequal_in_column"] == 1


def test_one_line_names_a_changed_number_and_files_alone_are_whole(cli: Cli, copy: Path) -> None:
    row = flip(copy, "tokens", "rewards")
    code, out, _ = cli("verify", copy)
    assert code == 1
    assert f"table tokens, iteration 1, column rewards, row {row}" in out.splitlines()[-1]
    assert cli.done("verify", copy, "--files").startswith("whole: complete")


@pytest.mark.parametrize("column", ["new_logprobs", "new_entropies"])
@pytest.mark.parametrize("from_row", [0, -1])
def test_a_step_without_numbers_is_one_line(cli: Cli, copy: Path, column: str, from_row: int) -> None:
    def change(values: np.ndarray) -> np.ndarray:
        values = values.astype(object)
        values[from_row:] = None
        return values

    rewrite_cell(copy, "updates", 1, column, change)
    last = reader.read_moment(copy, manifest.load(copy), 1)["steps"].to_pylist()[from_row]
    code, _, err = cli("verify", copy)
    assert code == 1
    where = f"minibatch {last['minibatch']} of epoch {last['epoch']}"
    said = f"table updates, iteration 1: new_logprobs or new_entropies is null in {where}"
    assert err.splitlines()[-1] == f"promise broken: {said}"


def test_steps_that_the_early_stop_leaves_out_are_named(cli: Cli, tmp_path: Path) -> None:
    run_dir = record(tmp_path, "value={kind: head}", "ppo.early_stop_kl=0.5")
    count = reader.read_moment(run_dir, manifest.load(run_dir), 1)["steps"].num_rows

    def change(values: np.ndarray) -> np.ndarray:
        values[0] = -90.0  # of one token in the first minibatch: a KL far above 0.5
        return values

    assert recomputed(run_dir).difference is None
    rewrite_cell(run_dir, "updates", 1, "new_logprobs", change)
    code, _, err = cli("verify", run_dir)
    assert code == 1
    assert f"table steps, iteration 1: has {count} rows, more than epochs and KL give" in err
