"""What a whole replay of a run must say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ppo_repro.recompute.recompute import STAGES, Stage, lines, recompute


def require_replayed(run_dir: Path, stages: Sequence[Stage] = STAGES) -> None:
    found = recompute(run_dir, stages)
    assert found.difference is None, lines(found)
    assert set(found.compared) == set(stages)
    # at least one coefficient or learning rate in each iteration
    assert all(count >= 2 for count in found.compared.values()), found.compared
    assert lines(found) == [f"{stage}: {found.compared[stage]:,} values identical in 2 iterations" for stage in stages]
