"""Runs on a card: what makes a card unfit is said in one line, and whole runs over a stand-in for the driver have the
CPU's bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ppo_repro.base.errors import UserError
from ppo_repro.checks.plan import plan_run
from ppo_repro.numerics import build, devices
from tests.gpu.emulator import stand_in
from tests.support.paths import ROOT
from tests.support.runs import small_config

REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no driver": (lambda folder: devices.open_card(0, str(folder / "libcuda.so.1")), "cuda:0: no driver: "),
    "another library": (lambda _: devices.open_card(0, "libm.so.6"), "the driver is too old: libm.so.6 lacks cuInit"),
    "kernels of other sources": (devices.locate, "was built from other sources; run `make setup`"),
    "no kernels": (lambda folder: devices.locate(folder / "none"), "is missing; run `make setup`"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_card_that_cannot_be_used_is_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / "gpu-0123456789ab.so").touch()
    use, message = REFUSALS[case]
    with pytest.raises(UserError, match=r"^layout\.device = cuda") as error:
        use(tmp_path)
    assert message in str(error.value)


def test_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match="was built without CUDA; install another build"):
        devices.card()


def test_the_plan_of_a_card_has_no_packed_weights() -> None:
    on_cpu, on_card = plan_run(small_config()), plan_run(small_config("layout.device=cuda"))
    assert on_cpu.rows["packed weights"]
    assert "packed weights" not in on_card.rows
    assert on_card.rows["weights"] == on_cpu.rows["weights"]


# --------------------------------------------------------------------------------------------- over a stand-in


@pytest.mark.slow
def test_runs_have_the_bits_of_the_cpu(tmp_path: Path) -> None:
    """The steps of `make test-gpu` that compare, on small sizes."""
    if build.this_platform() is None:
        pytest.skip("no kernels for this platform")
    command = [sys.executable, "-m", "tests.gpu.device_check", "--out", tmp_path, "--stand-in", stand_in(tmp_path)]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    results = json.loads((tmp_path / "device_check.json").read_text())
    assert done.returncode == 0, done.stdout[-3000:]
    assert {name: step["differ"] for name, step in results.items() if "differ" in step} == dict.fromkeys(
        ("families", "runs", "resumed", "large"), 0
    )


@pytest.mark.slow
def test_kernels_that_contract_products_and_sums_are_refused(tmp_path: Path) -> None:
    other = stand_in(tmp_path, "source", "-ffp-contract=fast")
    with pytest.raises(
        UserError, match=r"the kernels compute 0x[0-9a-f]+ on emulated card .* where 0x83e585b3d1d31e7d"
    ):
        devices.open_card(0, str(other), stand_in=True)
