"""The experiment on accuracy: it runs on small models and on a folder, and writes what it prints."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from experiments.accuracy.__main__ import main, text_of_file
from ppo_repro.errors import UserError
from tests.support.models import source_model


def test_small_models_give_a_row_of_each_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--family", "gpt2", "--case", "plain", "tiny weights", "--models", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for name, rows in (("logprobs", 2), ("logits", 2), ("greedy", 2), ("gradients", 2), ("parameters", 2 * 28 + 1)):
        table = pd.read_parquet(tmp_path / f"{name}.parquet")
        assert len(table) == rows and set(table["case"]) == {"plain", "tiny weights"}, name
        assert (f"\n{name}\n" in printed) == (name != "parameters")
    table = pd.read_parquet(tmp_path / "logprobs.parquet").set_index("case")
    assert table.loc["plain", "bfloat16 rms"] > 100 * table.loc["plain", "stock rms"] > 0


def test_the_text_is_cut_into_rows_of_prompt_and_response() -> None:
    text = text_of_file(list(range(12)), 2, 2, 3)
    assert text.prompts == [[0, 1], [5, 6]] and text.responses == [[2, 3, 4], [7, 8, 9]]
    with pytest.raises(UserError, match="12 tokens; 3 rows of 2 \\+ 3 need 15"):
        text_of_file(list(range(12)), 3, 2, 3)


def test_a_model_and_a_text_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "somewhere"])
    assert "--model and --text go together" in capsys.readouterr().err


def test_a_folder_is_measured_on_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ppo_repro.tasks.tokenizer import train_tokenizer

    source_model("llama").save_pretrained(tmp_path / "model")
    train_tokenizer("characters", ["abc 123"], 30).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("abc 321 cab" * 9)
    shape = ["--rows", "2", "--prompt", "3", "--response", "20"]
    main(["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--no-gradients", *shape])
    printed = capsys.readouterr().out
    assert "| model | as it is | 40 |" in printed and "gradients" not in printed
