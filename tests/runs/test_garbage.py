"""What a checkpoint leaves in cycles does not wait for the collector."""

from __future__ import annotations

import gc
from pathlib import Path

from ppo_repro.config.files import load_config
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY


class _Counting(Silent):
    """Cycles found, and objects out of the collector's sight, as each iteration is told of."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.frozen: list[int] = []

    def iteration(self, done: int, total: int, figures: str) -> None:
        self.found.append(gc.collect())
        self.frozen.append(gc.get_freeze_count())


def test_a_checkpoint_leaves_no_cycles_and_collecting_them_takes_no_time(tmp_path: Path) -> None:
    watcher = _Counting()
    run(load_config(TINY, ["checkpoints.every=1", "ppo.iterations=4"]), tmp_path, watcher)
    # one checkpoint alone leaves more than 50: a pointer of safetensors for each tensor, with its dictionary
    assert max(watcher.found[1:]) < 30
    assert min(watcher.frozen) > 10_000
    assert gc.get_freeze_count() == 0
