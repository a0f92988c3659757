"""The benchmark of errors against float64 runs on a model folder and a text file."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.benchmarks.float64 import main
from tests.support.models import source_model


def test_a_folder_is_measured_on_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ppo_repro.tasks.tokenizer import train_tokenizer

    source_model("llama").save_pretrained(tmp_path / "model")
    train_tokenizer("characters", ["abc 123"], 30).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("abc 321 cab" * 9)
    shape = ["--rows", "2", "--prompt", "3", "--response", "20"]
    main([str(tmp_path / "model"), str(tmp_path / "text.txt"), *shape])
    printed = capsys.readouterr().out
    assert "best tokens: tokens 40," in printed
    assert "wrong 0" in printed
    assert "worst gradient, stock" in printed
