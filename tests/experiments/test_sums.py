"""The experiment on the real model: its task, as it stands in the checkout, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.smollm2.curves import curve, main
from ppo_repro.config.files import load_config
from ppo_repro.records import manifest, reader
from ppo_repro.tasks.problems import row_of
from ppo_repro.tasks.sources import load_source
from tests.support.paths import ROOT

CONFIG = ROOT / "experiments" / "smollm2" / "sums.yaml"


def test_a_sum_is_right_if_the_line_holds_it_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    task = load_config(CONFIG).task
    source = load_source(task, 0)
    assert source.verifier is not None
    prompts = source.problems.by_key
    assert len(prompts) == 90 * 90 - 1
    prompt = prompts["47+38"]
    assert prompt.prompt == "12 + 25 = 37\n47 + 38 =" and prompt.answer == "85"
    texts = (" 85\n", "85", " 85", " 84\n", " 85.", " 8\n5", "", " 085\n")
    rows = [row_of(prompt, (text,)) for text in texts]
    assert source.verifier(rows) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_tables_are_those_of_the_run(
    deterministic_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, rows = manifest.load(deterministic_run), reader.read_iterations(deterministic_run)
    found = curve(deterministic_run)
    assert found["accuracy"].tolist()[:-1] == rows["accuracy"].tolist() and len(found) == len(rows) + 1
    assert found["eval_accuracy"].iloc[-1] == recorded.final["eval_accuracy"]
    assert set(found["fingerprint"]) == {recorded.fingerprint}
    assert main([deterministic_run], tmp_path) == 0 and (tmp_path / "curves.csv").is_file()
    shown = capsys.readouterr().out
    assert f"{rows['eval_accuracy'].iloc[0]:.1%}" in shown and recorded.fingerprint[:12] in shown
    assert main([tmp_path / "absent"], tmp_path) == 2 and "absent" in capsys.readouterr().err
