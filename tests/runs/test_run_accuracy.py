"""A run tells how accurate its log-probs are: once, at its start, outside the fingerprint."""

from __future__ import annotations

from pathlib import Path

from ppo_repro.records import accuracy, manifest
from ppo_repro.records.accuracy import Accuracy
from ppo_repro.runs.summary import LANGUAGE_RUNS, summarise
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.runs import small_config


def measured(run_dir: Path) -> Accuracy:
    found = accuracy.read(run_dir, manifest.load(run_dir))
    assert found is not None
    return found


def test_a_run_records_and_tells_it(deterministic_run: Path) -> None:
    found = measured(deterministic_run)
    assert found.tokens == 4 * (small_config().numerics.max_context - 1)
    assert 0 < found.deterministic_rms < found.deterministic_max < 1e-4 and not found.is_low
    summary = summarise(deterministic_run)
    assert summary.numerical_accuracy == found
    assert accuracy.sentence(found) in LANGUAGE_RUNS.verdicts(summary)
    assert accuracy.FILE_NAME in manifest.load(deterministic_run).notes


def test_measuring_changes_no_bit(deterministic_run: Path, tmp_path: Path) -> None:
    quiet, _ = run(small_config("numerics.accuracy_sequences=0"), tmp_path, Silent())
    assert summarise(quiet).fingerprint == summarise(deterministic_run).fingerprint
    assert summarise(quiet).numerical_accuracy is None and not (quiet / accuracy.FILE_NAME).exists()
    assert not any("float64" in line for line in LANGUAGE_RUNS.verdicts(summarise(quiet)))
