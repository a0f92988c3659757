"""Of two processes that want one kernel, the second waits and loads it; a claim never outlives its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from ppo_repro.numerics.kernels.core import claims, entries
from ppo_repro.numerics.kernels.core.cache import cache_folder
from ppo_repro.numerics.kernels.core.compile import kernel
from tests.support.paths import ROOT

NAME, CONTENT = "module.function.0123", bytes(range(256))
START = """
import sys, time
from pathlib import Path
from ppo_repro.numerics.kernels.core import claims, entries
folder, name = Path(sys.argv[1]), "module.function.0123"
"""
# compiles: says that it has the claim, waits for a line, writes the entry
COMPILES = START + "claims.take(folder, name); print(flush=True); input(); entries.write(folder, name, b'code'); "
COMPILES += "claims.release(folder, name)"
WANTS = START + "print(flush=True); claims.take(folder, name); print(entries.read(folder, name))"
# compiles after a line of its input; two of them without claims do so both
KERNEL = """
import sys
import numpy as np
from ppo_repro.numerics.kernels.core import cache
from ppo_repro.numerics.kernels.core.compile import kernel
if sys.argv[1] == "alone":
    cache.claims.take = lambda folder, name: None
def double(x):
    for i in range(len(x)):
        x[i] = x[i] * 2.0
def slow(*arguments):
    print("compiles", flush=True)
    input()
    return compile_it(*arguments)
compiled = kernel(double)
compile_it = compiled._compiler.compile
compiled._compiler.compile = slow
x = np.arange(3.0)
print("ready", flush=True)
compiled(x)
assert x.tolist() == [0.0, 2.0, 4.0]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "ppo_repro" / "kernels-1"


def started(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        text=True,
        stdin=pipe,
        stdout=pipe,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_who_comes_second_waits_for_the_entry(folder: Path) -> None:
    first = started(COMPILES, str(folder))
    assert line(first) == "\n"
    second = started(WANTS, str(folder))
    assert line(second) == "\n"
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.5)
    first.communicate("\n")
    assert second.communicate()[0] == "b'code'\n"
    assert [path.name for path in folder.iterdir() if path.suffix != claims.SUFFIX] == [NAME]


def test_a_process_that_is_killed_gives_its_claims_up(folder: Path) -> None:
    first = started(COMPILES, str(folder))
    assert line(first) == "\n"
    second = started(WANTS, str(folder))
    assert line(second) == "\n"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert second.communicate()[0] == "None\n", "it goes on, and compiles by itself"


def test_a_claim_is_taken_once_and_leaves_no_file(folder: Path) -> None:
    claims.take(folder, NAME)
    claims.take(folder, NAME)
    assert [path.name for path in folder.iterdir()] == [NAME + claims.SUFFIX]
    claims.release(folder, NAME)
    claims.release(folder, NAME)
    assert list(folder.iterdir()) == []


def test_patience_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = started(COMPILES, str(folder))
    assert line(first) == "\n"
    monkeypatch.setattr(claims, "PATIENCE", 0.1)
    claims.take(folder, NAME)
    claims.release(folder, NAME)  # which is not this process's
    assert (folder / (NAME + claims.SUFFIX)).exists()
    first.communicate("\n")


def test_where_no_file_can_be_made_nothing_is_claimed(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    claims.take(tmp_path / "cache" / "ppo_repro" / "kernels-1", NAME)
    (link := tmp_path / "kernels-2").mkdir()
    (link / (NAME + claims.SUFFIX)).symlink_to(tmp_path / "elsewhere")
    claims.take(link, NAME)
    assert not (tmp_path / "elsewhere").exists()


def test_a_process_that_was_forked_keeps_no_claim(folder: Path) -> None:
    claims.take(folder, NAME)
    child = os.fork()
    if child == 0:
        claims.release(folder, NAME)  # which is the parent's
        signal.pause()
        os._exit(0)
    try:
        second = started(WANTS, str(folder))
        assert line(second) == "\n"
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0.5)
        entries.write(folder, NAME, CONTENT)
        claims.release(folder, NAME)  # of which the child has a descriptor
        assert second.communicate(timeout=30)[0] == f"{CONTENT!r}\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_kernel_that_is_not_made_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_folder.cache_clear()

    def no_kernel(x: object) -> object:
        return x + "a string"  # type: ignore[operator] # no number has this sum

    try:
        with pytest.raises(numba.TypingError):
            kernel(no_kernel)(1.0)
        assert list(tmp_path.rglob("*no_kernel*")) == [] and claims._held == {}
    finally:
        cache_folder.cache_clear()


@pytest.mark.parametrize(("way", "compilations"), [("claimed", 1), ("alone", 2)])
def test_one_process_compiles_a_kernel_that_two_want(way: str, compilations: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(KERNEL)
    start = f"import runpy; runpy.run_path({str(program)!r}, run_name='program')"
    both = [started(start, way, XDG_CACHE_HOME=str(tmp_path / "cache")) for _ in range(2)]
    assert [line(process) for process in both] == ["ready\n", "ready\n"]
    if compilations == 2:  # neither goes on before both compile
        assert [line(process) for process in both] == ["compiles\n", "compiles\n"]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert compilations == 2 or sorted(said) == ["", "compiles\n"]
    entry, *others = (tmp_path / "cache").rglob("program.double.*")
    assert others == [] and entries.read(entry.parent, entry.name)
