"""The levels of records in control runs: no result changes, and what they add is what the update held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ppo_repro.control.loop import control_iterations, prepare
from ppo_repro.control.tables import iteration_tables
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


def test_the_losses_and_gradients_are_those_of_the_update() -> None:
    config = small_control(*SHORT, "records.level=deep")
    state = prepare(config)
    names = [name for name, _ in state.agent.named_parameters()]
    for item in control_iterations(config, state):
        tables = iteration_tables(item, config.records.level)
        updates, steps = tables["updates"], tables["steps"].to_pylist()
        for name in ("policy_losses", "surrogates", "value_losses"):
            held = np.concatenate([getattr(u, name).numpy() for u in item.updates])
            assert updates.column(name).to_numpy().tobytes() == held.tobytes()
        for u, step in zip(item.updates, steps, strict=True):
            assert step["tensors"].split(" ") == names == [g.name for g in u.gradients]
            assert step["tensor_grad_norms"] == [g.norm for g in u.gradients]
            assert step["tensor_grad_max_abs"] == [g.max_abs for g in u.gradients]
            assert step["tensor_grad_zeros"] == [g.zeros for g in u.gradients]
            # the terms are rounded to float32 each, about 0.01, and the norms to 2^-26 of the largest element
            assert step["surrogate_loss"] + step["entropy_loss"] == pytest.approx(step["policy_loss"], abs=1e-7)
            assert np.hypot.reduce(step["tensor_grad_norms"]) == pytest.approx(step["joint_grad_norm"], rel=1e-6)
            assert step["entropy_loss"] < 0 and max(step["tensor_grad_max_abs"]) > 0
    state.environments.close()
