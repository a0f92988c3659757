"""What a user sees before torch is imported: a line that says what begins, and every mistake that a look can find."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import PROMPTS, folder_config, one_line, write_prompts
from tests.support.paths import ROOT, SMALL_CONTROL, TINY, TINY_GRID

STOPPED = 7
# the program, which ends where it imports one of some packages
PROGRAM = f"""
import os, sys
heavy = sys.argv.pop(1).split(",")

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name in heavy:
            sys.stderr.flush()
            os._exit({STOPPED})

sys.meta_path.insert(0, Stop())
from ppo_repro.commands.cli import main
main()
"""


def until(heavy: str, *arguments: str | Path, cwd: Path = ROOT) -> tuple[int, str]:
    """(exit code, stderr) of the program, which ends with STOPPED where it imports a package of `heavy`."""
    command = [sys.executable, "-c", PROGRAM, heavy, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    return done.returncode, done.stderr


FIRST_LINES = {
    "run": ([TINY], "iterations into"),
    "control": ([SMALL_CONTROL], "iterations into"),
    "probe": ([TINY], "every invariance"),
    "plan": ([TINY], "memory of its models"),
    "rerun": (["nowhere"], "computing everything again"),
    "resume": (["nowhere"], "going on after"),
    "replay": (["nowhere"], "from the records alone"),
    "report": (["nowhere"], "writing a page"),
    "view": (["nowhere"], "a page over the responses"),
    "track": (["nowhere"], "copying it into"),
    "bisect": ([TINY], "looking for the operation"),
    "verify": (["nowhere"], "every byte"),
    "diff": (["nowhere", "elsewhere"], "bit by bit"),
    "grid": ([TINY_GRID], "running what is missing"),
    "audit": (["dump.jsonl", "--model", "nowhere"], "both sides beside the model"),
}
QUICK = ("run", "verify")


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in FIRST_LINES]
)
def test_a_line_comes_before_anything_that_takes_time(command: str) -> None:
    arguments, said = FIRST_LINES[command]
    code, err = until("torch,transformers,numpy,pyarrow,pandas,rich", command, *arguments)
    assert code == STOPPED and said in err and len(err.splitlines()) == 1


MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no prompts": (lambda f: (f / "p.jsonl").unlink(), "cannot be read (No such file or directory); give a JSONL file"),
    "twice": (lambda f: write_prompts(f / "p.jsonl", *PROMPTS, PROMPTS[0]), ":10: prompt '0+0=' is also that of line"),
    "no function": (
        lambda f: (f / "r.py").write_text("def scores(): pass"),
        "has no function score; did you",
    ),
    "no Python": (lambda f: (f / "r.py").write_text("def score()"), "r.py:1 fails to load (SyntaxError in Python "),
    "no model": (
        lambda f: (f / "model").rename(f / "elsewhere"),
        "there is no such folder; give the folder of a model",
    ),
    "pickled": (
        lambda f: (f / "model" / "model.safetensors").rename(f / "model" / "pytorch_model.bin"),
        "has pickled weights only (*.bin), which could run code and are never opened; convert them",
    ),
    "no tokenizer": (lambda f: (f / "model" / "tokenizer.json").unlink(), "has no tokenizer"),
}


@pytest.fixture(scope="module")
def policy(deterministic_run: Path) -> Path:
    return deterministic_run / "checkpoints" / "final"


@pytest.fixture
def inputs(tmp_path: Path, policy: Path) -> Path:
    """A folder with all that a configuration names."""
    shutil.copytree(policy, tmp_path / "model", ignore=shutil.ignore_patterns("SHA256SUMS"))
    write_prompts(tmp_path / "p.jsonl", *PROMPTS)
    (tmp_path / "r.py").write_text("def score(prompt, response, answer):\n    return 0.0\n")
    folder_config(tmp_path / "c.yaml", tmp_path / "model", tmp_path / "p.jsonl", f"{tmp_path}/r.py:score")
    return tmp_path


def test_what_is_right_goes_on(inputs: Path) -> None:
    """The control of the next test: this configuration has no mistake, so the program comes to torch."""
    assert until("torch,transformers", "run", inputs / "c.yaml", "--out", inputs / "out")[0] == STOPPED


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_without_torch(inputs: Path, mistake: str) -> None:
    spoil, said = MISTAKES[mistake]
    spoil(inputs)
    code, err = until("torch,transformers", "run", inputs / "c.yaml", "--out", inputs / "out")
    assert code == 2 and said in one_line(err) and not (inputs / "out").exists()
