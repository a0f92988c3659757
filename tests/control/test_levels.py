"""The levels of records in control runs: no result changes, and what they add is what the update held."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.records import control_schema, manifest, reader, schema
from ppo_repro.watcher import Silent
from tests.support.control import rerun, run, small_control

SHORT = ("ppo.iterations=2", "ppo.entropy_coef=0.01")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One configuration at every level."""
    configs = {level: small_control(*SHORT, f"records.level={level}") for level in schema.LEVELS}
    return {level: run(config, tmp_path_factory.mktemp(level), Silent())[0] for level, config in configs.items()}


def results(run_dir: Path) -> tuple[str, dict[str, float | int | str], str]:
    found = manifest.load(run_dir)
    return found.fingerprint, found.final, run_dir.name


def test_no_level_changes_a_result(runs: dict[str, Path], tmp_path: Path) -> None:
    at_each = [results(runs[level]) for level in schema.LEVELS]
    assert at_each[0] == at_each[1] == at_each[2]
    # control: another coefficient in the loss
    other = results(run(small_control(*SHORT, "ppo.value_coef=0.25"), tmp_path, Silent())[0])
    assert all(a != b for a, b in zip(other, at_each[0], strict=True))
    assert rerun(runs["lean"], Silent(), ["records.level=deep"]).difference is None


def test_each_level_adds_columns(runs: dict[str, Path]) -> None:
    for level in schema.LEVELS:
        frames = reader.read_updates(runs[level]), reader.read_steps(runs[level])
        tables = control_schema.UPDATES, control_schema.STEPS
        for frame, table in zip(frames, tables, strict=True):
            for column in table.columns:
                recorded = schema.LEVELS.index(column.level) <= schema.LEVELS.index(level)
                assert frame[column.name].notna().all() == recorded, (column.name, level)
