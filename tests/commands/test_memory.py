"""Too little memory: one line that says what to change, exit code 2, and no run folder."""

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
from ppo_repro.commands.memory import OUT_OF_MEMORY, require_memory
from ppo_repro.errors import UserError
from ppo_repro.plan import plan_run
from ppo_repro.runs import run as runner
from tests.support.cli import Cli, one_line
from tests.support.paths import SMALL
from tests.support.runs import small_config

FAR_TOO_MUCH = 1 << 55
ERRORS = (
    pa.ArrowMemoryError("malloc of size 64 failed"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    SafetensorError("I/O error: Cannot allocate memory (os error 12)"),
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
    assert code == 2 and one_line(err) == f"error: {OUT_OF_MEMORY}"
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith("seed")] == []


def test_what_cannot_fit_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    config, plan = small_config(), plan_run(small_config())
    monkeypatch.setattr(memory, "memory_limit", lambda: plan.certain - 1)
    code, _, err = cli("run", SMALL, "--out", tmp_path)
    assert code == 2 and one_line(err).startswith("error: not enough memory: ") and not list(tmp_path.iterdir())
    for limit, warned in ((plan.peak - 1, True), (plan.peak, False)):
        monkeypatch.setattr(memory, "memory_limit", lambda limit=limit: limit)
        require_memory(config, 1)
        assert capsys.readouterr().err.startswith("memory may run out: ") is warned
    monkeypatch.setattr(memory, "memory_limit", lambda: plan.certain)
    with pytest.raises(UserError, match="in each of 2 processes"):
        require_memory(config, 2)
