"""Whole runs with a reward model from a folder, and with functions of the user's, good and bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader
from ppo_repro.watcher import Silent
from tests.support.cli import Cli, one_line
from tests.support.language import rerun, run
from tests.support.paths import TINY
from tests.support.runs import REWARD_MODEL


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capsys)


def recorded(out: Path, *overrides: str) -> Path:
    return run(load_config(TINY, overrides), out, Silent())[0]


def test_a_reward_model_made_in_one_run_judges_another_from_its_folder(tmp_path: Path) -> None:
    made = recorded(tmp_path / "made", f"reward.terms=[{REWARD_MODEL}]")
    folder = tmp_path / "folder"
    (made / "checkpoints" / "reward_model").rename(folder)
    taken = recorded(tmp_path / "taken", f"reward.terms=[{{kind: model, path: '{folder}'}}]")
    frames = [reader.read_sequences(path, columns=["response", "scores"]) for path in (made, taken)]
    assert frames[0].equals(frames[1]), "the same policy and the same reward model"
    assert frames[0]["scores"].nunique() > 5
    assert rerun(taken, Silent(), ["layout.padding=left", "layout.forward_micro_batch=1"]).difference is None
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        rerun(taken, Silent(), [])


def test_a_reward_model_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward model .*nowhere: there is no such folder; give the folder of a model"):
        recorded(tmp_path, f"reward.terms=[{{kind: model, path: '{tmp_path}/nowhere'}}]")
    assert not list(tmp_path.rglob("manifest.json"))


CLEAN = "def score(prompt, response, answer):\n    return float(response == answer)\n"
HOSTILE = """
import os, random, sys, torch
print("{an object?}")
torch.set_default_dtype(torch.float64)
torch.set_num_threads(3)
torch.manual_seed(1)
def score(prompt, response, answer):
    print("one more line")
    os.system("echo of a program")
    os.chdir("/")
    os.environ.clear()
    random.seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.set_flush_denormal(True)
    return response == answer
"""


def with_function(folder: Path, text: str) -> tuple[str | Path, ...]:
    folder.mkdir()
    (folder / "r.py").write_text(text)
    term = f"reward.terms=[{{kind: function, path: '{folder}/r.py:score'}}]"
    return "run", TINY, "--out", folder / "out", "--set", term, "--json"


def test_a_function_that_changes_the_process_changes_no_bit_of_the_run(cli: Cli, tmp_path: Path) -> None:
    found = {}
    for name, text in (("clean", CLEAN), ("hostile", HOSTILE), ("other", CLEAN.replace("float(", "1 - float("))):
        code, out, err = cli(*with_function(tmp_path / name, text))
        assert code == 0, err
        frame = reader.read_tokens(json.loads(out)["run_dir"])  # stdout is one JSON object
        found[name] = frame
    assert found["hostile"].equals(found["clean"])
    assert not found["other"].equals(found["clean"])


LATER = """
import sys
left = [40]
def score(prompt, response, answer):
    left[0] -= 1
    if left[0] < 0:
        {}
    return 1.0
"""


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("sys.exit(0)", "7: the function raised SystemExit: 0"),
        ("raise KeyboardInterrupt", "7: the function raised KeyboardInterrupt"),
        ("return 1e39", "4: the function returned 1e+39 of type float"),
    ],
)
def test_a_function_that_fails_later_is_one_line_and_keeps_iterations(
    cli: Cli, tmp_path: Path, statement: str, reason: str
) -> None:
    # the check calls it 8 times, then 7 held-out prompts and 15 responses are scored in each iteration
    code, out, err = cli(*with_function(tmp_path / "later", LATER.format(statement)))
    assert code == 2 and out == ""
    message = one_line(err)
    assert message.startswith(f"error: reward.terms.0.path: {tmp_path}/later/r.py:{reason}")
    assert " prompt key '" in message
    run_dir = next(tmp_path.rglob("manifest.json")).parent
    recorded = manifest.load(run_dir)
    assert recorded.status == "failed" and len(recorded.iterations) == 1


def test_a_function_that_draws_is_refused_before_anything_is_computed(cli: Cli, tmp_path: Path) -> None:
    text = "import random\n\n\ndef score(prompt, response, answer):\n    return random.random()\n"
    code, out, err = cli(*with_function(tmp_path / "random", text))
    assert code == 2 and out == "" and "warm start" not in err
    assert f"error: reward.terms.0.path: {tmp_path}/random/r.py:4: score returned 0." in one_line(err)
    assert not list(tmp_path.rglob("manifest.json"))
