"""What a damaged, foreign, half-written or unwritable cache does to a kernel: one more compilation, and a line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ppo_repro.errors import UserError
from ppo_repro.numerics.kernels.core import cache, entries
from ppo_repro.numerics.kernels.core.compile import kernel
from tests.support.paths import ROOT

NAME, CONTENT = "module.function.0123", bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "ppo_repro" / "kernels-1"


@pytest.fixture(autouse=True)
def says_again() -> None:
    entries._say_not_kept.cache_clear()


def double(x: np.ndarray) -> None:
    for i in range(len(x)):
        x[i] = x[i] * 2.0


def triple(x: np.ndarray) -> None:
    for i in range(len(x)):
        x[i] = x[i] * 3.0


class Kernels:
    """Runs functions as a new process does, with machine code from a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setattr(cache, "cache_folder", lambda: folder)

    def loads(self, function: Callable[[np.ndarray], None], factor: float) -> bool:
        """Whether the machine code came from the folder; its result is right in any case."""
        compiled, x = kernel(function), np.arange(5.0)
        compiled(x)
        assert x.tolist() == [factor * i for i in range(5)]
        stats = compiled.stats  # type: ignore[attr-defined]
        assert sum(stats.cache_hits.values()) + sum(stats.cache_misses.values()) == 1
        return bool(stats.cache_hits)

    def entry(self, name: str) -> Path:
        (found,) = self.folder.glob(f"test_entries.{name}.*")
        return found


@pytest.fixture
def kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(folder, monkeypatch)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)


def foreign(path: Path) -> None:
    path.write_text("not a kernel\n")


def exchange(path: Path) -> None:
    """A whole entry of the same folder under this name: another function."""
    (other,) = path.parent.glob("test_entries.triple.*")
    path.write_bytes(other.read_bytes())


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o644)


