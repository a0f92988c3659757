"""The lock of a folder: one process has it, the others say which one, and a dead process has none."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.base import lock
from ppo_repro.base.errors import UserError
from ppo_repro.base.lock import has_writer, locked_in, only_writer, require_no_writer
from tests.support.paths import ROOT

HOLD = (
    "import sys, time; from pathlib import Path; from ppo_repro.base.lock import only_writer\n"
    "with only_writer(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
)
HERE = socket.gethostname()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "experiment" / "run"


def test_the_holder_is_named_and_afterwards_nothing_is_left(folder: Path) -> None:
    with only_writer(folder):
        assert has_writer(folder)
        assert list(locked_in(folder.parents[1])) == [folder]
        for refused in (lambda: only_writer(folder).__enter__(), lambda: require_no_writer(folder)):
            with pytest.raises(
                UserError, match=rf"it \(process {os.getpid()} on {HERE}, since \d{{4}}-.*\); wait until"
            ):
                refused()
    assert not has_writer(folder)
    assert list(folder.parent.iterdir()) == []
    require_no_writer(folder)


def test_the_command_of_the_holder_is_told_without_its_secrets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/ppo-repro", "grid", "g.yaml", "--track", "http://me:secret@host:5000"])
    with only_writer(folder), pytest.raises(UserError) as caught:
        require_no_writer(folder)
    assert re.search(
        r"since [^:]*:\d\d:\S*: ppo-repro grid g\.yaml --track '?http://\*\*\*@host:5000'?\); wait", str(caught.value)
    )


def test_every_path_to_a_folder_has_one_lock(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    with only_writer(folder):
        assert has_writer(Path("."))
        assert has_writer(tmp_path / "link")


def test_a_killed_process_holds_nothing(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {process.pid} on {HERE}, since "), only_writer(folder):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = folder.with_name("run.lock")
    assert left.read_text().startswith(f"process {process.pid} ")
    assert not has_writer(folder)
    with only_writer(folder):
        assert left.read_text().startswith(f"process {os.getpid()} ")
    assert not left.exists()
    left.write_bytes(bytes(30))  # of a power cut
    with only_writer(folder):
        assert has_writer(folder)


def held_by_hand(path: Path, content: str) -> int:
    """A lock whose file says something else than this process would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "process 7 on elsewhere since 2026-01-02T03:04:05Z by ppo-repro run\n",
            "it (process 7 on elsewhere, since 2026-01-02T03:04:05Z: ppo-repro run);",
        ),
        ("", "another process is writing it; wait"),
    ],
)
def test_a_holder_elsewhere_is_believed(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str) -> None:
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.05)
    descriptor = held_by_hand(folder.with_name("run.lock"), content)
    with pytest.raises(UserError) as caught, only_writer(folder):
        pass
    os.close(descriptor)
    assert said in str(caught.value)


@pytest.mark.parametrize("refused", [require_no_writer, lambda folder: only_writer(folder).__enter__()])
def test_a_holder_that_has_not_yet_said_its_name_is_not_taken_for_the_dead_one_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[[Path], object]
) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    path = folder.with_name("run.lock")
    descriptor = held_by_hand(path, f"process {int(dead.stdout)} on {HERE} since 2026-01-02T03:04Z by ppo-repro run\n")
    monkeypatch.setattr(
        lock.time, "sleep", lambda _: path.write_text(f"process {os.getpid()} on {HERE} since now by ppo-repro run\n")
    )
    with pytest.raises(UserError, match=f"process {os.getpid()} on {HERE}, since now"):
        refused(folder)
    os.close(descriptor)


def test_a_reader_that_looks_is_no_holder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the lock for an instant, which a process that starts then waits for."""
    folder.parent.mkdir(parents=True)
    descriptor = os.open(folder.with_name("run.lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    waits = 0

    def leave(_: float) -> None:
        nonlocal waits
        waits += 1
        os.close(descriptor)

    monkeypatch.setattr(lock.time, "sleep", leave)
    with only_writer(folder):
        assert waits == 1


def test_a_file_that_has_lost_its_path_is_no_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a file has another name after it is unlinked. Here this happens between opening and locking."""
    path, real = folder.with_name("run.lock"), fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        if not path.with_name(".nfs1").exists():
            path.rename(path.with_name(".nfs1"))
            path.write_text(f"process {os.getppid()} on {HERE} since then by ppo-repro run\n")
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=f"process {os.getppid()} on {HERE}, since then"), only_writer(folder):
        pass


def test_a_file_of_the_user_is_neither_lock_nor_removed(folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir(parents=True)
    path = folder.with_name("run.lock")
    path.write_text("my notes")
    with pytest.raises(UserError, match=r"run\.lock: is no lock of ppo-repro"), only_writer(folder):
        pass
    assert path.read_text() == "my notes"
    path.rename(tmp_path / "notes")
    path.symlink_to(tmp_path / "notes")
    with pytest.raises(UserError, match=r"run\.lock: cannot be locked \(Too many levels of symbolic links\)"):
        only_writer(folder).__enter__()
    assert (tmp_path / "notes").read_text() == "my notes"


@pytest.mark.parametrize("where", ["lock", "parent"])
def test_where_nothing_can_be_locked_or_made_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def no_lock(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if where == "lock":  # a file system without flock
        monkeypatch.setattr(fcntl, "flock", no_lock)
        said = r"run\.lock: cannot be locked \(No locks available\); keep runs where you may write"
    else:
        folder.parents[1].joinpath("experiment").write_text("")
        said = r"run: the file .*experiment is in the way; choose another --out"
    with pytest.raises(UserError, match=said), only_writer(folder):
        pass
