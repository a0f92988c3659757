"""How many processes recorded each iteration, from the notes of a run and of those that resumed it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ppo_repro.records import manifest
from ppo_repro.records.folder import ENVIRONMENT_NAME
from ppo_repro.records.notes import processes_by_iteration


@pytest.mark.parametrize(
    ("note", "processes"),
    [
        ({"iteration": 1, "recorded": 2}, [1, 1, 2, 2]),  # iteration 1 was only computed again
        ({"iteration": 2, "recorded": 2}, [1, 1, 2, 2]),
        ({"iteration": 1}, [1, 2, 2, 2]),  # an older note
    ],
)
def test_an_iteration_counts_for_the_processes_that_recorded_it(
    note: dict[str, int], processes: list[int], deterministic_run: Path, tmp_path: Path
) -> None:
    shutil.copy(deterministic_run / ENVIRONMENT_NAME, tmp_path)
    head = manifest.load_head(deterministic_run)
    content = json.dumps({**note, "environment": {"processes": 2}}).encode()
    (tmp_path / "resumed-001.json").write_bytes(content)
    notes = {**head.notes, "resumed-001.json": manifest.content_digest(content)}
    head = head.model_copy(update={"notes": notes, "num_iterations": 4})
    assert processes_by_iteration(tmp_path, head) == processes
