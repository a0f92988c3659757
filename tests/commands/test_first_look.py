"""What a user sees before torch is imported: a line that says what begins, and every mistake that a look can find."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import PROMPTS, folder_config, write_prompts
from tests.support.paths import ROOT, SMALL, SMALL_CONTROL, TINY, TINY_GRID

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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", TINY], "iterations into"),
        pytest.param(["run", SMALL_CONTROL], "iterations into", marks=pytest.mark.slow),
        pytest.param(["probe", TINY], "every invariance", marks=pytest.mark.slow),
        pytest.param(["plan", TINY], "memory of its models", marks=pytest.mark.slow),
        pytest.param(["rerun", "nowhere"], "computing everything again", marks=pytest.mark.slow),
        pytest.param(["resume", "nowhere"], "going on after", marks=pytest.mark.slow),
        pytest.param(["replay", "nowhere"], "from the records alone", marks=pytest.mark.slow),
        pytest.param(["report", "nowhere"], "writing a page", marks=pytest.mark.slow),
        pytest.param(["track", "nowhere"], "copying it into", marks=pytest.mark.slow),
        pytest.param(["bisect", TINY], "looking for the operation", marks=pytest.mark.slow),
        (["verify", "nowhere"], "every byte"),
        pytest.param(["diff", "nowhere", "elsewhere"], "bit by bit", marks=pytest.mark.slow),
        (["grid", TINY_GRID], "running what is missing"),
        pytest.param(
            ["audit", "dump.jsonl", "--model", "nowhere"], "both sides beside the model", marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_line_comes_before_anything_that_takes_time(tmp_path: Path, arguments: list[str], said: str) -> None:
    code, err = until("torch,transformers,numpy,pyarrow,pandas,rich", *arguments)
    assert code == STOPPED and said in err and len(err.splitlines()) == 1


def no_prompt(folder: Path) -> None:
    (folder / "p.jsonl").unlink()


def twice(folder: Path) -> None:
    write_prompts(folder / "p.jsonl", *PROMPTS, PROMPTS[0])


def no_function(folder: Path) -> None:
    (folder / "r.py").write_text("def scores(prompt, response, answer):\n    return 0.0\n")


def no_python(folder: Path) -> None:
    (folder / "r.py").write_text("def score(prompt, response, answer)\n    return 0.0\n")


def no_model(folder: Path) -> None:
    (folder / "model").rename(folder / "elsewhere")


def pickled(folder: Path) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").unlink()


MISTAKES: list[tuple[Callable[[Path], object], str]] = [
    (no_prompt, "cannot be read (No such file or directory); give a JSONL file"),
    (twice, ":10: prompt '0+0=' is also that of line 1; give each prompt once, with its own key"),
    (no_function, "has no function score; did you mean scores?"),
    (no_python, "r.py:1 fails to load (SyntaxError: expected ':')"),
    (no_model, "there is no such folder; give the folder of a model on this machine"),
    (pickled, "has pickled weights only (*.bin), which could run code and are never opened; convert them"),
    (no_tokenizer, "has no tokenizer"),
]


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
@pytest.mark.parametrize(("spoil", "said"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_is_found_without_torch(inputs: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(inputs)
    code, err = until("torch,transformers", "run", inputs / "c.yaml", "--out", inputs / "out")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and said in errors[0] and not (inputs / "out").exists()


def test_mistakes_in_several_files_have_a_line_each(inputs: Path) -> None:
    for spoil in (twice, no_function, no_model):
        spoil(inputs)
    code, err = until("torch,transformers", "run", inputs / "c.yaml")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 3


@pytest.mark.slow
def test_a_model_of_the_hub_is_to_be_downloaded_first(inputs: Path) -> None:
    override = "model={kind: folder, path: Qwen/Qwen3-0.6B}"
    code, err = until("torch,transformers", "run", inputs / "c.yaml", "--set", override, cwd=inputs)
    assert code == 2 and "`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`, then give models/" in err


@pytest.mark.slow
def test_a_function_that_only_running_the_file_shows_is_not_missed(inputs: Path) -> None:
    for text in ("globals()['score'] = len\n", "from os.path import *\n", "exec('score = len')\n"):
        (inputs / "r.py").write_text(text)
        assert until("torch,transformers", "run", inputs / "c.yaml")[0] == STOPPED


def test_a_run_that_exists_is_named_at_once(deterministic_run: Path) -> None:
    code, err = until("torch,transformers", "run", SMALL, "--out", deterministic_run.parents[1])
    assert code == 2 and "exists already; choose another --out" in err


@pytest.mark.slow
def test_a_run_folder_without_its_manifest_is_left_alone(inputs: Path) -> None:
    code, err = until("torch,transformers", "run", inputs / "c.yaml", "--out", inputs / "out")
    run_dir = inputs / err.partition(" into ")[2].splitlines()[0]
    run_dir.mkdir(parents=True)
    (run_dir / "notes.txt").write_text("mine")
    code, err = until("torch,transformers", "run", inputs / "c.yaml", "--out", inputs / "out")
    assert code == 2 and "exists without manifest.json, and nothing in it is removed; restore that file" in err
    assert (run_dir / "notes.txt").read_text() == "mine"
