"""One process at a time writes a run or a grid: the others name it, end with 2, and change nothing.

`TRIALS=200 python -m pytest -m slow tests/runs/test_one_writer.py -s` races more often and says what it saw.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.watcher import Silent
from ppo_repro.config.files import dump_yaml, load_config
from ppo_repro.config.inputs import run_folder
from ppo_repro.records import manifest
from ppo_repro.runs.verify import verify
from tests.support.control import resume, run, small_control
from tests.support.paths import SMALL_CONTROL, TINY
from tests.support.racing import Contender, Ended, Racetrack, racing

TRIALS = int(os.environ.get("TRIALS", "20"))
HERE = socket.gethostname()


def test_whoever_comes_at_any_moment_of_a_run_is_refused_and_the_run_is_whole(
    control_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every fsync of the run, from its first one on, the same run is started again, and resumed if it can be."""
    config, came, busy = small_control(), Counter[str](), threading.Lock()
    run_dir = run_folder(config, tmp_path)
    run_dir.parent.mkdir()

    def come(descriptor: int) -> None:
        if not busy.acquire(blocking=False):  # of the one who came
            return
        comers: dict[str, Callable[[], object]] = {"run": lambda: run(config, tmp_path)}
        if run_dir.exists():
            comers["resume"] = lambda: resume(run_dir)
        for name, comer in comers.items():
            with pytest.raises(UserError, match=rf"is writing it \(process {os.getpid()} on {HERE}, since "):
                comer()
            came[name] += 1
        busy.release()

    monkeypatch.setattr(os, "fsync", come)
    assert run(config, tmp_path)[0] == run_dir
    monkeypatch.undo()
    assert came["run"] > came["resume"] > 50, came
    assert manifest.load(run_dir).fingerprint == manifest.load(control_run).fingerprint
    assert verify(run_dir).unfinished == ()
    assert [path.name for path in run_dir.parent.iterdir()] == [run_dir.name]


@dataclass
class Race:
    """Contenders for one folder, and what became of them over many trials."""

    track: Racetrack
    seen: Counter[str]

    def run(self, *contenders: Contender) -> list[Ended]:
        """Race; at most one contender goes on, and every other one says in one line why it does not."""
        ended = self.track.race(*contenders)
        winners = [one for one in ended if one.code == 0]
        assert {one.code for one in ended} <= {0, 2, -9}, ended
        processes = {one.process for one in ended}
        for one in ended:
            if one.code == 2:
                named = re.search(rf"is writing it \(process (\d+) on {HERE}, since [^)]*\); wait until", one.error)
                assert named or re.search(r"exists already|the run is finished", one.error), one.error
                assert one.error.startswith("error: ")
                assert named is None or int(named[1]) in processes - {one.process}, ended
                self.seen["named" if named else "came after the end"] += 1
        self.seen["won"] += len(winners)
        self.seen["killed"] += sum(one.code == -9 for one in ended)
        return ended


# of four short iterations: what takes time is to lay out, to publish and to record
QUICK = ("environment.num_envs=2", "environment.steps_per_env=10", "ppo.minibatch_size=10", "evaluation.episodes=1")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "quick.yaml"
    path.write_text(dump_yaml(small_control(*QUICK)))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    return run(small_control(*QUICK), tmp_path_factory.mktemp("whole"))[0]


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Race]:
    folder = tmp_path_factory.mktemp("race")
    with racing(folder / "log", "run", SMALL_CONTROL, "--out", folder / "warm") as track:
        yield Race(track, Counter())


def contenders(count: int, generator: random.Random, *arguments: str | Path) -> list[Contender]:
    """So many processes with one command; none begins later than a run takes to lay out its folder."""
    return [Contender(arguments, generator.uniform(0.0, 0.03)) for _ in range(count)]


def some_killed(all_of_them: Sequence[Contender], count: int, generator: random.Random) -> list[Contender]:
    """The first `count` of them are killed at some moment between their begin and their end."""
    killed = [Contender(one.arguments, one.delay, generator.uniform(0.0, 0.3)) for one in all_of_them[:count]]
    return [*killed, *all_of_them[count:]]


