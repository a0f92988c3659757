"""First ratios of responses that were decoded and encoded again: by hand, on recorded runs, and the control."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.tokenization.retokenize import AUDIT_COLUMNS, encoded_again
from analysis.tokenization.tables import run_drift
from analysis.tokenization.tokenizer import load_tokenizer, recorded_tokenizer, token_bytes
from experiments.tokenization import first_ratios
from experiments.tokenization.first_ratios import (
    COMPARED,
    checked_config,
    compared,
    kind_of_drift,
    logprobs_of,
    outside_band,
    response_table,
    start_model,
)
from experiments.tokenization.reencode import bits, main, of_run, ratios, runs_of, verdict
from ppo_repro.errors import UserError
from ppo_repro.grids.spec import load_grid
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import policy_logits
from ppo_repro.records import reader
from ppo_repro.tasks.tokenizer import train_tokenizer


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_one_response_by_hand() -> None:
    """`ab` `c` `end` sampled, `a` `b` `c` `end` again after a first token that both have."""
    sampled, again = floats(-1.0, -2.0, -3.0, -0.5), floats(-1.0, -2.125, -2.75, -0.25, -0.5)
    found = compared(sampled, again, 1, 0.2)
    assert tuple(found) == COMPARED
    assert found["same_tokens"] == 1 and found["unequal"] == 0 and found["tokens_again"] == 5
    # -6.625 + 6.5 = -0.125, and exp(-0.125) = 0.88 is inside 0.8 to 1.2
    assert found["log_ratio"] == -0.125 and found["response_outside"] == 0
    # by position 0, -0.125, 0.25, 0.25: exp(0.25) = 1.28
    assert found["aligned"] == 4 and found["outside"] == 2 and found["first_outside"] == 0.0
    assert compared(sampled, again, 1, 0.1)["response_outside"] == 1
    shorter = compared(sampled, sampled[:3], 3, 0.2)
    assert shorter["log_ratio"] == 0.5 and shorter["aligned"] == 3 and math.isnan(shorter["first_outside"])


def test_one_bit_is_a_difference() -> None:
    sampled = floats(-1.0, -2.0)
    assert compared(sampled, sampled.copy(), 2, 0.2)["unequal"] == 0
    for other in (np.nextafter(sampled[1], np.float32(0)), np.float32(-0.0)):
        changed = floats(sampled[0], other)
        assert compared(sampled, changed, 2, 0.2)["unequal"] == 1 and compared(sampled, changed, 1, 0.2)["unequal"] == 0
    assert compared(floats(0.0), floats(-0.0), 1, 0.2)["unequal"] == 1, "bits, not values"


def test_the_band_is_that_of_the_ratio() -> None:
    logs = np.log([0.79, 0.81, 1.0, 1.19, 1.21])
    assert outside_band(logs, 0.2).tolist() == [True, False, False, False, True]


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
    found = response_table(deterministic_run, 0.2, False)
    drift = run_drift(deterministic_run, recorded_tokenizer(deterministic_run), boundary="leading", iterations=[0])
    moved = found["drift"] != "none"
    assert moved.mean() == drift["drift_seq_frac"][0] and 0 < moved.sum() < len(found)
    assert found["scored"].all() and not found["unequal"].any()
    assert (found["same_tokens"] == found["tokens"])[~moved].all() and (found["log_ratio"][~moved] == 0).all()
    assert (found["log_ratio"][moved] != 0).all()
    counts = of_run(deterministic_run)
    assert (
        counts == {**bits(found), **ratios(found)} and counts["exactly 1"] == 0 and counts["tokens without drift"] > 0
    )
    # alone, each by itself, the new ids have the same log-probs
    config = checked_config(deterministic_run, False)
    sequences = reader.read_sequences(deterministic_run, iterations=[0], columns=[*AUDIT_COLUMNS, "prompt_ids"])
    tokens = reader.read_tokens(deterministic_run, iterations=[0], columns=["sequence", "rollout_logprobs"])
    said, again = encoded_again(sequences, recorded_tokenizer(deterministic_run))
    policy = start_model(deterministic_run, config)
    for i in np.flatnonzero(moved):
        end = list(sequences["response_ids"][i][len(said[i]) :])
        (alone,) = logprobs_of(policy, [list(sequences["prompt_ids"][i])], [[*again[i], *end]], config)
        before = tokens["rollout_logprobs"][tokens["sequence"] == i]
        assert found["log_ratio"][i] == math.fsum([*alone.tolist(), *(-before).tolist()])
        assert found["tokens_again"][i] == len(alone)
    assert main([str(deterministic_run)]) == 0
    assert "in deterministic numerics there must be none" in capsys.readouterr().out


@pytest.mark.usefixtures("row_noise")
def test_the_control_finds_differences_and_is_asked_for(
    native_run: Path, deterministic_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(native_run)]) == 2
    assert (
        "numerics.mode = native promises no equal bits; run it in deterministic, or give --control"
        in capsys.readouterr().err
    )
    assert main(["--control", str(deterministic_run)]) == 2
    assert "numerics.mode = deterministic is no control" in capsys.readouterr().err
    assert main(["--control", str(native_run)]) == 0
    assert "a control must have some" in capsys.readouterr().out


@pytest.mark.slow
def test_logprobs_are_those_of_the_temperature_sampled_at(deterministic_run: Path) -> None:
    config = checked_config(deterministic_run, False)
    hot = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 2.0})})
    policy, prompt, response = start_model(deterministic_run, config), [2, 3], [4, 5, 1]
    (found,) = logprobs_of(policy, [prompt], [response], hot)
    logits = policy_logits(policy, lay_out([prompt], [response], "right")).to(torch.float64)
    by_definition = torch.log_softmax(logits / 2.0, -1)[range(3), response]
    # float32 results of some nats
    assert found.tolist() == pytest.approx(by_definition.tolist(), abs=1e-5)


def test_the_grid_is_the_first_iteration_of_e2_and_e6_in_deterministic_numerics() -> None:
    folder = Path(first_ratios.__file__).parent
    grid = load_grid(folder / "reencode.yaml")
    assert grid.file.read_with == f"{of_run.__module__}.{of_run.__name__}"
    there = [cell.config for name in ("e2_ppo", "e6_drift") for cell in load_grid(folder / f"{name}.yaml").cells]
    changed = {"numerics": {"mode": "deterministic"}, "ppo": {"iterations": 1}}
    wanted = [
        config.model_copy(update={part: getattr(config, part).model_copy(update=to) for part, to in changed.items()})
        for config in there
    ]
    assert {config.digest() for config in wanted} == {cell.config.digest() for cell in grid.cells}
    assert len(grid.cells) == len(there) == 30


def test_the_verdict_can_fail() -> None:
    row = {"drift": "none", "finish_reason": "stop", "tokens": 2, "scored": True, "same_tokens": 2, "unequal": 0}
    equal, unequal = pd.DataFrame([row]), pd.DataFrame([row | {"unequal": 1}])
    assert verdict(equal, False)[1] and not verdict(unequal, False)[1]
    assert verdict(unequal, True)[1] and not verdict(equal, True)[1]
    nothing = pd.DataFrame([row | {"scored": False, "same_tokens": np.nan, "unequal": np.nan}])
    assert verdict(nothing, False) == (
        "0 of 0 tokens before any different id have another log-prob than was sampled: nothing was compared",
        False,
    )


@pytest.mark.slow
def test_other_starting_weights_are_refused(
    deterministic_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = checked_config(deterministic_run, False)
    monkeypatch.setattr(first_ratios, "weights_digest", lambda parameters: "other")
    with pytest.raises(UserError, match=r"started from weights [0-9a-f]{16}, made again they are other; native"):
        start_model(deterministic_run, config)
    with pytest.raises(UserError):
        runs_of(tmp_path)
    assert main([str(deterministic_run), "--clip-range", "1"]) == 2
    assert capsys.readouterr().err == "--clip-range 1.0: must be above 0 and below 1\n"
