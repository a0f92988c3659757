"""Without memory a call of the kernels raises OutOfMemory; repeated with memory, it gives the right bits.

The library of these tests fails any of its allocations, and counts the ones that are not freed. Controls: a library
that goes on after a failure without a word, and one that frees less.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppo_repro.base.errors import NumericsError
from ppo_repro.numerics.optimizer import Optimizer
from tests.support.cli import Cli, one_line, sets
from tests.support.failing_memory import WORKS, Library, failures, made, step, using
from tests.support.paths import SMALL
from tests.support.runs import recorded_iterations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return made(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("work", WORKS)
def test_a_failed_allocation_is_one_error_and_nothing_else(
    work: str, family: str, threads: int, kernels: Library
) -> None:
    with using(kernels):
        allocations, wrong = failures(kernels, WORKS[work](family), threads)
    assert wrong == []
    assert allocations >= 3


def test_a_failure_that_nobody_reads_gives_another_result(kernels: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the check after each call the logits are what lay in memory, and the norm has no value."""
    with using(kernels):
        work = step("qwen3")
        expected = work()
        kernels.rest(1)
        monkeypatch.setattr(kernels.kernels, "_failure", SimpleNamespace(count=0))
        with kernels.failing(0, 1 << 60), pytest.raises(NumericsError, match="not finite"):
            work()
    assert expected[0] > 0.0


def test_memory_that_a_failed_call_keeps_is_counted(tmp_path: Path) -> None:
    """Control: kernels that free nothing where memory for experts fails."""
    freed = "  if (failed()) {\n    free_dispatch(d);\n    return;\n  }\n  float *d_act"
    leaking = made(tmp_path, "experts.c", (freed, "  if (failed()) return;\n  float *d_act"))
    with using(leaking):
        _, wrong = failures(leaking, step("qwen3_moe"), 1)
    assert wrong
    assert all("were not freed" in line for line in wrong)


def test_a_run_without_memory_ends_in_one_line_and_resumes(
    kernels: Library, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("model.warm_start_steps=4", "model.warm_start_accuracy=0", "ppo.iterations=2")
    with using(kernels):
        whole = cli.json("run", SMALL, "--out", tmp_path / "whole", *sets(*few))["fingerprint"]
        steps, number = Optimizer.step, count()

        def without_memory(self: Optimizer, *arguments: Any) -> float:
            if next(number) != 20:  # in iteration 1, after 4 steps of the warm start and 12 of iteration 0
                return steps(self, *arguments)
            kernels.rest(1)
            with kernels.failing(0, 1 << 60):
                return steps(self, *arguments)

        monkeypatch.setattr(Optimizer, "step", without_memory)
        code, _, err = cli("run", SMALL, "--out", tmp_path / "cut", *sets(*few))
        assert (code, recorded_iterations(tmp_path / "cut")) == (2, 1)
        assert one_line(err).startswith("error: out of memory: the kernels asked for 0.00")
        (run,) = (path.parent for path in (tmp_path / "cut").rglob("manifest.json"))
        assert cli.json("resume", run)["fingerprint"] == whole
