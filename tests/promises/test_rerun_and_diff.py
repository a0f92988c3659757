"""A rerun computes every bit again, whatever the layout; one flipped bit is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import load_config
from ppo_repro.records import manifest
from ppo_repro.records.diff import first_difference
from tests.support.language import rerun, small_run
from tests.support.paths import TINY
from tests.support.recipes import OTHER_LAYOUT
from tests.support.resume import Recorded, record
from tests.support.synthetic_run import accept, damage_cell


@pytest.mark.parametrize("overrides", [(), OTHER_LAYOUT], ids=["same layout", "other layout"])
def test_a_rerun_is_identical(deterministic_run: Path, overrides: tuple[str, ...]) -> None:
    found = rerun(deterministic_run, overrides)
    assert (found.difference, found.iterations) == (None, 3)
    assert found.fingerprint == manifest.load(deterministic_run).fingerprint


@pytest.mark.usefixtures("row_noise")
def test_a_native_rerun_is_identical_under_its_own_layout_only(native_run: Path) -> None:
    """The negative control."""
    assert rerun(native_run, OTHER_LAYOUT).difference is not None
    assert rerun(native_run).difference is None


def test_another_seed_is_another_run(deterministic_run: Path, tmp_path: Path) -> None:
    other = small_run(tmp_path, "seed=8", "ppo.iterations=1")
    difference = first_difference(deterministic_run, other)
    assert difference is not None
    assert difference.table == "warm_start_steps"


def test_a_flipped_bit_is_named(deterministic_run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(deterministic_run, tmp_path / "copy"))
    values_seen: list[float] = []

    def flip(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        flipped = values.copy()
        flipped.view(np.int32)[11] ^= 1
        values_seen.extend((float(values[11]), float(flipped[11])))
        return flipped

    assert first_difference(deterministic_run, copy) is None
    damage_cell(copy, "tokens", 1, "advantages", flip)
    for compare in (lambda: first_difference(deterministic_run, copy), lambda: rerun(copy)):
        with pytest.raises(UserError, match=r"tokens/iteration=000001\.parquet: has another SHA-256"):
            compare()
    accept(copy, "tokens", 1)  # as if the run had computed this bit
    before, after = values_seen
    for found, left, right in (
        (first_difference(deterministic_run, copy), before, after),
        (rerun(copy).difference, after, before),
    ):
        assert found is not None
        assert (found.table, found.iteration, found.column, found.row) == ("tokens", 1, "advantages", 11)
        assert (found.left, found.right, found.unequal_in_column) == (left, right, 1)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Four iterations, and the checkpoint after the second one."""
    config = load_config(TINY, ["ppo.iterations=4", "checkpoints.every=2", "model.warm_start_steps=3"])
    return record(config, tmp_path_factory.mktemp("kept"))


def flip_a_reward(run_dir: Path, iteration: int) -> None:
    """Change one bit of an iteration, counted from 0, as if the run had computed it."""
    damage_cell(run_dir, "tokens", iteration, "rewards", lambda values: np.nextafter(values, np.float32(9)))
    accept(run_dir, "tokens", iteration)


@pytest.mark.parametrize(("only", "begun"), [(range(3, 4), 2), (range(2, 3), 2), (range(1, 2), 0)])
def test_some_iterations_are_computed_from_the_checkpoint_before_them(kept: Recorded, only: range, begun: int) -> None:
    found = rerun(kept.whole, OTHER_LAYOUT, only=only)
    assert (found.difference, found.begun, found.iterations) == (None, begun, only.stop - begun)
    assert found.fingerprint == manifest.load(kept.whole).iterations[only.stop - 1].chain


def test_some_iterations_of_an_incomplete_run_are_compared(kept: Recorded, tmp_path: Path) -> None:
    run_dir = kept.copy(3, tmp_path)
    assert rerun(run_dir, only=range(2, 3)).difference is None
    with pytest.raises(UserError, match=r"--iterations 2:3: .* has recorded iterations 0 to 2; choose some of these"):
        rerun(run_dir, only=range(2, 4))


def test_a_difference_in_those_iterations_is_named(kept: Recorded, tmp_path: Path) -> None:
    """The negative control."""
    run_dir = kept.copy(4, tmp_path)
    flip_a_reward(run_dir, 2)
    found = rerun(run_dir, only=range(3, 4)).difference
    assert found is not None
    assert (found.table, found.iteration, found.column) == ("tokens", 2, "rewards")
