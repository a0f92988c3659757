"""Runs on a double of a CUDA device equal those on the CPU: no tensor is left behind, and no bit depends on the device.

The double computes on the CPU. It shows where tensors are, and that the eager code computes the same in every place;
what a card computes it cannot show: `numerics/test_portable.py` has the operations, `experiments.benchmarks.device`
compares a card.
"""

from __future__ import annotations

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
from ppo_repro.numerics import backend
from ppo_repro.numerics.device import UNTRIED, Place, placed
from ppo_repro.numerics.proof import proof
from ppo_repro.plan.shapes import plan_run
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
CASES |= {
    "rounding and lag": [
        "ppo.iterations=2",
        "mismatch.sampler.lag={kind: fixed, iterations: 1}",
        "mismatch.sampler.token_bias=0.1",
        "mismatch.sampler.precision={weights: bfloat16, activations: bfloat16}",
    ],
    "a mixture": ["model.experts={family: olmoe, count: 4, per_token: 2}", "records.level=deep"],
}
FAULTS = {"without_a_move": "on the same device, but found", "with_another_root": "warm_start"}
OTHERS = ("resumed", "preferences", "probed", "served")

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


# all slow tests wait for one process, which runs every job
waits = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the process says of every case and fault."""
    jobs = [*map(json.dumps, CASES.values()), *FAULTS, *OTHERS]
    lines = python("-m", "tests.support.processes.second_device", str(tmp_path_factory.mktemp("device")), *jobs)
    return dict(zip([*CASES, *FAULTS, *OTHERS], map(json.loads, lines.splitlines()), strict=True))


@waits
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_second_device_has_the_records_of_one_on_the_cpu(said: dict[str, Any], case: str) -> None:
    assert said[case] == {"said": "equal", "warnings": [UNTRIED], "device": "cuda: a double"}


@waits
@pytest.mark.slow
def test_a_run_goes_on_on_another_device(said: dict[str, Any]) -> None:
    assert said["resumed"] == {"cpu, then cuda": "from 1: equal", "cuda, then cpu": "from 1: equal"}


@waits
@pytest.mark.slow
def test_dpo_on_a_second_device_has_the_fingerprint_of_the_cpu(said: dict[str, Any]) -> None:
    assert said["preferences"] == {"equal": True, "warnings": [UNTRIED], "with another root": False}


@waits
@pytest.mark.slow
def test_a_probe_on_a_second_device_finds_nothing_and_compares_it_with_the_cpu(said: dict[str, Any]) -> None:
    of_the_device = ["forward, eager backend", "optimizer step, eager backend", "forward, on the CPU"]
    assert said["probed"] == {
        "rows": 24, "of the device": of_the_device, "unequal": [], "with another root": False
    }  # fmt: skip


@waits
@pytest.mark.slow
def test_the_cache_of_a_server_lies_on_its_device(said: dict[str, Any]) -> None:
    found = said["served"]
    assert found["equal"] and found["any"] and "on the same device, but found" in found["fault"]


@waits
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_second_device_is_found(said: dict[str, Any], fault: str) -> None:
    assert FAULTS[fault] in said[fault]["said"]


@waits
@pytest.mark.slow
def test_tensors_of_the_double_meet_no_others_and_have_the_same_numbers() -> None:
    assert python("-c", DOUBLE) == "done\n"


def test_a_device_that_is_not_there(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sets = [part for field in CUDA for part in ("--set", field)]
    code, out, err = cli("run", TINY, "--out", tmp_path, *sets)
    assert code == 2 and out == "" and not any(tmp_path.iterdir())
    assert one_line(err) == "error: layout.device = cuda: torch sees no CUDA device here; take layout.device = cpu"


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


def there_is(monkeypatch: pytest.MonkeyPatch, cuda: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)


def test_several_processes_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    there_is(monkeypatch)
    assert placed("cpu", "auto", 2) == Place("cpu")
    assert placed("auto", "auto", 2) == Place("cpu", "it works in one process, and here are 2")
    with pytest.raises(UserError, match=r"^layout.device = cuda: it works in one process, and here are 2; take layout"):
        placed("cuda", "auto", 2)


def test_auto_takes_a_device_where_that_changes_no_bit_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    there_is(monkeypatch)
    for kernels in ("auto", "eager", "triton"):
        place = placed("auto", kernels, 1)
        assert place.device == "cuda" and place.warnings() == [UNTRIED]
        assert place.said() == ["layout.device = auto: cuda (torch sees one)"]
    assert placed("cuda", "auto", 1).said() == [], "it was named"
    native = placed("auto", "auto", 1, "numerics.mode = native")
    assert native.said() == ["layout.device = auto: cpu (with numerics.mode = native bits belong to a device)"]
    assert placed("auto", "float64", 1).reason == "the kernels of layout.backend = float64 are for CPUs"
    there_is(monkeypatch, cuda=False)
    assert placed("auto", "auto", 1).said() == ["layout.device = auto: cpu (torch sees no CUDA device here)"]
    with pytest.raises(UserError, match=r"^layout.backend = triton needs a CUDA device: torch sees no CUDA device"):
        placed("auto", "triton", 1)


def test_auto_is_said_once_and_recorded(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there_is(monkeypatch, cuda=False)
    sets = [part for field in (*SHORT, "layout.device=auto") for part in ("--set", field)]
    code, _, err = cli("run", TINY, "--out", tmp_path, *sets)
    assert code == 0 and err.count("layout.device = auto: cpu (torch sees no CUDA device here)") == 1
    (folder,) = (path.parent for path in tmp_path.rglob("manifest.json"))
    assert json.loads((folder / "environment.json").read_text())["device"] == "cpu"
    assert load_config(folder / "config.yaml").layout.device == "auto"
    assert (
        manifest.load(folder).fingerprint
        == manifest.load(run(load_config(TINY, SHORT), tmp_path / "cpu", Silent())[0]).fingerprint
    )


def test_what_does_not_go_with_a_device_is_refused() -> None:
    for others, said in (
        (["layout.backend=float64"], "layout.device = cuda: the kernels of layout.backend = float64 are for CPUs"),
        (["numerics.mode=native"], "layout.device = cuda: with numerics.mode = native bits belong to a device"),
        (["mismatch.trainer.stock=bfloat16"], "with mismatch.trainer.stock = bfloat16 bits belong to a device"),
    ):
        with pytest.raises(UserError, match=said):
            load_config(TINY, ["layout.device=cuda", *others])
        if others != ["layout.backend=float64"]:
            assert load_config(TINY, ["layout.device=auto", *others]).bound, "so auto takes the CPU"
    with pytest.raises(UserError, match=r"layout.backend needs numerics.mode = exact"):
        load_config(TINY, ["layout.device=auto", "layout.backend=eager", "numerics.mode=native"])
    with pytest.raises(UserError, match=r"layout.backend = triton needs layout.device = cuda or auto"):
        load_config(TINY, ["layout.backend=triton"])
    for device in ("cuda", "auto"):
        for kernels in ("auto", "eager", "triton"):
            sets = [f"layout.device={device}", f"layout.backend={kernels}"]
            assert load_config(TINY, sets).layout.backend == kernels
    assert load_config(TINY).bound == ""


def test_kernels_of_a_library_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there_is(monkeypatch)
    monkeypatch.setattr(backend, "has_triton_installed", lambda: False)
    assert placed("cuda", "auto", 1).device == "cuda" and backend.choose("auto", "cuda") == "eager"
    with pytest.raises(UserError, match=r"^layout.backend = triton: Triton is not installed; pip install"):
        placed("cuda", "triton", 1)
    assert proof.use("auto", 1, "cuda") == "eager"
    assert "Triton is not installed, so the eager code computes" in capsys.readouterr().err


def test_auto_takes_kernels_of_a_card_only_where_they_are_proven(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backend, "has_triton_installed", lambda: True)
    monkeypatch.setattr(proof, "failure", lambda name: proof.PASSED)
    assert proof.use("auto", 1, "cuda") == "triton" and proof.use("auto", 1) != "triton"
    monkeypatch.setattr(proof, "failure", lambda name: "products")
    assert proof.use("auto", 1, "cuda") == "eager"
    assert "products of backend triton differ from the specification" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"^layout.backend = triton: its products differ .* \(auto or eager\)$"):
        proof.use("triton", 1, "cuda")


def test_plan_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    there_is(monkeypatch)
    with pytest.raises(UserError, match=r"^layout.device = auto: takes a CUDA device here, and plan is for CPUs"):
        plan_run(load_config(TINY, ["layout.device=auto"]))
    there_is(monkeypatch, cuda=False)
    assert plan_run(load_config(TINY, ["layout.device=auto"])).peak == plan_run(load_config(TINY)).peak


def test_dpo_and_checks_where_there_is_no_device(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there_is(monkeypatch, cuda=False)
    dpo = ROOT / "experiments" / "dpo.yaml"
    with pytest.raises(UserError, match=r"the kernels of layout.backend = float64 are for CPUs"):
        load_dpo_config(dpo, ["run=somewhere", "layout.device=cuda", "layout.backend=float64"])
    sets = [part for field in CUDA for part in ("--set", field)]
    commands = (
        ("dpo", dpo, "--out", tmp_path, "--set", f"run={tmp_path}", *sets),
        ("probe", TINY, *sets), ("bisect", TINY, "--out", tmp_path, *sets),
    )  # fmt: skip
    for command in commands:
        code, out, err = cli(*command)
        assert code == 2 and out == "" and not any(tmp_path.iterdir())
        assert one_line(err) == "error: layout.device = cuda: torch sees no CUDA device here; take layout.device = cpu"
