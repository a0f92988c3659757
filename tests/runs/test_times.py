"""Every second of a run is in a phase: with a clock that counts Python calls, so that no result depends on speed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from ppo_repro.base import clock as clocks
from ppo_repro.base.clock import OTHER, Clock
from ppo_repro.base.watcher import Silent
from ppo_repro.records import manifest, reader
from ppo_repro.records.notes import by_phase, phases_of, read_times
from ppo_repro.runs.language import LanguageKind
from ppo_repro.runs.run import run
from tests.support.runs import small_config

OF_ITERATIONS = {"evaluation", "rollout", "forward", "update", "digests", OTHER}
OF_RUN = {"start", "inputs", "records", "preparation", "models", "closing"}
MUCH = 0.05


class Ticks:
    """A time that goes on by one with every call of a Python function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(clocks, "now", lambda: float(self.count))

    def __enter__(self) -> Ticks:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call"


def test_a_clock_gives_every_second_to_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([10.0, 11.0, 13.5, 13.5, 20.0, 21.0])
    monkeypatch.setattr(clocks, "now", lambda: next(seconds))
    clock = Clock()
    clock.lap("a")
    clock.lap("b")
    clock.lap("c")
    clock.divide({"a": 2.0, "d": 4.0})
    clock.lap("b")
    assert clock.seconds == {"a": 3.0, "b": 3.5, "c": 0.0, "d": 4.0, OTHER: 0.5}
    assert clock.with_total() == {"a": 3.0, "b": 3.5, "c": 0.0, "d": 4.0, OTHER: 0.5, "total": 11.0}
    assert list(clock.with_total())[-2:] == [OTHER, "total"]


def test_the_phases_of_a_run_add_up_and_little_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("checkpoints.every=2", "model.warm_start_steps=2")
    with Ticks(monkeypatch) as ticks:
        run_dir, seconds = run(LanguageKind(Silent()), config, tmp_path)
    assert set(seconds) == {*OF_ITERATIONS, *OF_RUN, "checkpoints", "total"}
    # the calls before the clock and after its last lap are a handful
    assert seconds["total"] == sum(spent for phase, spent in seconds.items() if phase != "total")
    assert ticks.count - 500 < seconds["total"] <= ticks.count
    assert 0 <= seconds[OTHER] < MUCH * seconds["total"]
    assert all(seconds[phase] > 0 for phase in seconds)
    recorded = manifest.load(run_dir)
    in_tables = phases_of(reader.read_iterations(run_dir))
    assert set(in_tables) == OF_ITERATIONS
    assert in_tables[OTHER] < MUCH * sum(in_tables.values())
    assert all(in_tables[phase] <= seconds[phase] for phase in in_tables)
    found = by_phase(run_dir, recorded, in_tables)
    # what is left is the writing of the times themselves
    assert 0 < seconds["total"] - found["total"] < MUCH * seconds["total"]
    assert read_times(run_dir, recorded).iterations == 3  # type: ignore[union-attr]
