"""Mistakes in a configuration, its prompts and its files are found before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.grids.small_grids import written_grid
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


def test_mistakes_are_named_without_torch(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "1+2=", "2+1=", "1+1=")
    broken = tmp_path / "broken.jsonl"
    broken.write_text(prompts.read_text() + '{"prompt": "4+4="}\n')
    (tmp_path / "model").mkdir()
    bad = folder_config(tmp_path / "bad.yaml", tmp_path / "model", broken)
    no_model = folder_config(tmp_path / "model.yaml", tmp_path / "model", prompts)
    mistyped = "did you mean ppo.epochs?"
    lines = [
        (["run", str(TINY), "--set", "ppo.epoch=1"], mistyped),
        (["run", str(TINY), "--set", "task.num_eval_prompts=36"], "task.num_eval_prompts = 36: there are 36 prompts"),
        (["run", str(TINY), "--set", FUNCTION], "nowhere.py"),
        (["run", str(bad)], "broken.jsonl:4: field 'answer' is missing"),
        (["run", str(no_model)], "there is no config.json in it"),
        (["run", str(no_model), "--set", f"task.path={tmp_path}/nothing.jsonl"], "nothing.jsonl"),
        (["grid", str(written_grid(tmp_path, axes={"ppo.epoch": [1]}))], mistyped),
        (["plan", str(TINY), "--set", "ppo.epoch=1"], mistyped),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([argv for argv, _ in lines]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=True,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for (argv, expected), ended, said in zip(lines, done.stdout.splitlines(), errors, strict=True):
        assert json.loads(ended) == [2, False], argv
        assert expected in said
