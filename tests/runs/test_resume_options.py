"""A run interrupted and resumed under another layout, with what each option of the algorithm adds to its state."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.records import reader
from ppo_repro.runs.run import run_folder
from ppo_repro.watcher import Silent
from tests.support.language import resume, run
from tests.support.paths import TINY

STATES = {
    "adapter": ("lora={rank: 2, alpha: 4.0}",),
    "adapters of both": (
        "lora={rank: 2, alpha: 4.0}",
        "value={learning_rate: 1e-3, lora: {rank: 2, alpha: 4.0, target_modules: [q_proj]}}",
    ),
    "coefficients": (
        "kl.controller={kind: adaptive, target_kl: 0.01, horizon: 15}",
        "ppo.objective={kind: kl_penalty, target_kl: 1e-9}",
        "ppo.schedule=cosine",
    ),
    "head and returns": (
        "value={kind: head, normalize_returns: true}",
        "ppo.objective={kind: adaptive_clip, target_kl: 9.0}",
    ),
    "no value model": ("value={kind: none}", "advantages={kind: group}", "kl={placement: loss}"),
}
FAST = ("adapters of both", "head and returns")


class Interrupting(Silent):
    def iteration(self, done: int, total: int, figures: str) -> None:
        if done == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "options",
    [pytest.param(STATES[n], id=n, marks=[] if n in FAST else pytest.mark.slow) for n in STATES],
)
def test_a_resumed_run_is_the_uninterrupted_one(options: tuple[str, ...], tmp_path: Path) -> None:
    config = load_config(TINY, [*options, "ppo.iterations=3", "checkpoints.every=1"])
    whole, _ = run(config, tmp_path / "whole", Silent())
    with suppress(KeyboardInterrupt):
        run(config, tmp_path / "parts", Interrupting())
    parts = run_folder(config, tmp_path / "parts")
    assert len(reader.open_manifest(parts, allow_incomplete=True).iterations) < 3
    found = resume(parts, Silent(), ["layout.padding=left", "layout.update_micro_batch=1"])
    assert found.start > 0, "it began again, so nothing was taken from a checkpoint"
    assert reader.open_manifest(parts).fingerprint == reader.open_manifest(whole).fingerprint
    rows = reader.read_iterations(whole)
    moving = [name for name in ("kl_coef", "clip_range", "penalty_coef", "return_scale") if rows[name].nunique() > 1]
    assert bool(moving) == (options in (STATES["coefficients"], STATES["head and returns"]))
