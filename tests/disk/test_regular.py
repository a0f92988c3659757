"""Pipes, devices and folders in the place of files of a run: every command refuses them in one line, and none waits."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from ppo_repro.disk import durable
from ppo_repro.disk.folder import has_writer, only_writer
from ppo_repro.disk.regular import NOT_REGULAR, read_beginning, read_regular
from ppo_repro.errors import UserError
from ppo_repro.runs.checkpoint_index import verified_bytes
from tests.support.cli import Cli, one_line
from tests.support.synthetic_run import cut_back

SECONDS = 60  # a command that waits for a pipe waits for ever


@contextmanager
def no_waiting() -> Iterator[None]:
    """End the block with an error where it takes SECONDS."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still waiting after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")  # which never ends; making a device needs root


OTHERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (pipe, NOT_REGULAR),
    "device": (device, NOT_REGULAR),
    "folder": (Path.mkdir, "Is a directory"),
}


@pytest.fixture
def copy(deterministic_run: Path, tmp_path: Path) -> Path:
    """A run that a test may damage."""
    return Path(shutil.copytree(deterministic_run, tmp_path / "runs" / "run"))


def put(path: Path, other: str) -> str:
    """Put such a thing in the place of a file; what is said of it."""
    make, said = OTHERS[other]
    path.unlink()
    make(path)
    return said


COMMANDS = ("show", "verify", "replay", "rerun", "report", "resume", "bisect", "track", "diff")


@pytest.mark.parametrize("other", OTHERS)
def test_a_manifest_that_is_no_file_is_refused_by_every_command(cli: Cli, copy: Path, other: str) -> None:
    said = put(copy / "manifest.json", other)
    for command in COMMANDS:
        with no_waiting():
            code, out, err = cli(command, copy, *([copy] if command == "diff" else []))
        assert (code, out) == (2, "") and f"manifest.json: cannot be read ({said})" in one_line(err), command


def test_a_folder_of_runs_is_listed_with_a_pipe_in_it(cli: Cli, copy: Path) -> None:
    shutil.copytree(copy, copy.with_name("whole"))
    put(copy / "manifest.json", "pipe")
    (copy.with_name("whole") / "lock").unlink(missing_ok=True)
    pipe(copy.with_name("whole") / "lock")
    with no_waiting():
        code, out, _ = cli("ls", copy.parent)
    assert code == 0 and "damaged" in out and "complete" in out


FILES = {
    "iterations.jsonl": ("show", "verify", "replay", "report"),
    "config.yaml": ("show", "verify", "replay", "report", "bisect"),
    "environment.json": ("verify", "report"),
    "times.json": ("show", "verify", "report"),
    "checkpoints/final/SHA256SUMS": ("verify", "bisect"),
    "checkpoints/final/model.safetensors": ("verify", "bisect"),
    "checkpoints/final/config.json": ("verify", "bisect"),
    "checkpoints/final_state/checkpoint.json": ("verify",),
    "records/iterations/iteration=000000.parquet": ("show", "verify", "replay", "report"),
    "records/tokens/iteration=000000.parquet": ("verify", "replay", "report"),
}


@pytest.mark.parametrize("name", FILES)
def test_any_other_file_is_refused_by_the_commands_that_use_it(cli: Cli, copy: Path, name: str) -> None:
    put(copy / name, "pipe")
    for command in FILES[name]:
        with no_waiting():
            code, _, err = cli(command, copy)
        assert code == 2 and Path(name).name in one_line(err), command


@pytest.mark.parametrize("name", ["iterations.jsonl", "config.yaml", "environment.json", "records/tokens"])
def test_no_run_is_gone_on_with_where_one_is_a_pipe(cli: Cli, copy: Path, name: str) -> None:
    cut_back(copy, 2, "interrupted")
    path = copy / name
    put(path / "iteration=000000.parquet" if path.is_dir() else path, "pipe")
    with no_waiting():
        code, _, err = cli("resume", copy)
    assert code == 2 and NOT_REGULAR in one_line(err) and str(path) in err


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_file_is_not_read(tmp_path: Path, other: str) -> None:
    make, said = OTHERS[other]
    make(tmp_path / "x")
    for read in (read_regular, lambda path: read_beginning(path, 4)):
        with no_waiting(), pytest.raises(OSError, match=said):
            read(tmp_path / "x")
    with no_waiting(), pytest.raises(UserError, match=rf"x: cannot be read \({said}\)"):
        verified_bytes(tmp_path / "x", "00")


def test_no_write_and_no_lock_waits_for_a_pipe(tmp_path: Path) -> None:
    pipe(tmp_path / "lock")
    pipe(tmp_path / "x.tmp")
    with no_waiting():
        assert not has_writer(tmp_path)
        with pytest.raises(UserError, match="lock: cannot be written"), only_writer(tmp_path):
            pass
        with pytest.raises(UserError, match="x: cannot be written"):
            durable.atomic_write(tmp_path / "x", b"1")
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_command_does_not_look_at_files_it_has_no_use_for(cli: Cli, copy: Path, tmp_path: Path) -> None:
    """What the README says of `show --json` and `bisect`; `verify` looks at all files."""
    shown = cli("show", copy, "--json")
    for name, command in (("config.yaml", ("show", copy, "--json")), ("iterations.jsonl", ("bisect", copy))):
        kept = (copy / name).read_bytes()
        (copy / name).write_bytes(b"\xff\x00")
        assert cli("verify", copy)[0] == 2 and cli("show", copy)[0] == 2
        if name == "config.yaml":
            assert cli(*command) == shown
        else:
            assert cli(*command, "--out", tmp_path / "out")[0] == 0
        (copy / name).write_bytes(kept)
