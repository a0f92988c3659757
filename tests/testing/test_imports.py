"""A user of another stack takes the checks alone: in a fresh process they load no kernel and nothing of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.models import qwen3_config, small_model
from tests.support.paths import ROOT

# in one process: what the checks load, what an audit of a dump loads after them, what a run needs beside both
PROGRAM = """
import sys
import ppo_repro.testing


def say():
    print(*sorted(name for name in sys.modules if name.startswith("ppo_repro.")), file=sys.stderr)


for name in ppo_repro.testing.__all__:
    getattr(ppo_repro.testing, name)
say()
from ppo_repro.commands.cli import main
try:
    main()
except SystemExit as stop:
    assert stop.code == 1, stop.code
say()
import ppo_repro.models.load
say()
"""


def of_runs(modules: set[str]) -> list[str]:
    """The kernels, but for limits of sizes and the table of families; the loop, its stages, and what records a run."""
    limits = {f"ppo_repro.numerics{name}" for name in ("", ".build", ".families", ".interface", ".ranges")}
    folders = ("numerics", "runs", "loop", "stages", "models.networks", "models.load")
    return sorted(m for m in modules - limits if m.startswith(tuple(f"ppo_repro.{name}" for name in folders)))


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dump whose trainer divided by no temperature, and the folder of its model."""
    folder = tmp_path_factory.mktemp("dump")
    model, ids = small_model(qwen3_config(), 4), [5, 9, 7, 4, 8, 11, 6, 20, 9, 30, 5, 3, 17]
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, 2:-1]
    sides = ((logits / t).log_softmax(-1)[range(10), ids[3:]].tolist() for t in (0.8, 1.0))
    logprobs = dict(zip(("rollout_logprobs", "old_logprobs"), sides, strict=True))
    row = {"prompt_ids": ids[:3], "response_ids": ids[3:], **logprobs}
    (folder / "dump.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "dump.jsonl", folder / "model"


@pytest.mark.slow  # three times the imports of transformers
def test_the_checks_and_the_audit_of_a_dump_load_no_kernel_and_need_no_run(dump: tuple[Path, Path]) -> None:
    """The control loads a model for a run."""
    arguments = ["audit", dump[0], "--model", dump[1], "--temperature", "0.8"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    checks, audited, control = (set(line.split()) for line in done.stderr.splitlines() if line.startswith("ppo_repro."))
    assert of_runs(checks) == of_runs(audited) == []
    assert "ppo_repro.testing.audit.search" in audited - checks
    assert "ppo_repro.numerics.library" in of_runs(control)
