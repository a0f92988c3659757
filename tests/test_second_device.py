"""Runs on a double of a CUDA device equal those on the CPU: no tensor is left behind, and no bit depends on the device.

The double computes on the CPU. It shows where tensors are, and that the eager code computes the same in every place;
what a card computes it cannot show: `numerics/test_portable.py` has the operations, `experiments.benchmarks.device`
compares a card.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_repro.config.files import load_config, load_dpo_config
from ppo_repro.errors import UserError
from ppo_repro.numerics.device import UNTRIED, check_device
from ppo_repro.records import manifest
from ppo_repro.watcher import Silent
from tests.support.cli import Cli, one_line
from tests.support.language import run
from tests.support.paths import ROOT, TINY

CUDA = ("layout.device=cuda", "layout.backend=eager")
SHORT = (
    *("layout.backend=eager", "numerics.accuracy_sequences=0", "model.warm_start_steps=1"),
    *("ppo.iterations=1", "ppo.epochs=1", "rollout.prompts_per_iteration=1", "task.num_eval_prompts=1"),
)
CASES: dict[str, list[str]] = {
    "plain": [],
    "head": ["value={kind: head}", "rollout.top_p=0.9", "rollout.top_k=5", "records.level=deep"],
    "adapters": ["lora={rank: 2, alpha: 4.0}", "value={learning_rate: 1e-3, lora: {rank: 2, alpha: 4.0}}"],
    "groups": [
        *("value={kind: none}", "advantages={kind: group}", "kl={placement: loss, estimator: exact}"),
        *("layout.padding=none", "layout.gradient_checkpointing=true"),
    ],
    "reward model": [
        "reward.terms=[{kind: trained_model, num_pairs: 6, num_eval_pairs: 2, minibatch_size: 3, learning_rate: 1e-3}]",
        "value={init: reward_model, learning_rate: 1e-3}",
    ],
}
FAULTS = {"a batch that stays on the CPU": "on the same device, but found", "a root of another bit": "warm_start"}

# what no test of runs shows: that the double refuses what CUDA refuses, and computes what the CPU computes
DOUBLE = """
import torch
from tests.support.device_double import device_double
with device_double() as device:
    here = torch.arange(1, 7, dtype=torch.float32)
    there = here.to(device)
    assert there.device == device and torch.zeros(2, device=device).device == device
    assert (there @ there / 3).cpu().equal(here @ here / 3)
    for call, words in (
        (lambda: here + there, "on the same device"), (lambda: torch.cat([here, there]), "on the same device"),
        (lambda: there[:2].copy_(here[:2]).add_(here[:2]), "on the same device"),
        (there.numpy, "numpy"), (lambda: there.__array__(), "numpy"),
    ):
        try:
            call()
        except (RuntimeError, TypeError) as error:
            assert words in str(error), error
        else:
            raise AssertionError("not refused")
print("done")
"""


def python(*arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the process says of every case and fault."""
    cases = map(json.dumps, CASES.values())
    lines = python("-m", "tests.support.processes.second_device", str(tmp_path_factory.mktemp("device")), *cases)
    return dict(zip([*CASES, *FAULTS], map(json.loads, lines.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_second_device_has_the_records_of_one_on_the_cpu(said: dict[str, Any], case: str) -> None:
    assert said[case] == {"said": "equal", "warnings": [UNTRIED]}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_second_device_is_found(said: dict[str, Any], fault: str) -> None:
    assert FAULTS[fault] in said[fault]["said"]


@pytest.mark.slow
def test_tensors_of_the_double_meet_no_others_and_have_the_same_numbers() -> None:
    assert python("-c", DOUBLE) == "done\n"


def test_a_device_that_is_not_there(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sets = [part for field in CUDA for part in ("--set", field)]
    code, out, err = cli("run", TINY, "--out", tmp_path, *sets)
    assert code == 2 and out == "" and not any(tmp_path.iterdir())
    assert one_line(err) == "error: layout.device = cuda: torch sees no CUDA device here; must be cpu"


def test_a_recorded_run_on_a_device_that_is_not_there(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run_dir, _ = run(
        load_config(TINY, SHORT),
        tmp_path,
        Silent(),
    )
    sets = [part for field in CUDA for part in ("--set", field)]
    code, out, err = cli("rerun", run_dir, *sets)
    assert code == 2 and out == "" and "torch sees no CUDA device" in one_line(err)
    recorded = manifest.load(run_dir)
    running = {"status": "running", "final": {}, "fingerprint": recorded.iterations[-1].chain, "ending": {}}
    manifest.save(recorded.model_copy(update=running), run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    code, out, err = cli("resume", run_dir, *sets)
    assert code == 2 and out == "" and "torch sees no CUDA device" in one_line(err)
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert before.items() <= after.items()


def test_several_processes_on_a_device() -> None:
    check_device("cpu", 2)
    with pytest.raises(UserError, match=r"^layout.device = cuda: works in one process, and here are 2; "):
        check_device("cuda", 2)


def test_kernels_and_native_numerics_are_for_cpus() -> None:
    for others in ([], ["layout.backend=float64"], ["numerics.mode=native"]):
        with pytest.raises(UserError, match=r"layout.device = cuda needs layout.backend = eager or triton"):
            load_config(TINY, ["layout.device=cuda", *others])
    with pytest.raises(UserError, match=r"layout.backend needs numerics.mode = exact"):
        load_config(TINY, [*CUDA, "numerics.mode=native"])
    with pytest.raises(UserError, match=r"layout.backend = triton needs layout.device = cuda"):
        load_config(TINY, ["layout.backend=triton"])
    assert load_config(TINY, CUDA).layout.device == "cuda"
    assert load_config(TINY, ["layout.device=cuda", "layout.backend=triton"]).layout.backend == "triton"


def test_kernels_of_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_device("cuda", 1)
    with pytest.raises(UserError, match=r"^layout.backend = triton: Triton is not installed; pip install"):
        check_device("cuda", 1, "triton")


def test_dpo_computes_on_the_cpu() -> None:
    config = ROOT / "experiments" / "dpo.yaml"
    assert load_dpo_config(config, ["run=somewhere"]).layout.device == "cpu"
    with pytest.raises(UserError, match=r"layout.device = cuda: DPO computes on the CPU; must be cpu$"):
        load_dpo_config(config, ["run=somewhere", *CUDA])
