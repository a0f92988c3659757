"""Kernels compiled for other CPUs, with other vector widths and without fused multiply-add, give the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernels import using
from tests.support.paths import ROOT
from tests.support.processes.kernel_digests import digest

# the widest registers of each; empty features, so that those of this CPU are not added
CPUS = {"generic": "xmm", "haswell": "ymm"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cpu", CPUS)
def test_no_kind_of_cpu_changes_a_bit(cpu: str, tmp_path: Path) -> None:
    target = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.processes.kernel_digests"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **target}, check=True)
    with using("eager"):
        expected = digest()
    assert json.loads(done.stdout) == {"digest": expected, "registers": CPUS[cpu]}
