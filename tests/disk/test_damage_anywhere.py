"""Random damage of eight kinds to any file of a run: `verify` names it, and no command uses what is damaged.

`DAMAGES=50 python -m pytest -m long tests/disk/test_damage_anywhere.py` does fewer.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from ppo_repro.config.files import load_config
from ppo_repro.config.kinds import CONTROL
from ppo_repro.config.section import tree_digest
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader, schema
from ppo_repro.runs.diff import first_difference
from ppo_repro.runs.run import run_folder
from ppo_repro.runs.verify import verify
from ppo_repro.watcher import Silent
from tests.support import control, synthetic_run
from tests.support.cli import Cli, cli, one_line
from tests.support.damage import KINDS, Damage, damaged, files_of
from tests.support.language import run
from tests.support.paths import TINY

__all__ = ["cli"]

DAMAGES = int(os.environ.get("DAMAGES", "500"))
TABLES = [table.name for table in schema.TABLES]
# what `track` copies
TRACKED = {"manifest.json", "iterations.jsonl", "config.yaml", "environment.json", "accuracy.json", "times.json"}


def refusal(run_dir: Path) -> str:
    """What `verify` says; empty where it finds nothing."""
    try:
        verify(run_dir)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def frames(run_dir: Path) -> list[pd.DataFrame]:
    return [reader.TableReader(table)(run_dir) for table in TABLES]


def damages(folder: Path, count: int, seed: int) -> Iterator[Damage]:
    """Damage the folder so many times, each kind in turn; the folder is whole again between two of them."""
    generator = random.Random(seed)
    for number in range(count):
        with damaged(folder, KINDS[number % len(KINDS)], generator) as damage:
            yield damage


def test_damage_to_a_recorded_run_is_named_and_not_read(tmp_path: Path) -> None:
    run_dir = synthetic_run.make_run(tmp_path / "a", kind=CONTROL)
    synthetic_run.save_tree(run_dir, {**_tree(run_dir), "config_digest": tree_digest({"seed": 1})})
    whole = Path(shutil.copytree(run_dir, tmp_path / "whole"))
    expected, seen = frames(run_dir), Counter[str]()
    assert refusal(run_dir) == ""
    for damage in damages(run_dir, 40, 0):
        assert damage.is_named(said := refusal(run_dir)), (damage, said)
        for call in (lambda: first_difference(whole, run_dir) is None, lambda: _same(frames(run_dir), expected)):
            try:
                assert call(), damage
                seen["not used"] += 1
            except UserError as error:
                assert damage.is_named(str(error)) and "\n" not in str(error), (damage, error)
                seen["refused"] += 1
    assert refusal(run_dir) == "" and min(seen["refused"], seen["not used"]) > 5, seen


def _tree(run_dir: Path) -> dict[str, object]:
    return dict(json.loads((run_dir / manifest.FILE_NAME).read_text()))


def _same(found: list[pd.DataFrame], expected: list[pd.DataFrame]) -> bool:
    return all(a.equals(b) for a, b in zip(found, expected, strict=True))


class Interrupted(Silent):
    """Ends a run after its second iteration."""

    def iteration(self, done: int, total: int, figures: str) -> None:
        if done == 2:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Runs:
    """A complete run with its copy, and one that was interrupted."""

    whole: Path
    copy: Path
    part: Path


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    config = load_config(TINY, ["ppo.iterations=3", "checkpoints.every=1"])
    out = tmp_path_factory.mktemp("language")
    whole, _ = run(config, out / "whole", Silent())
    with suppress(KeyboardInterrupt):
        run(config, out / "part", Interrupted())
    return Runs(whole, Path(shutil.copytree(whole, out / "copy")), run_folder(config, out / "part"))


@pytest.fixture(scope="module")
def of_control(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    config = control.small_control("ppo.iterations=3")
    out = tmp_path_factory.mktemp("control")
    whole, _ = control.run(config, out / "whole", Silent())
    with suppress(KeyboardInterrupt):
        control.run(config, out / "part", Interrupted())
    return Runs(whole, Path(shutil.copytree(whole, out / "copy")), run_folder(config, out / "part"))


def _is_tracked(name: Path) -> bool:
    return name.as_posix() in TRACKED or name.parts[:2] in (("records", "iterations"), ("records", "steps"))


class Commands:
    """The commands that read a run, each with what it says of the undamaged one."""

    def __init__(self, cli: Cli, runs: Runs, scratch: Path) -> None:
        self.cli, self.runs, self.scratch = cli, runs, scratch
        self.seen: Counter[str] = Counter()
        self.expected: dict[str, tuple[int, str]] = {}

    def require(self, damage: Damage, command: str, *arguments: str | Path) -> None:
        """The command refuses in one line that names the damage, or says what it says without the damage."""
        key = " ".join([command, *map(str, arguments)])
        code, out, err = self.cli(command, *arguments)
        if code == 0:
            if command == "track":  # which says something else each time
                assert not any(_is_tracked(name) for name in damage.names), (damage, key)
            else:
                assert (code, self.digest(command, out)) == self.expected[key], (damage, key)
            self.seen[f"{command}: not used"] += 1
            return
        assert code == 2 and damage.is_named(one_line(err)), (damage, key, code, err)
        self.seen[f"{command}: refused"] += 1

    def learn(self, command: str, *arguments: str | Path) -> None:
        code, out, _ = self.cli(command, *arguments)
        assert code == 0
        self.expected[" ".join([command, *map(str, arguments)])] = code, self.digest(command, out)

    def digest(self, command: str, out: str) -> str:
        """What there is to compare: the page of a report, else the words."""
        page = self.scratch / "report.html"
        content = page.read_bytes() if command == "report" else out.encode()
        page.unlink(missing_ok=True)
        return hashlib.sha256(content).hexdigest()


def torment(cli: Cli, runs: Runs, scratch: Path, count: int, dear: int) -> Counter[str]:
    """Damage the copy `count` times; every `dear`-th time the commands that take long have to stand it too."""
    commands = Commands(cli, runs, scratch)
    quick = [("show", runs.copy), ("show", runs.copy, "--json"), ("diff", runs.whole, runs.copy)]
    long = [("rerun", str(runs.copy)), ("track", str(runs.copy), "--uri", f"sqlite:///{scratch}/mlflow.db")]
    if manifest.has_responses(manifest.load_head(runs.copy)):
        long.append(("report", str(runs.copy), "--out", str(scratch / "report.html")))
    for command in (*quick, *long):
        commands.learn(*map(str, command))
    for number, damage in enumerate(damages(runs.copy, count, 1)):
        assert damage.is_named(said := refusal(runs.copy)), (damage, said)
        for command in (*quick, *(long if number % dear == 0 else ())):
            commands.require(damage, *map(str, command))
    assert refusal(runs.copy) == ""
    return commands.seen


def nothing_goes_on(cli: Cli, part: Path, count: int) -> Counter[str]:
    """Resume a run damaged so many times: refused in one line that names the damage, and nothing changed."""
    seen: Counter[str] = Counter()
    for damage in damages(part, count, 2):
        if damage.kind == "appended" and damage.names[0].name == "iterations.jsonl":
            assert verify(part).unfinished_line, "what a kill may leave is named, and cut off by the next process"
            continue
        before = {name: (part / name).read_bytes() for name in files_of(part)}
        code, _, err = cli("resume", part)
        assert code == 2 and damage.is_named(one_line(err)), (damage, code, err)
        assert {name: (part / name).read_bytes() for name in files_of(part)} == before, damage
        seen[damage.kind] += 1
    return seen


@pytest.mark.slow
def test_commands_stand_damage_to_a_language_run(cli: Cli, language: Runs, tmp_path: Path) -> None:
    seen = torment(cli, language, tmp_path, 16, 16)
    assert seen["show: refused"] > 2 and seen["diff: refused"] > 2, seen
    assert nothing_goes_on(cli, language.part, 16).total() >= 14


@pytest.mark.slow
def test_commands_stand_damage_to_a_control_run(cli: Cli, of_control: Runs, tmp_path: Path) -> None:
    seen = torment(cli, of_control, tmp_path, 16, 16)
    assert seen["show: refused"] > 2 and seen["diff: refused"] > 2, seen
    assert nothing_goes_on(cli, of_control.part, 16).total() >= 14


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["language", "of_control"])
def test_every_command_stands_any_damage(cli: Cli, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    runs: Runs = request.getfixturevalue(kind)
    seen = torment(cli, runs, tmp_path, DAMAGES, 10)
    left = nothing_goes_on(cli, runs.part, DAMAGES // 2)
    print(f"\n{DAMAGES} damages of a complete run: {dict(seen)}; of an interrupted one: {dict(left)}")
    assert {name.split(":")[1] for name in seen} == {" refused", " not used"} and len(left) == len(KINDS)
