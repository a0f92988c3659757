"""An interrupt at every line of a run's beginning: what stays is no run, and the next one begins as if nothing was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from ppo_repro.config.control import load_control_config
from ppo_repro.config.files import load_config
from ppo_repro.config.kinds import LANGUAGE
from ppo_repro.control.kind import ControlKind
from ppo_repro.files import only_writer
from ppo_repro.grids.cell import Order, finish_cell, run_of, start_cell, state_of
from ppo_repro.records import manifest, writer
from ppo_repro.runs import run as runner
from ppo_repro.runs.language import LanguageKind
from ppo_repro.runs.lifetime import new_run
from ppo_repro.watcher import Silent
from tests.support.paths import SMALL_CONTROL, TINY
from tests.support.synthetic_run import create_run

# an interrupt may come between a file's opening and the block that closes it
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
WATCHED = ("records/writer.py", "disk/durable.py", "disk/folder.py", "runs/lifetime.py", "contextlib.py")


class _Begun(Exception):
    """The run has come to its computation."""


def _begun(*arguments: object) -> dict[str, float]:
    sys.settrace(None)
    raise _Begun


def interrupted_at(line: int, begin: Callable[[], object]) -> bool:
    """Call `begin` with an interrupt at the given line of those that make a run folder; False if it has fewer."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal seen
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        begin()
    except KeyboardInterrupt:
        return True
    except _Begun:
        return False
    finally:
        sys.settrace(None)
    raise AssertionError("neither interrupted nor begun")


def _begin_language(out: Path) -> object:
    return runner.run(LanguageKind(Silent()), load_config(TINY), out)


def _begin_control(out: Path) -> object:
    return runner.run(ControlKind(Silent()), load_control_config(SMALL_CONTROL), out)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("begin", [_begin_language, _begin_control])
def test_an_interrupt_at_any_line_leaves_no_run(
    begin: Callable[[Path], object], stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (LanguageKind, ControlKind):
        monkeypatch.setattr(kind, "environment", lambda *_: {})
    monkeypatch.setattr(runner, "execute", _begun)
    line, folders = 1, 0
    while interrupted_at(line, lambda: begin(tmp_path)):
        folders += any(tmp_path.iterdir())
        assert run_of(tmp_path) is None, f"line {line}: a run is left that nobody writes"
        line += stride
    assert line > 100 and folders, "the interrupts came nowhere near the folder"


def test_the_check_finds_a_folder_that_stays(tmp_path: Path) -> None:
    """The order that this replaced: first the folder, then its lock, then the block that cleans up."""

    def begin() -> None:
        create_run(tmp_path / "e" / "run")
        with only_writer(tmp_path / "e" / "run"):
            _begun()

    line = 1
    while interrupted_at(line, begin) and run_of(tmp_path) is None:
        line += 1
    assert run_of(tmp_path) is not None and manifest.load(tmp_path / "e" / "run").status == "running"


def test_the_lock_is_held_from_the_first_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []

    def publish(temporary: Path, run_dir: Path) -> None:
        held.append((temporary / "lock").exists())
        real(temporary, run_dir)

    real = writer.publish_run
    monkeypatch.setattr(writer, "publish_run", publish)
    laid_out = writer.lay_out_run(tmp_path / "run", "seed: 1\n", {}, "0123456789ab", {}, LANGUAGE)
    with pytest.raises(_Begun), new_run(laid_out, tmp_path / "run"):
        with pytest.raises(Exception, match="another process is writing this run"), only_writer(tmp_path / "run"):
            pass
        raise _Begun
    assert held == [True] and not list(tmp_path.iterdir())


def test_a_folder_that_came_meanwhile_is_another_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(temporary: Path, run_dir: Path) -> None:
        run_dir.mkdir()
        (run_dir / "theirs").touch()
        real(temporary, run_dir)

    real = writer.publish_run
    monkeypatch.setattr(writer, "publish_run", publish)
    laid_out = writer.lay_out_run(tmp_path / "run", "", {}, "0123456789ab", {}, LANGUAGE)
    with pytest.raises(Exception, match="cannot be written"), new_run(laid_out, tmp_path / "run"):
        raise AssertionError("began in a folder of another process")
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "theirs"]


def test_a_killed_cell_is_not_said_to_be_running(tmp_path: Path) -> None:
    order = Order("c", str(tmp_path), LANGUAGE, 1)
    assert state_of(tmp_path) == "missing"
    create_run(tmp_path / "e" / "run")
    assert state_of(tmp_path) == "running"
    (tmp_path / "log.txt").write_text("")
    finish_cell(order, -9, 1.0)
    assert state_of(tmp_path) == "interrupted"
    process = start_cell(order)  # its configuration is missing, which takes it a while to see
    assert state_of(tmp_path) == "running"
    process.communicate()
