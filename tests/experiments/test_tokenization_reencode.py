"""First ratios of responses that were decoded and encoded again: by hand, on recorded runs, and the control."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.tokenization.tables import run_drift
from analysis.tokenization.tokenizer import load_tokenizer, recorded_tokenizer, token_bytes
from experiments.tokenization.reencode import compared, counts, kind_of_drift, main, response_table
from ppo_repro.tasks.tokenizer import train_tokenizer


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_one_response_by_hand() -> None:
    """`ab` `c` `end` sampled, `a` `b` `c` `end` again after a first token that both have."""
    sampled, again = floats(-1.0, -2.0, -3.0, -0.5), floats(-1.0, -2.125, -2.75, -0.25, -0.5)
    assert compared(sampled, again, 1) == (1, 0, 5, -0.125)
    for other in (np.nextafter(sampled[1], np.float32(0)), np.float32(-0.0)):
        changed = floats(sampled[0], other, *sampled[2:])
        assert compared(sampled, changed, 2)[1] == 1 and compared(sampled, changed, 1)[1] == 0
    assert compared(floats(0.0), floats(-0.0), 1)[1] == 1, "bits, not values"
    table = pd.DataFrame({"drift": ["cut", "cut", "none"], "same_tokens": 1, "unequal": 0})
    found = counts(table.assign(log_ratio=[-0.125, math.log(0.79), 0.0]))
    assert (found["cut"], found["outside"], found["above 1"], found["tokens before drift"]) == (2, 0.5, 0, 2)


def test_kinds_of_drift_by_hand(tmp_path: Path) -> None:
    train_tokenizer("words", ["ab é ab"] * 2, 40).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    spelled = token_bytes(tokenizer)
    ids = {text: i for i, text in spelled.items()}
    ab, a, b, first, pad = ids[b"ab"], ids[b"a"], ids[b"b"], ids[b"\xc3"], 0
    rows = {(ab,): "none", (a, b): "cut", (ab, pad): "special", (first, ab): "bytes", (first, pad): "special"}
    for row, kind in rows.items():
        (again,) = tokenizer.encode(tokenizer.decode([row]))
        assert kind_of_drift(row, again, spelled) == kind
    assert kind_of_drift((a, b), (1,), spelled) == "bytes", "the new ids have a special token that the text named"


def test_a_deterministic_run_keeps_every_bit_that_is_promised(
    deterministic_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = response_table(deterministic_run, False)
    drift = run_drift(deterministic_run, recorded_tokenizer(deterministic_run), iterations=[0])
    moved = found["drift"] != "none"
    assert moved.mean() == drift["drift_seq_frac"][0] and 0 < moved.sum() < len(found)
    assert not found["unequal"].any() and (found["log_ratio"][~moved] == 0).all()
    assert (found["same_tokens"] == found["tokens"])[~moved].all() and (found["log_ratio"][moved] != 0).all()
    assert main([str(deterministic_run)]) == 0
    assert "in deterministic numerics there must be none" in capsys.readouterr().out


@pytest.mark.usefixtures("row_noise")
def test_the_control_finds_differences_and_is_asked_for(
    native_run: Path, deterministic_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([str(native_run)], ["--control", str(deterministic_run)]):
        assert main(arguments) == 2
        assert "give deterministic runs, or native ones with --control" in capsys.readouterr().err
    assert main(["--control", str(native_run)]) == 0
    assert "a control must have some" in capsys.readouterr().out
