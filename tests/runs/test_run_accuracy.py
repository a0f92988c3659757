"""A run tells how accurate its log-probs are: once, at its start, outside the fingerprint."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from ppo_repro.config.inputs import run_folder
from ppo_repro.records import accuracy, manifest
from ppo_repro.records.accuracy import Accuracy
from ppo_repro.runs import language
from ppo_repro.runs.summary import LANGUAGE_RUNS, summarise
from ppo_repro.runs.verify import verify
from ppo_repro.watcher import Silent
from tests.support.language import resume, run
from tests.support.runs import small_config


class Interrupted(Silent):
    def iteration(self, done: int, total: int, figures: str) -> None:
        raise KeyboardInterrupt


def measured(run_dir: Path) -> Accuracy:
    found = accuracy.read(run_dir, manifest.load(run_dir))
    assert found is not None
    return found


@pytest.fixture
def no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(language, "policy_accuracy", refuse)


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


def test_a_resumed_run_keeps_what_is_recorded(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    config = small_config("ppo.iterations=2")
    with suppress(KeyboardInterrupt):
        run(config, tmp_path, Interrupted())
    run_dir = run_folder(config, tmp_path)
    before = (run_dir / accuracy.FILE_NAME).read_bytes()
    request.getfixturevalue("no_measurement")
    resume(run_dir, Silent())
    assert (run_dir / accuracy.FILE_NAME).read_bytes() == before
    assert verify(run_dir).status == "complete"


def test_the_merged_weights_of_an_adapter_are_measured(deterministic_run: Path, tmp_path: Path) -> None:
    config = small_config("lora={rank: 2, alpha: 4}", "ppo.iterations=1")
    # B is 0 at the start, so the merged weights are those of the model
    assert measured(run(config, tmp_path, Silent())[0]) == measured(deterministic_run)
