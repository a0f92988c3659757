"""The experiment on the real model: its task, as it stands in the checkout."""

from __future__ import annotations

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.tasks.problems import load_source, row_of
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
    assert (prompt.prompt, prompt.answer) == ("12 + 25 = 37\n47 + 38 =", "85")
    texts = (" 85\n", "85", " 85", " 84\n", " 85.", " 8\n5", "", " 085\n")
    rows = [row_of(prompt, (text,)) for text in texts]
    assert source.verifier(rows) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
