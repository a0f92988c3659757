"""The level of records decides what is written down and nothing else; every promise holds at each of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ppo_repro.config.files import load_config
from ppo_repro.records import manifest, reader, schema
from ppo_repro.records.diff import first_difference
from ppo_repro.records.schema import LEVELS
from ppo_repro.runs.verify_stages import STAGES, LeftOut, Stage
from tests.support.language import resume, run, tiny_run
from tests.support.paths import TINY
from tests.support.resume import Stopped
from tests.support.runs import recomputed

CUT = ("rollout.top_p=0.9", "rollout.temperature=1.3")


def recorded(out: Path, *overrides: str) -> Path:
    return tiny_run(out, *CUT, *overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One configuration at every level."""
    return {level: recorded(tmp_path_factory.mktemp(level), f"records.level={level}") for level in LEVELS}


def columns_in_file(run_dir: Path, table: str) -> list[str]:
    return list(pq.read_schema(manifest.table_path(run_dir, table, 0)).names)


def results(run_dir: Path) -> tuple[str, dict[str, float | int | str], str]:
    """The fingerprint, the final results with the digests of the weights, and the name of the folder."""
    found = reader.open_manifest(run_dir)
    return found.fingerprint, found.final, run_dir.name


def test_no_level_changes_a_result(runs: dict[str, Path], tmp_path: Path) -> None:
    at_each = [results(runs[level]) for level in LEVELS]
    assert at_each[0] == at_each[1] == at_each[2]
    # control: another number of optimizer steps
    other = results(recorded(tmp_path, "records.level=lean", "ppo.epochs=1"))
    assert all(a != b for a, b in zip(other, at_each[0], strict=True))


def test_the_files_have_the_columns_of_the_level(runs: dict[str, Path]) -> None:
    for table in schema.TABLES:
        for level in LEVELS:
            included = LEVELS[: LEVELS.index(level) + 1]
            expected = [c.name for c in table.columns if c.level in included and c.only_with is None]
            assert columns_in_file(runs[level], table.name) == expected
    counts = [sum(len(columns_in_file(runs[level], t.name)) for t in schema.TABLES) for level in LEVELS]
    assert counts[0] < counts[1] < counts[2]


def resumed(out: Path, before: str, after: str, *overrides: str) -> tuple[Path, int]:
    """The folder of a run of 3 iterations that is resumed at another level, and its iterations at the first level."""
    config = load_config(TINY, [*CUT, f"records.level={before}", "ppo.iterations=3", *overrides])
    with pytest.raises(KeyboardInterrupt):
        run(config, out, Stopped(1))
    (run_dir,) = out.glob("tiny/*")
    count = reader.open_manifest(run_dir, allow_incomplete=True).num_iterations
    assert 0 < count < 3
    resume(run_dir, [f"records.level={after}"])
    return run_dir, count


@pytest.mark.slow
def test_a_run_is_resumed_at_another_level(tmp_path: Path) -> None:
    run_dir, before = resumed(tmp_path, "full", "lean")
    frame = reader.read_tokens(run_dir)
    is_full = frame["iteration"] < before
    assert is_full.any()
    assert not is_full.all()
    assert frame["raw_rewards"].notna().equals(is_full)
    whole = recorded(tmp_path / "whole", "ppo.iterations=3")
    assert first_difference(run_dir, whole) is None
    assert results(run_dir)[0] == results(whole)[0]
    assert recomputed(run_dir).difference is None


EXACT: dict[Stage, tuple[str, str]] = {
    "rewards": ("kl={placement: reward, estimator: exact, direction: reference_policy}", "tokens.reverse_ref_kl"),
    "losses": ("kl={placement: loss, estimator: exact}", "updates.kl_terms"),
}


@pytest.mark.parametrize("stage", EXACT)
@pytest.mark.parametrize("levels", [("full", "lean"), ("lean", "full")], ids=" then ".join)
def test_verify_leaves_out_only_the_iterations_that_lack_a_column(
    stage: Stage, levels: tuple[str, str], tmp_path: Path
) -> None:
    option, column = EXACT[stage]
    run_dir, before = resumed(tmp_path, *levels, option)
    found = recomputed(run_dir)
    assert found.difference is None, found.lines()
    lean = 3 - before if levels[0] == "full" else before
    assert found.left_out == {stage: LeftOut(column, lean)}
    assert set(found.compared) == set(STAGES)
    (compared,) = [line for line in found.lines() if line.startswith(f"{stage}: {found.compared[stage]:,} ")]
    assert f" in {3 - lean} iteration" in compared
    assert f"{stage}: not computed in {lean} iteration" in found.lines()[-1]