def require_whole(run_dir: Path, expected: manifest.Manifest) -> None:
    found = verify(run_dir)
    assert (found.status, found.fingerprint, found.unfinished) == ("complete", expected.fingerprint, ())
    assert [path.name for path in run_dir.parent.iterdir()] == [run_dir.name], "something is left beside the run"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_of_processes_that_start_one_run_one_goes_on(race: Race, config: Path, whole: Path, tmp_path: Path) -> None:
    expected, generator, before = manifest.load(whole), random.Random(1), race.seen.copy()
    for trial in range(TRIALS):
        out = tmp_path / str(trial)
        ended = race.run(*contenders(4, generator, "run", config, "--out", out))
        assert sorted(one.code for one in ended) == [0, 2, 2, 2], ended
        require_whole(run_folder(small_control(*QUICK), out), expected)
        shutil.rmtree(out)
    print(f"\n{TRIALS} starts of 4 processes: {dict(race.seen - before)}")


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a kill after two iterations leaves."""

    class Copying(Silent):
        def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
            if done == 2:
                shutil.copytree(run_folder(small_control(*QUICK), folder / "whole"), folder / "part")

    folder = tmp_path_factory.mktemp("part")
    run(small_control(*QUICK), folder / "whole", Copying())
    return folder / "part"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_of_processes_that_resume_one_run_one_goes_on(race: Race, part: Path, whole: Path, tmp_path: Path) -> None:
    expected, generator, before = manifest.load(whole), random.Random(2), race.seen.copy()
    for trial in range(TRIALS):
        run_dir = Path(shutil.copytree(part, tmp_path / str(trial) / "run"))
        ended = race.run(*contenders(4, generator, "resume", run_dir))
        assert sorted(one.code for one in ended) == [0, 2, 2, 2], ended
        require_whole(run_dir, expected)
        shutil.rmtree(run_dir.parent)
    print(f"\n{TRIALS} resumptions by 4 processes: {dict(race.seen - before)}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_whose_processes_are_killed_while_others_come_is_finished(
    race: Race, config: Path, whole: Path, tmp_path: Path
) -> None:
    """Start or resume with four processes, three of them killed, until the run is complete; nothing blocks it."""
    expected, generator, before = manifest.load(whole), random.Random(3), race.seen.copy()
    for trial in range(TRIALS):
        out = tmp_path / str(trial)
        run_dir = run_folder(small_control(*QUICK), out)
        for _ in range(100):
            start: tuple[str | Path, ...] = ("run", config, "--out", out)
            command = ("resume", run_dir) if run_dir.exists() else start
            race.run(*some_killed(contenders(4, generator, *command), 3, generator))
            if run_dir.exists() and manifest.load(run_dir).status == "complete":
                break
        run_dir.with_name(f"{run_dir.name}.lock").unlink(missing_ok=True)  # of a process killed after its run's end
        require_whole(run_dir, expected)
        shutil.rmtree(out)
    print(f"\n{TRIALS} runs by processes that are killed: {dict(race.seen - before)}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_number_of_processes_rerun_one_run(race: Race, whole: Path) -> None:
    generator, before = random.Random(4), race.seen.copy()
    content = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    for _ in range(TRIALS):
        assert {one.code for one in race.run(*contenders(3, generator, "rerun", whole))} == {0}
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == content
    print(f"\n{TRIALS} reruns by 3 processes: {dict(race.seen - before)}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_of_processes_that_fork_one_run_one_goes_on(tmp_path: Path) -> None:
    tiny, generator = load_config(TINY, ["checkpoints.every=1", "model.warm_start_steps=3"]), random.Random(5)
    (tmp_path / "config.yaml").write_text(dump_yaml(tiny))
    fork = ("fork", run_folder(tiny, tmp_path / "origin"), "--at", "1", "--set", "kl.kl_coef=0.5", "--out")
    with racing(tmp_path / "log", "run", tmp_path / "config.yaml", "--out", tmp_path / "origin") as track:
        race = Race(track, Counter())
        race.run(Contender([*fork, tmp_path / "alone"]))
        (alone,) = (tmp_path / "alone").glob("*/*")
        for trial in range(TRIALS):
            out = tmp_path / str(trial)
            ended = race.run(*contenders(4, generator, *fork, out))
            assert sorted(one.code for one in ended) == [0, 2, 2, 2], ended
            require_whole(out / alone.relative_to(tmp_path / "alone"), manifest.load(alone))
            shutil.rmtree(out)
    print(f"\n{TRIALS} forks by 4 processes: {dict(race.seen)}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_of_processes_that_run_one_grid_one_at_a_time_goes_on(race: Race, config: Path, tmp_path: Path) -> None:
    path, generator, before = tmp_path / "g.yaml", random.Random(6), race.seen.copy()
    path.write_text(f"question: q?\nexpectation: e.\nbase: {config}\naxes: {{}}\nseeds: [1]\n")
    command = ("grid", path, "--out", tmp_path / "out", "--workers", "1")
    alone = run(small_control(*QUICK, "seed=1"), tmp_path / "alone")[0]
    for trial in range(TRIALS):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        ended = race.run(*contenders(4, generator, *command))
        assert sorted(one.code for one in ended) == [0, 2, 2, 2], (trial, ended)
        require_whole(tmp_path / "out/g/cells/seed=1" / alone.relative_to(tmp_path / "alone"), manifest.load(alone))
    new = race.seen - before
    for trial in range(TRIALS):
        ended = race.run(*contenders(4, generator, *command))  # of the complete grid: it only writes its tables
        assert {one.code for one in ended} in ({0}, {0, 2}), (trial, ended)
    assert sorted(found.name for found in (tmp_path / "out").iterdir()) == ["g"]
    print(f"\n{TRIALS} new grids by 4 processes: {dict(new)}; complete ones: {dict(race.seen - before - new)}")
