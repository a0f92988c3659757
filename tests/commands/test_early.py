"""Mistakes in a configuration, its prompts and its files are found before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.cli import folder_config, write_prompts
from tests.support.paths import ROOT, TINY

# the exit code of each command line, and whether torch has been imported by then
PROGRAM = """
import json, sys
from ppo_repro.commands.cli import exit_code_of
for argv in json.load(sys.stdin):
    print(json.dumps([exit_code_of(argv), "torch" in sys.modules]), flush=True)
"""
FUNCTION = "reward.terms=[{kind: function, path: nowhere.py:score}]"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], int, bool, str]]:
    folder = tmp_path_factory.mktemp("early")
    prompts = write_prompts(folder / "p.jsonl", "1+2=", "2+1=", "1+1=")
    broken = folder / "broken.jsonl"
    broken.write_text(prompts.read_text() + '{"prompt": "4+4="}\n')
    (folder / "model").mkdir()
    bad = folder_config(folder / "bad.yaml", folder / "model", broken)
    no_model = folder_config(folder / "model.yaml", folder / "model", prompts)
    grid = {"question": "q", "expectation": "e", "base": str(TINY), "axes": {"ppo.epoch": [1]}, "seeds": [1]}
    (folder / "g.yaml").write_text(json.dumps(grid))
    lines = [
        ["run", str(TINY), "--set", "ppo.epoch=1"],
        ["run", str(TINY), "--set", "task.num_eval_prompts=36"],
        ["run", str(TINY), "--set", FUNCTION],
        ["run", str(bad)],
        ["run", str(no_model)],
        ["run", str(no_model), "--set", f"task.path={folder}/nothing.jsonl"],
        ["bisect", str(TINY), "--set", "ppo.epoch=1"],
        ["grid", str(folder / "g.yaml")],
        ["plan", str(TINY), "--set", "ppo.epoch=1"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=True,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    codes = [json.loads(line) for line in done.stdout.splitlines()]
    return [(argv, *code, said) for argv, code, said in zip(lines, codes, errors, strict=True)]


def test_mistakes_are_said_without_torch(ended: list[tuple[list[str], int, bool, str]]) -> None:
    assert [(argv, code, torch) for argv, code, torch, _ in ended if (code, torch) != (2, False)] == []


def test_each_mistake_is_named(ended: list[tuple[list[str], int, bool, str]]) -> None:
    expected = [
        "did you mean ppo.epochs?",
        "task.num_eval_prompts = 36: there are 36 prompts",
        "nowhere.py",
        "broken.jsonl:4: field 'answer' is missing",
        "there is no config.json in it",
        "nothing.jsonl",
        "did you mean ppo.epochs?",
        "did you mean ppo.epochs?",
        "did you mean ppo.epochs?",
    ]
    assert [(said, part) for (_, _, _, said), part in zip(ended, expected, strict=True) if part not in said] == []
