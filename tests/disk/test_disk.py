"""A full disk, a read-only one, a clock that runs backwards: named, nothing committed is lost, nothing half is kept."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.records import manifest
from ppo_repro.runs.run import run_folder
from ppo_repro.runs.verify import verify
from ppo_repro.watcher import Silent
from tests.support.language import rerun, resume, run
from tests.support.paths import TINY
from tests.support.resume import Recorded, record, require_as_uninterrupted

MIB = 1 << 20


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(TINY, ["ppo.iterations=3", "checkpoints.every=1"])


@pytest.fixture(scope="module")
def recorded(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(config, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def whole(recorded: Recorded) -> Path:
    return recorded.whole


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only a user who may mount has a disk to fill; RLIMIT_FSIZE stands in for it in test_resume.py")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path, free: int) -> None:
    """Take all of the disk but `free` bytes."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(path).free == 0
    os.truncate(path, path.stat().st_size - free)


class Filling(Silent):
    """Fills the disk after the first iteration."""

    def __init__(self, ballast: Path, free: int) -> None:
        self.ballast, self.free = ballast, free

    def iteration(self, done: int, total: int, figures: str) -> None:
        if done == 1:
            fill(self.ballast, self.free)


# KiB; what is written next at each: a table, the manifest, a checkpoint, the trained model
@pytest.mark.parametrize(
    ("free", "failing"),
    [
        (0, "records/sequences"),
        (44, "records/"),
        (100, "checkpoints/iteration-000002"),
        (260, "checkpoints/(iteration-000003|final)"),
    ],
)
def test_a_disk_that_fills_up_during_a_run(config: RunConfig, whole: Path, disk: Path, free: int, failing: str) -> None:
    run_dir = run_folder(config, disk / "out")
    with pytest.raises(
        UserError, match=rf"{failing}\S*: cannot be written \(No space left on device\); make room there"
    ):
        run(config, disk / "out", Filling(disk / "ballast", free * 1024))
    assert [path for path in run_dir.rglob("*") if path.suffix in {".tmp", ".removed"}] == []
    found, expected = manifest.load(run_dir), manifest.load(whole)
    count = len(found.iterations)
    assert count >= 1 and found.iterations == expected.iterations[:count]
    assert verify(run_dir).iterations == count
    if free == 0:
        with pytest.raises(UserError, match="No space left on device"):
            resume(run_dir, Silent())
        assert verify(run_dir).iterations == count
    (disk / "ballast").unlink()
    assert resume(run_dir, Silent()).recorded == count
    require_as_uninterrupted(run_dir, whole)
    verify(run_dir)


def test_a_full_disk_takes_no_new_run(config: RunConfig, disk: Path) -> None:
    fill(disk / "ballast", 8192)
    with pytest.raises(UserError, match=r"\(No space left on device\)"):
        run(config, disk, Silent())
    assert [path for path in disk.rglob("*") if path.is_file()] == [disk / "ballast"]


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def test_a_read_only_disk_is_read_and_not_written(config: RunConfig, recorded: Recorded, disk: Path) -> None:
    whole = recorded.whole
    shutil.copytree(whole, disk / "whole")
    shutil.copytree(recorded.parts / "2", disk / "part")
    complete = manifest.load(whole)
    make_read_only(disk)
    with pytest.raises(
        UserError, match=r"lock: cannot be written \(Read-only file system\); make the run folder writable"
    ):
        resume(disk / "part", Silent())
    with pytest.raises(UserError, match=r"cannot be made \(Read-only file system\); choose another --out"):
        run(config, disk / "new", Silent())
    assert verify(disk / "part").iterations == 2
    assert verify(disk / "whole") == verify(whole)
    report = rerun(disk / "whole", Silent())
    assert (report.difference, report.fingerprint) == (None, complete.fingerprint)


BACKWARDS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static int real(clockid_t id, struct timespec *t) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    return next(id, t);
}
int clock_gettime(clockid_t id, struct timespec *t) {
    int code = real(id, t);
    if (id == CLOCK_REALTIME) {
        struct timespec now;
        real(CLOCK_MONOTONIC, &now);
        t->tv_sec = 1500000000 - 1000 * (now.tv_sec % 100000);
    }
    return code;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = 0;
    return 0;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""
RESUME = """
import sys, time
before = time.time()
from ppo_repro.commands.cli import main
sys.argv = ["ppo-repro", "resume", sys.argv[1]]
try:
    main()
finally:
    print("went back", before - time.time(), "s")
"""


@pytest.mark.slow
def test_a_clock_that_runs_backwards_changes_nothing(config: RunConfig, whole: Path, tmp_path: Path) -> None:
    """The wall clock of a process loses 1000 s a second, and the times of the files are shuffled over 60 years."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to put another clock under the process")
    (tmp_path / "clock.c").write_text(BACKWARDS)
    library = tmp_path / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)

    class Interrupted(Silent):
        def iteration(self, done: int, total: int, figures: str) -> None:
            if done == 2:
                raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        run(config, tmp_path / "parts", Interrupted())
    run_dir = run_folder(config, tmp_path / "parts")
    generator = random.Random(0)
    for path in run_dir.rglob("*"):
        moment = generator.uniform(0, 60 * 365 * 86400)
        os.utime(path, (moment, moment))
    done = subprocess.run(
        [sys.executable, "-c", RESUME, str(run_dir)],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rsplit("went back", 1)[1].split()[0]) > 1000
    assert "resumed after iteration 2" in done.stderr
    require_as_uninterrupted(run_dir, whole)
    assert verify(run_dir).checkpoints == 2
