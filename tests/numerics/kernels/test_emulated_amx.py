"""On CPUs without AMX its instructions are emulated, and the tests of its kernels run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ppo_repro.numerics import backend
from tests.support.paths import ROOT

KERNELS = "tests/numerics/kernels/test_amx.py", "tests/numerics/kernels/test_products.py"
PASSES = "tests/numerics/trunk", "tests/numerics/proof", "tests/numerics/test_shared_inputs.py"

without_amx = pytest.mark.skipif(backend.has_amx(), reason="the tests themselves have used AMX")


def run_tests(*selected: str) -> str:
    """The last line of a run of tests of this checkout where AMX is emulated."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *selected]
    # without the variables by which pytest-xdist knows its workers
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PPO_REPRO_AMX"] = "emulated"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip().splitlines()[-1]


@without_amx
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels() -> None:
    assert "skipped" not in run_tests(*KERNELS)


@without_amx
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_whole_passes() -> None:
    assert "skipped" not in run_tests(*PASSES)
