"""The command line in the process of a test, and small inputs for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.commands.cli import main


class Cli:
    """Runs the program in this process and keeps what it said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["ppo-repro", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = self.capsys.readouterr()
        return int(stop.value.code or 0), out, err

    def done(self, *arguments: str | Path) -> str:
        """What a command prints that has to succeed."""
        code, out, err = self(*arguments)
        assert code == 0, err
        return out

    def json(self, *arguments: str | Path) -> Any:
        """What a command prints with `--json` that has to succeed."""
        return json.loads(self.done(*arguments, "--json"))

    def refusal(self, *arguments: str | Path) -> str:
        """The one line with which a command has to end, exit code 2 and nothing on stdout."""
        code, out, err = self(*arguments)
        assert (code, out) == (2, ""), err
        return one_line(err)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capsys)


def one_line(err: str) -> str:
    """The single error line; progress lines may stand before it."""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert err.rstrip().endswith(errors[0]), err
    assert "Traceback" not in err
    return errors[0]


def sets(*fields: str) -> list[str]:
    """The words of a command line that change some fields."""
    return [word for field in fields for word in ("--set", field)]


def write_prompts(path: Path, *prompts: str) -> Path:
    lines = [json.dumps({"prompt": p, "answer": "3", "key": f"p{i}"}) for i, p in enumerate(prompts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def folder_config(path: Path, policy: Path, prompts: Path, reward: str = "") -> Path:
    term = f'{{kind: function, path: "{reward}"}}' if reward else "{kind: exact_match}"
    path.write_text(
        f"""
experiment: real
seed: 1
model: {{kind: folder, path: "{policy}"}}
task: {{kind: jsonl, path: "{prompts}", num_eval_prompts: 2}}
rollout: {{prompts_per_iteration: 4, samples_per_prompt: 2, max_response_tokens: 4}}
reward: {{terms: [{term}]}}
value: {{learning_rate: 1e-4}}
ppo: {{iterations: 2, epochs: 1, minibatch_size: 4, learning_rate: 1e-4}}
numerics: {{max_context: 16}}
"""
    )
    return path


PROMPTS = [f"{a}+{b}=" for a in range(3) for b in range(3)]
