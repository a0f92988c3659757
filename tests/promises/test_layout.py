"""The layout never changes a run's fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.base.watcher import Silent
from ppo_repro.records import manifest
from tests.support.language import run
from tests.support.runs import small_config

LAYOUTS = [
    ("layout.rollout_slots=3", "layout.prefill_chunk=2", "layout.forward_micro_batch=1"),
    ("layout.rollout_slots=16", "layout.padding=none", "layout.update_micro_batch=5"),
    ("layout.threads=2", "layout.padding=left", "layout.prefix_cache=false", "layout.gradient_checkpointing=true"),
]


def fingerprint(out: Path, *overrides: str) -> str:
    return manifest.load(run(small_config(*overrides), out, Silent())[0]).fingerprint


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_the_fingerprint(deterministic_run: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    assert fingerprint(tmp_path, *layout) == manifest.load(deterministic_run).fingerprint


@pytest.mark.usefixtures("row_noise")
def test_native_layouts_change_the_fingerprint(native_run: Path, tmp_path: Path) -> None:
    """The negative control."""
    assert fingerprint(tmp_path, *LAYOUTS[1], "numerics.mode=native") != manifest.load(native_run).fingerprint