DAMAGES = (cut, empty, flip, foreign, exchange, link, open_to_others, pipe)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_again_with_a_line(
    damage: Callable[[Path], None], kernels: Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not kernels.loads(double, 2.0) and not kernels.loads(triple, 3.0)
    assert kernels.loads(double, 2.0), "an undamaged one is loaded"
    assert capsys.readouterr().err == ""
    damage(kernels.entry("double"))
    assert not kernels.loads(double, 2.0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kernels: {kernels.entry('double')} is ") and line.endswith("; not used, compiled again")
    assert kernels.loads(double, 2.0) and kernels.loads(triple, 3.0)
    assert capsys.readouterr().err == ""


def test_no_damage_of_real_entries_is_read(kernels: Kernels) -> None:
    for function, factor in ((double, 2.0), (triple, 3.0)):
        kernels.loads(function, factor)
    draw = random.Random(1)
    for path in sorted(kernels.folder.iterdir()):
        good = path.read_bytes()
        content = entries.read(kernels.folder, path.name)
        assert content is not None and content == good[-len(content) :]
        flips = [bytearray(good) for _ in range(100)]
        for flipped in flips:
            flipped[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        cuts = [good[: draw.randrange(len(good))] for _ in range(30)]
        longer = [good + b"\0", b"\0" + good, good + good]
        for damaged in [*map(bytes, flips), *cuts, *longer]:
            path.write_bytes(damaged)
            assert entries.read(kernels.folder, path.name) is None
        path.write_bytes(good)
        assert entries.read(kernels.folder, path.name) == content


def test_files_that_are_no_entries_are_not_opened(kernels: Kernels, capsys: pytest.CaptureFixture[str]) -> None:
    kernels.loads(double, 2.0)
    for name in ("notes.txt", f"{kernels.entry('double').name}.5eed.tmp"):
        os.mkfifo(kernels.folder / name)  # whoever opens it to read waits for ever
    assert not kernels.loads(triple, 3.0) and capsys.readouterr().err == ""


def test_where_nothing_can_be_written_kernels_work_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()  # a folder below a file can be made by nobody, not even by root
    kernels = Kernels(tmp_path / "file" / "ppo_repro" / "kernels-1", monkeypatch)
    before = {path for path in ROOT.rglob("__pycache__/*") if path.suffix != ".pyc"}
    assert not kernels.loads(double, 2.0) and not kernels.loads(triple, 3.0) and not kernels.loads(double, 2.0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kernels: cannot be kept in {kernels.folder} (")
    assert {path for path in ROOT.rglob("__pycache__/*") if path.suffix != ".pyc"} == before


@pytest.mark.parametrize("which", [0, 1, 2], ids=["folder", "ppo_repro", "above"])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(which: int, mode: int, folder: Path, kernels: Kernels) -> None:
    entries.write(folder, NAME, CONTENT)
    path = (folder, folder.parent, folder.parent.parent)[which]
    path.chmod(mode)
    # above our own folders others may write: /tmp is such, where nobody can exchange what is not theirs
    if which == 2 and mode in (0o775, 0o1777):
        assert entries.read(folder, NAME) == CONTENT
        return
    for attempt in (lambda: entries.read(folder, NAME), lambda: entries.write(folder, NAME, CONTENT)):
        with pytest.raises(UserError, match=rf"^{path}: belongs to user \d+, mode d\S+ \({mode:04o}\); .* chmod"):
            attempt()
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        kernels.loads(double, 2.0)
    path.chmod(0o755)
    assert entries.read(folder, NAME) == CONTENT


def test_a_folder_made_by_somebody_else_before_ours_is_refused(folder: Path) -> None:
    assert entries.read(folder, NAME) is None  # nothing is there yet, and that is not remembered
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(UserError, match="others could exchange"):
        entries.write(folder, NAME, CONTENT)


@pytest.mark.parametrize(("user", "refused"), [(0, False), (os.geteuid(), False), (os.geteuid() + 1, True)])
def test_files_of_other_users_are_refused(user: int, refused: bool) -> None:
    assert entries._others_may_write(os.stat_result((0o40755, 0, 0, 0, user, 0, 0, 0, 0, 0))) == refused


def writer(folder: Path, program: str) -> subprocess.Popen[str]:
    start = (
        f"from pathlib import Path; from ppo_repro.numerics.kernels.core import entries; f = Path({str(folder)!r})\n"
    )
    return subprocess.Popen([sys.executable, "-c", start + program], cwd=ROOT, text=True, stderr=subprocess.PIPE)


KILLED_WHILE_WRITING = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
entries.write(f, {NAME!r}, bytes(5000))
"""
KILLED_BEFORE_IT_HAS_ITS_NAME = f"""
import os, signal
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
entries.write(f, {NAME!r}, bytes(5000))
"""


@pytest.mark.parametrize("program", [KILLED_WHILE_WRITING, KILLED_BEFORE_IT_HAS_ITS_NAME])
@pytest.mark.parametrize("existing", [False, True])
def test_a_kill_while_writing_leaves_the_old_entry_or_none(program: str, existing: bool, folder: Path) -> None:
    if existing:
        entries.write(folder, NAME, CONTENT)
    process = writer(folder, program)
    process.communicate()
    assert process.returncode in (-signal.SIGKILL, -signal.SIGXFSZ)
    (left,) = folder.glob("*.tmp")
    assert left.stat().st_size > 0, "it was killed while writing"
    assert entries.read(folder, NAME) == (CONTENT if existing else None)
    entries.write(folder, NAME, CONTENT[::-1])
    assert entries.read(folder, NAME) == CONTENT[::-1]


def test_a_full_disk_keeps_nothing_and_says_so_once(folder: Path) -> None:
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    process = writer(folder, full + "for name in 'ab':\n    entries.write(f, name, bytes(5000))\n")
    _, err = process.communicate()
    assert process.returncode == 0 and len(err.splitlines()) == 1 and "(File too large)" in err
    assert list(folder.iterdir()) == []


def test_processes_write_and_read_one_entry_at_once(folder: Path) -> None:
    program = f"""
content = bytes(50_000)
for _ in range(30):
    entries.write(f, {NAME!r}, content)
    assert entries.read(f, {NAME!r}) == content
"""
    processes = [writer(folder, program) for _ in range(4)]
    assert [(process.communicate()[1], process.returncode) for process in processes] == [("", 0)] * 4
    assert [path.name for path in folder.iterdir()] == [NAME]


FIRST_KERNEL = """
import numpy as np
from ppo_repro.numerics.kernels import layer_parts

print(layer_parts.add(np.ones((3, 5), np.float32), np.ones((3, 5), np.float32)).sum())
"""


@pytest.mark.slow
def test_processes_that_start_at_once_with_an_empty_cache_all_work(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FIRST_KERNEL]
    processes = [
        subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    assert [(*process.communicate(), process.returncode) for process in processes] == [("30.0\n", "", 0)] * 4
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def aged(path: Path, days: float) -> Path:
    """A folder with a file, last used so many days ago."""
    path.mkdir(parents=True)
    (path / "entry").write_bytes(b"x")
    seconds = time.time() - days * 86400
    os.utime(path, (seconds, seconds))
    return path


def test_a_new_folder_removes_those_that_nobody_used_for_a_month(folder: Path) -> None:
    kept = [aged(folder.with_name("kernels-2"), 29), aged(folder.with_name("other"), 400)]
    gone = [aged(folder.with_name(name), 31) for name in ("kernels-3", "kernels-4-emulated", "kernels-5.0.removed")]
    link = folder.with_name("kernels-6")
    link.symlink_to(kept[1])
    entries.write(folder, NAME, CONTENT)
    assert [path.exists() for path in (*kept, link)] == [True] * 3 and not any(path.exists() for path in gone)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["kernels-1", "kernels-2", "kernels-6", "other"]
    late = aged(folder.with_name("kernels-7"), 31)
    entries.write(folder, NAME + "1", CONTENT)
    assert late.exists(), "only where a folder is made anew is anything removed"


def test_reading_counts_as_use(folder: Path) -> None:
    entries.write(folder, NAME, CONTENT)
    aged(folder.with_name("kernels-2"), 31)
    for path in (folder, folder.with_name("kernels-2")):
        os.utime(path, (0, 0))
    entries._mark_used.cache_clear()
    assert entries.read(folder, NAME) == CONTENT
    entries.remove_unused(folder.with_name("kernels-new"))
    assert folder.exists() and not folder.with_name("kernels-2").exists()


def test_two_processes_that_remove_at_once_do_not_disturb_each_other(folder: Path) -> None:
    code = "import sys; from pathlib import Path; from ppo_repro.numerics.kernels.core import entries as e; " + (
        "sys.stdin.read(1); e.remove_unused(Path(sys.argv[1]))"
    )
    for index in range(2, 60):
        aged(folder.with_name(f"kernels-{index}"), 31)
    command = [sys.executable, "-c", code, str(folder)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) for _ in range(3)]
    errors = [process.communicate(b"x")[1] for process in processes]
    assert errors == [b""] * 3 and [process.returncode for process in processes] == [0] * 3
    assert list(folder.parent.iterdir()) == []
