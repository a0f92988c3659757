"""A run tells how accurate its log-probs are: once, at its start, outside the fingerprint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from ppo_repro.records import manifest
from ppo_repro.records.folder import ACCURACY_NAME
from ppo_repro.records.notes import Accuracy, read_accuracy
from ppo_repro.runs.summary import summarise
from tests.support.language import small_run
from tests.support.runs import manifests_read, small_config


def measured(run_dir: Path) -> Accuracy:
    found = read_accuracy(run_dir, manifest.load(run_dir))
    assert found is not None
    return found


def test_a_run_records_and_tells_it(deterministic_run: Path) -> None:
    found = measured(deterministic_run)
    assert found.tokens == 4 * (small_config().numerics.max_context - 1)
    assert 0 < found.deterministic_rms < found.deterministic_max < 1e-4
    assert not found.is_low
    summary = summarise(deterministic_run)
    assert summary.figures["numerical_accuracy"] == asdict(found)
    assert found.sentence() in summary.sentences
    assert ACCURACY_NAME in manifest.load(deterministic_run).notes


def test_a_summary_reads_the_manifest_as_often_for_every_length_of_a_run(
    deterministic_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = manifests_read(monkeypatch)
    assert summarise(deterministic_run).figures["iterations"] == 3
    assert 0 < len(read) < 3, "and not once for each iteration"


def test_measuring_changes_no_bit(deterministic_run: Path, tmp_path: Path) -> None:
    quiet = small_run(tmp_path, "numerics.accuracy_sequences=0")
    summary = summarise(quiet)
    assert summary.figures["fingerprint"] == manifest.load(deterministic_run).fingerprint
    assert summary.figures["numerical_accuracy"] is None
    assert not (quiet / ACCURACY_NAME).exists()
    assert not any("float64" in line for line in summary.sentences)
