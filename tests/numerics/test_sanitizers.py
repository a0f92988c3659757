"""The kernel tests under address and undefined-behaviour sanitizers. Controls: an overrun, and a sum that overflows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ppo_repro.numerics import build, library
from ppo_repro.numerics.interface import ffi
from tests.support.failing_memory import WORKS, counting_sources
from tests.support.sanitizers import RUNTIME, compile_sanitized, run_sanitized
from tests.support.variants import FASTEST

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(RUNTIME is None, reason="needs GCC's address sanitizer: Debian's libasan8"),
]
TESTS = ("tests/promises/test_kernels.py", *(f"tests/numerics/test_{name}.py" for name in ("optimizer", "tokens")))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_sanitized(tmp_path_factory.mktemp("sanitized"))


def test_kernel_tests_pass_under_the_sanitizers(sanitized: Path) -> None:
    child = run_sanitized(
        sanitized,
        ["-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "tests.support.sanitizers", *TESTS],
    )
    assert child.returncode == 0, (child.stdout + child.stderr)[-8000:]


def test_failed_allocations_pass_under_the_sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SOURCES", counting_sources(tmp_path))
    child = run_sanitized(
        compile_sanitized(tmp_path),
        ["-m", "tests.support.failing_memory", str(tmp_path / f"sanitized-{FASTEST.variants[0].name}.so")],
    )
    assert child.returncode == 0, (child.stdout + child.stderr)[-8000:]
    assert len(re.findall(r"\(\d+, \[\]\)$", child.stdout, re.MULTILINE)) == 2 * len(WORKS), child.stdout


CONTROLS = {
    "heap-buffer-overflow": lambda kernels: kernels.exp_float32(*[ffi.new("float[]", 5) for _ in range(2)], 6),
    "signed integer overflow": lambda kernels: kernels.panel_floats(2**31 - 1, 1, 0),
}


@pytest.mark.parametrize("report", CONTROLS)
def test_the_sanitizers_find_a_planted_error(sanitized: Path, report: str) -> None:
    child = run_sanitized(sanitized, ["-m", __name__, str(sanitized), report])
    assert child.returncode != 0
    assert report in child.stderr


if __name__ == "__main__":
    import sys

    CONTROLS[sys.argv[2]](library.open_library(Path(sys.argv[1])))
