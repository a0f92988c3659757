"""The small run the tests share, and a DPO run on its pairs."""

import os
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.records import manifest
from ppo_repro.runs.verify_stages import Recomputed, recompute
from tests.support.paths import SMALL

REWARD_MODEL = "{kind: trained_model, num_pairs: 24, minibatch_size: 8, learning_rate: 1e-3}"


DPO = """
experiment: baseline
seed: 2
run: {run}
num_eval_prompts: 6
dpo: {{beta: 0.1, epochs: 2, minibatch_size: 17, learning_rate: 2e-3}}
numerics: {{max_context: 24}}
layout: {{threads: 1}}
"""


def small_config(*overrides: str) -> RunConfig:
    """`small.yaml` with some fields changed."""
    return load_config(SMALL, overrides)


def recorded_iterations(folder: Path) -> int:
    """Files of the `iterations` table anywhere below a folder in which runs are at work.

    Not by `rglob`, which fails where a folder is removed while it looks, as those of unfinished checkpoints are.
    """
    inside = (names for path, _, names in os.walk(folder) if Path(path).parts[-2:] == ("records", "iterations"))
    return sum(name.startswith("iteration=") and name.endswith(".parquet") for names in inside for name in names)


def recomputed(run_dir: Path) -> Recomputed:
    """The stages of a language run, computed again from its records."""
    found = recompute(run_dir, manifest.load(run_dir))
    assert found is not None
    return found


def manifests_read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of which whole manifests are read from now on, once for each time."""
    read, log = list[Path](), manifest.read_log

    def counting(run_dir: Path, *about: Any) -> tuple[manifest.IterationEntry, ...]:
        read.append(run_dir)
        return log(run_dir, *about)

    monkeypatch.setattr(manifest, "read_log", counting)
    return read


def run_below(folder: Path) -> Path:
    """The folder of the only run anywhere below a folder."""
    (found,) = (path.parent for path in folder.rglob("manifest.json"))
    return found
