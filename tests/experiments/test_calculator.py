"""The example of a tool between two turns, as it stands in the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.records import manifest, reader
from ppo_repro.tasks.problems import load_source, row_of
from tests.support.language import rerun, run
from tests.support.paths import ROOT

CONFIG = ROOT / "experiments" / "calculator" / "calculator.yaml"


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_calculator_answers_products_and_nothing_else() -> None:
    task = load_config(CONFIG).task
    source = load_source(task, 0)
    score, step, prompt = source.verifier, source.step, source.problems.by_key["7*11"]
    assert score is not None
    assert step is not None

    def said(*turns: str) -> object:
        return step([row_of(prompt, turns)])[0]

    assert [said("7*11="), said("12*0="), said("7*11"), said("="), said("7+11="), said("7*11=", "77", "=")] == [
        *("77", "0"),
        *(None, None, None, None),
    ]
    turns = (("7*11=", "77", ""), ("7*1=", "7", ""), ("7*11=77",), ("7*11=", "77", "0"))
    assert score([row_of(prompt, texts) for texts in turns]) == [1.0, 0.2, 0.0, 0.2]


@pytest.mark.slow
def test_the_example_uses_the_tool_and_repeats_itself(tmp_path: Path) -> None:
    run_dir = run(load_config(CONFIG, ["ppo.iterations=2"]), tmp_path)[0]
    forced = reader.read_sequences(run_dir, columns=["is_forced"])["is_forced"]
    assert sum(max(of_episode) for of_episode in forced) > len(forced) // 4
    found = rerun(run_dir, ["layout.prefix_cache=false", "layout.threads=2", "layout.padding=none"])
    assert found.difference is None
    assert found.fingerprint == manifest.load(run_dir).fingerprint
