"""The benchmark of draws runs on a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.benchmarks.draws import QUESTIONS, main
from tests.support.models import source_model


def test_a_folder_is_measured_by_its_own_contexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ppo_repro.tasks.tokenizer import train_tokenizer

    source_model("llama").save_pretrained(tmp_path)
    tokenizer = train_tokenizer("characters", list(QUESTIONS), 60)
    tokenizer.chat_template = "{{ messages[0]['content'][:9] }}"
    tokenizer.save_pretrained(tmp_path)
    main([str(tmp_path), "--length", "5", "--dumps", "1", "--right", "3", "--tokens", "3000"])
    table = dict(line.split(" | ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("| "))
    assert table["| right"] == "0 |"
    assert table["| temperature 1.05"] in ("0 |", "1 |")
