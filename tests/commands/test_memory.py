"""Too little memory: one line that names the largest part and a setting, exit code 2, and no run folder."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors import SafetensorError

from ppo_repro.commands import memory
from ppo_repro.commands.cli import _run
from ppo_repro.commands.memory import within_memory
from ppo_repro.errors import UserError
from ppo_repro.plan import in_words, plan_run
from ppo_repro.runs import run as runner
from tests.support.cli import Cli, one_line
from tests.support.paths import SMALL
from tests.support.runs import small_config

FAR_TOO_MUCH = 1 << 55
HIDDEN = UserError("model.path = x: cannot be loaded")
HIDDEN.__cause__ = OSError(errno.ENOMEM, "Cannot allocate memory")
ERRORS = (
    pa.ArrowMemoryError("malloc of size 64 failed"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    SafetensorError("I/O error: Cannot allocate memory (os error 12)"),
    HIDDEN,
)


def fail(error: Exception) -> None:
    raise error


FAILURES = [
    lambda: torch.empty(FAR_TOO_MUCH, dtype=torch.uint8),
    lambda: np.empty(FAR_TOO_MUCH, np.uint8),
    lambda: bytearray(FAR_TOO_MUCH),
    *(partial(fail, error) for error in ERRORS),
]


@pytest.mark.parametrize("number", range(len(FAILURES)))
def test_every_kind_of_failed_allocation_is_one_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(runner, "execute", lambda *arguments: FAILURES[number]())
    code, _, err = cli("run", SMALL, "--out", tmp_path)
    plan = in_words(plan_run(small_config()), True)
    assert code == 2 and one_line(err) == f"error: out of memory; {plan}" and plan.startswith("the plan needs up to")
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith("seed")] == []


def test_what_cannot_fit_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_run(small_config())
    monkeypatch.setattr(memory, "memory_limit", lambda: plan.certain - 1)
    assert _run(["run", str(SMALL), "--out", str(tmp_path)]) == 2
    _, said = capsys.readouterr().err.strip().splitlines()  # after the line that says what begins
    assert said.startswith("error: not enough memory: ")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(memory, "memory_limit", lambda: plan.peak - 1)
    with within_memory(small_config()):
        pass
    assert capsys.readouterr().err.startswith("memory may run out: ")
    monkeypatch.setattr(memory, "memory_limit", lambda: plan.peak)
    with within_memory(small_config()):
        pass
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="in each of 2 processes"):
        monkeypatch.setattr(memory, "memory_limit", lambda: plan.certain)
        with within_memory(small_config(), 2):
            pass
