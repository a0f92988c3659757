"""The task of the experiment on the real model, as it stands in the checkout."""

from __future__ import annotations

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.config.tasks import PythonTask
from ppo_repro.tasks.python_task import load_file, read_prompts, scores
from ppo_repro.tasks.transcripts import make_transcript
from tests.support.paths import ROOT

CONFIG = ROOT / "experiments" / "smollm2" / "sums.yaml"


def test_a_sum_is_right_if_the_line_holds_it_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    task = load_config(CONFIG).task
    assert isinstance(task, PythonTask)
    of = load_file(task)
    prompts = read_prompts(of)
    assert len(prompts) == 90 * 90 - 1
    prompt = next(p for p in prompts if p.key == "47+38")
    assert prompt.prompt == "12 + 25 = 37\n47 + 38 =" and prompt.answer == "85"
    texts = (" 85\n", "85", " 85", " 84\n", " 85.", " 8\n5", "", " 085\n")
    rows = [make_transcript(prompt.key, prompt.prompt, prompt.answer, prompt.fields, (text,)) for text in texts]
    assert scores(of, rows) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
