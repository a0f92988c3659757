"""A rerun computes every bit again, whatever the layout; one flipped bit is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.watcher import Silent
from ppo_repro.records import manifest
from ppo_repro.records.diff import first_difference
from tests.support.language import rerun, run
from tests.support.runs import small_config
from tests.support.synthetic_run import accept, damage_cell

LAYOUT = ("layout.padding=left", "layout.rollout_slots=5", "layout.update_micro_batch=7")


@pytest.mark.parametrize("overrides", [(), LAYOUT], ids=["same layout", "other layout"])
def test_a_rerun_is_identical(deterministic_run: Path, overrides: tuple[str, ...]) -> None:
    found = rerun(deterministic_run, Silent(), overrides)
    assert (found.difference, found.iterations) == (None, 3)
    assert found.fingerprint == manifest.load(deterministic_run).fingerprint


@pytest.mark.usefixtures("row_noise")
def test_a_native_rerun_is_identical_under_its_own_layout_only(native_run: Path) -> None:
    """The negative control."""
    assert rerun(native_run, Silent(), LAYOUT).difference is not None
    assert rerun(native_run, Silent()).difference is None


def test_another_seed_is_another_run(deterministic_run: Path, tmp_path: Path) -> None:
    other, _ = run(small_config("seed=8", "ppo.iterations=1"), tmp_path, Silent())
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
    for compare in (lambda: first_difference(deterministic_run, copy), lambda: rerun(copy, Silent())):
        with pytest.raises(UserError, match=r"tokens/iteration=000001\.parquet: has another SHA-256"):
            compare()
    accept(copy, "tokens", 1)  # as if the run had computed this bit
    before, after = values_seen
    for found, left, right in (
        (first_difference(deterministic_run, copy), before, after),
        (rerun(copy, Silent()).difference, after, before),
    ):
        assert found is not None
        assert (found.table, found.iteration, found.column, found.row) == ("tokens", 1, "advantages", 11)
        assert (found.left, found.right, found.unequal_in_column) == (left, right, 1)
