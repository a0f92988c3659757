"""Whole runs with a reward model from a folder, and with functions of the user's, good and bad."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.records import manifest, reader
from tests.support.cli import Cli
from tests.support.language import rerun, tiny_run
from tests.support.paths import TINY
from tests.support.runs import REWARD_MODEL, run_below


def test_a_reward_model_made_in_one_run_judges_another_from_its_folder(tmp_path: Path) -> None:
    made = tiny_run(tmp_path / "made", f"reward.terms=[{REWARD_MODEL}]")
    folder = tmp_path / "folder"
    (made / "checkpoints" / "reward_model").rename(folder)
    taken = tiny_run(tmp_path / "taken", f"reward.terms=[{{kind: model, path: '{folder}'}}]")
    frames = [reader.read_sequences(path, columns=["response", "scores"]) for path in (made, taken)]
    assert frames[0].equals(frames[1]), "the same policy and the same reward model"
    assert frames[0]["scores"].nunique() > 5
    assert rerun(taken, ["layout.padding=left", "layout.forward_micro_batch=1"]).difference is None
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"folder: is not there as the run \S+ had it"):
        rerun(taken, [])


def with_function(folder: Path, text: str) -> tuple[str | Path, ...]:
    folder.mkdir()
    (folder / "r.py").write_text(text)
    term = f"reward.terms=[{{kind: function, path: '{folder}/r.py:score'}}]"
    return "run", TINY, "--out", folder / "out", "--set", term, "--json"


LATER = """
import sys
left = [75]
def score(prompt, response, answer):
    left[0] -= 1
    if left[0] < 0:
        {}
    return 1.0
"""


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("sys.exit(0)", "7: score raised SystemExit: 0"),
        ("raise KeyboardInterrupt", "7: score raised KeyboardInterrupt"),
        ("return 1e39", "4: score returned 1e+39 of type float"),
    ],
)
def test_a_function_that_fails_later_is_one_line_and_keeps_iterations(
    cli: Cli, tmp_path: Path, statement: str, reason: str
) -> None:
    # the check at the start calls it 16 times, and that of the first iteration 30 times; in each iteration 7 held-out
    # prompts and 15 responses are scored
    message = cli.refusal(*with_function(tmp_path / "later", LATER.format(statement)))
    assert message.startswith(f"error: reward.terms.0.path: {tmp_path}/later/r.py:{reason}")
    assert " prompt key '" in message
    run_dir = run_below(tmp_path)
    recorded = manifest.load(run_dir)
    assert recorded.status == "failed"
    assert len(recorded.iterations) == 1


def test_after_a_failure_the_message_has_the_command_that_goes_on(cli: Cli, tmp_path: Path) -> None:
    """`resume` calls the copy that failed; the corrected file goes on in a fork."""
    arguments = with_function(tmp_path / "mine", LATER.format("raise ValueError('no')"))
    said = cli.refusal(*arguments, "--set", "checkpoints.every=1")
    found = re.search(r"1 iterations are recorded: .* go on from iteration 1 with `ppo-repro (fork .*)`$", said)
    assert found is not None, said
    (tmp_path / "mine" / "r.py").write_text("def score(prompt, response, answer): return 1.0\n")
    command = found[1].replace("FILE.py:NAME", f"{tmp_path}/mine/r.py:score").split()
    cli.done(*command, "--out", tmp_path / "forks")
    assert manifest.load(run_below(tmp_path / "forks")).status == "complete"


def test_after_a_failure_without_a_checkpoint_the_message_says_so(cli: Cli, tmp_path: Path) -> None:
    said = cli.refusal(*with_function(tmp_path / "mine", LATER.format("raise ValueError('no')")))
    assert "1 iterations are recorded, without a checkpoint: correct the function" in said
