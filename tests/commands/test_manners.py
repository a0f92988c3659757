"""Small things that a person at a terminal expects: seeds, lists, the latest run."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import pytest

import ppo_repro
from ppo_repro.base.files import MANIFEST
from ppo_repro.base.latest import latest_run
from ppo_repro.commands.arguments import build_parser
from ppo_repro.commands.recorded import lines_of
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import load_any
from ppo_repro.records import manifest, reader
from ppo_repro.records.folder import load_recorded_config
from ppo_repro.runs.language import LanguageKind
from tests.support.cli import Cli, one_line
from tests.support.paths import ROOT, SMALL_CONTROL, TINY
from tests.support.synthetic_run import cut_back


def test_the_seed_of_the_command_line(cli: Cli) -> None:
    assert f"seed = {2**63}: must be below" in cli.refusal("plan", TINY, "--seed", str(2**63))
    assert "'-1' is not a count; try ppo-repro plan --help" in cli.refusal("plan", TINY, "--seed", "-1")


@pytest.mark.parametrize(
    ("text", "said"),
    [("5:2", "'5:2' ends before it begins"), ("0:x", "'x' is not a count"), ("3:", "'' is not a count")],
)
def test_iterations_that_are_none(cli: Cli, tmp_path: Path, text: str, said: str) -> None:
    assert f"argument --iterations: {said}" in cli.refusal("rerun", tmp_path, "--iterations", text)


def test_run_takes_a_file_for_control_runs(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("run", SMALL_CONTROL, "--out", tmp_path, "--seed", "5", "--json")
    assert code == 0
    assert "seed 5: " in err
    summary = json.loads(out)
    assert manifest.load_head(Path(summary["run_dir"])).kind == "control"
    assert "/seed5-" in summary["run_dir"]


@pytest.fixture
def runs(tmp_path: Path, deterministic_run: Path, native_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with runs of an hour, a day and a minute ago; the newest is damaged."""
    root = tmp_path / "runs"
    for name, source, age in (
        ("a/one", deterministic_run, 3600),
        ("two", native_run, 90_000),
        ("a/b/three", deterministic_run, 200),
    ):
        shutil.copytree(source, root / name)
        written = time.time() - age
        os.utime(root / name / MANIFEST, (written, written))
    damaged = root / "a" / "b" / "three" / MANIFEST
    damaged.write_text(damaged.read_text().replace('"complete"', '"running"'))
    os.utime(damaged, (time.time() - 200,) * 2)
    shutil.copytree(deterministic_run, root / "four.tmp")
    monkeypatch.chdir(tmp_path)
    return root


def test_show_lists_runs_the_newest_first(cli: Cli, runs: Path, deterministic_run: Path) -> None:
    found = cli.json("show")["runs"]
    assert [run["folder"] for run in found] == ["runs/a/b/three", "runs/a/one", "runs/two"]
    assert [run["state"] for run in found] == ["damaged", "complete", "complete"]
    head = manifest.load_head(deterministic_run)
    assert (found[1]["fingerprint"], found[1]["iterations"]) == (head.fingerprint, head.num_iterations)
    assert found[1]["kind"] == "language"
    assert 3600 <= found[1]["age_seconds"] < 3700
    out = cli.done("show", runs / "a")
    lines = out.splitlines()
    assert lines[0].split() == ["run", "state", "iterations", "score", "fingerprint", "age"]
    assert [line.split()[0] for line in lines[1:]] == [str(runs / "a/b/three"), str(runs / "a/one")]
    score = f"{head.final['eval_score']:.3f}"
    row = ["complete", str(head.num_iterations), score, head.fingerprint[:12], "60", "min"]
    assert lines[2].split()[1:] == row


def test_show_keeps_to_the_width_of_a_terminal(cli: Cli, runs: Path) -> None:
    found = cli.json("show")["runs"]
    whole, narrow = (lines_of(found, Path("runs"), width) for width in (math.inf, 70))
    assert whole == cli("show")[1].splitlines(), "what is no terminal gets every column"
    assert len(whole[0]) > 70
    assert max(map(len, narrow)) <= 70
    assert narrow[0].split() == ["run", "state", "score", "what", "differs", "age"]
    assert narrow[-1] == "the terminal is too narrow for: fingerprint, iterations"


def test_show_says_what_runs_differ_in_and_what_they_are_called(cli: Cli, runs: Path) -> None:
    head = manifest.load_head(runs / "two")
    out = cli.done("show", runs / "two", "--name", "plain torch", "--tag", "control", "--notes", "why 40 %?")
    assert out.splitlines() == ["name        plain torch", "tags        control", "notes       why 40 %?"]
    shutil.rmtree(runs / "a" / "b")
    lines = cli("show")[1].splitlines()
    assert "  what differs" in lines[0]
    assert "  name  " in lines[0]
    assert "  tags" in lines[0]
    assert "mode=deterministic" in lines[1]
    assert "mode=native" in lines[2]
    assert "  plain torch  " in lines[2]
    listed = cli.json("show")["runs"][1]
    assert (listed["name"], listed["tags"], listed["notes"]) == ("plain torch", ["control"], "why 40 %?")
    assert "plain torch" in cli("show", runs / "two")[1]
    out = cli.done("verify", runs / "two")
    assert "under no digest: label.json" in out
    assert manifest.load_head(runs / "two") == head
    assert cli("show", runs / "two", "--name", "", "--tag", "", "--notes", "")[1] == "no label\n"
    assert not (runs / "two" / "label.json").exists()
    said = cli.refusal("show", runs / "two", "--name", "x" * 61)
    assert "--name xxxx" in said
    assert "must be one line of at most 60 characters" in said
    for name in ("two\nlines", "\x1b[31mred"):
        cli.refusal("show", runs / "two", "--name", name)
    (runs / "two" / "label.json").write_text("{}}")
    assert "is no label; remove it" in one_line(cli("show", runs / "two")[2])
    assert [run["state"] for run in cli.json("show")["runs"]] == ["complete", "damaged"]


def test_a_name_changes_neither_folder_nor_fingerprint(cli: Cli, tmp_path: Path) -> None:
    plain = cli.json("run", TINY, "--out", tmp_path / "plain")
    named = cli.json("run", TINY, "--out", tmp_path / "named", "--name", "first try", "--tag", "a", "--tag", "b")
    assert plain["fingerprint"] == named["fingerprint"]
    assert Path(plain["run_dir"]).name == Path(named["run_dir"]).name
    assert json.loads((Path(named["run_dir"]) / "label.json").read_text())["tags"] == ["a", "b"]
    assert cli("diff", plain["run_dir"], named["run_dir"])[0] == 0


def test_show_has_the_score_of_a_run_that_works_still(cli: Cli, runs: Path) -> None:
    cut_back(runs / "two", 2, "interrupted")
    every = load_recorded_config(runs / "two").evaluation.every
    rows = reader.read_iterations(runs / "two", allow_incomplete=True)
    last = rows["eval_score"].iloc[1 // every * every]
    assert {run["folder"]: run["score"] for run in cli.json("show")["runs"]}["runs/two"] == last


def test_a_run_without_a_process_that_writes_it_is_called_killed(cli: Cli, runs: Path) -> None:
    cut_back(runs / "two", 1, "running")
    states = {run["folder"]: run["state"] for run in cli.json("show")["runs"]}
    assert states["runs/two"] == "killed"
    assert cli("show", "runs/two")[1].startswith("runs/two: killed, 1 iterations")
    figures = cli.json("show", "runs/two")
    assert (figures["status"], figures["iterations"]) == ("killed", 1)
    assert cli("verify", "runs/two")[1].startswith("whole: killed, 1 iterations")


def test_latest_is_the_run_that_was_written_last(cli: Cli, runs: Path) -> None:
    shutil.rmtree(runs / "a" / "b")
    assert latest_run() == Path("runs/a/one")
    out = cli.done("show", "latest")
    assert out.startswith("runs/a/one: complete")
    out = cli.done("verify", "latest")
    assert f"{len(list(runs.glob('a/one/records/*/*')))} table files" in out
    assert cli("diff", "latest", runs / "a" / "one")[0] == 0
    assert cli("diff", "latest", runs / "two")[0] == 1
    os.utime(runs / "two" / MANIFEST)
    assert cli("diff", "latest", runs / "two")[0] == 0


RUN_COMMANDS = ("resume", "rerun", "fork", "verify", "show", "track", "report", "view", "audit")


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_every_command_that_takes_a_run_takes_the_latest(command: str, runs: Path) -> None:
    shutil.rmtree(runs / "a" / "b")
    found = vars(build_parser().parse_args([command, "latest"])).values()
    assert Path("runs/a/one") in [path for value in found for path in (value if isinstance(value, list) else [value])]


def test_the_first_of_several_processes_alone_looks_for_the_latest(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(runs / "a" / "b")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, found in (("0", Path("runs/a/one")), ("1", Path("latest"))):
        monkeypatch.setenv("RANK", rank)
        assert build_parser().parse_args(["resume", "latest"]).run == found
        monkeypatch.chdir(tmp_path)  # a folder without runs, as on another machine


def test_the_library_and_a_file_for_dpo_take_the_latest_run(runs: Path, tmp_path: Path) -> None:
    shutil.rmtree(runs / "a" / "b")
    assert ppo_repro.open_run("latest").path == Path("runs/a/one")
    (tmp_path / "configs").mkdir()
    for name in ("configs/dpo.yaml", "dpo.yaml"):
        Path(name).write_text((ROOT / "experiments" / "dpo.yaml").read_text())
        _, config = load_any(Path(name), ["run=latest"])
        assert isinstance(config, DPOConfig)
        assert config.run == str(runs / "a" / "one")
    (tmp_path / "latest").mkdir()
    _, config = load_any(Path("configs/dpo.yaml"), ["run=latest"])
    assert isinstance(config, DPOConfig)
    assert config.run == str(tmp_path / "latest")


@pytest.mark.parametrize(("wrong", "meant"), [("rnu", "run"), ("shwo", "show"), ("diif", "diff"), ("zzz", "")])
def test_a_command_that_is_mistyped(cli: Cli, wrong: str, meant: str) -> None:
    line = cli.refusal(wrong, TINY)
    assert f"argument COMMAND: '{wrong}' must be one of init, run, " in line
    assert (f"; did you mean {meant}?; try" if meant else "audit; try") in line


def test_the_page_has_every_command_in_one_row(cli: Cli) -> None:
    commands = re.findall(r"^    (\w+) ", cli.done("--help"), re.MULTILINE)
    assert len(commands) == 16
    page = (ROOT / "ppo_repro" / "README.md").read_text(encoding="utf-8").partition("## Commands")[2]
    rows = [set(re.findall(r"`ppo-repro (\w+)", row)) for row in page.split("\n\n")[1].splitlines()[2:]]
    assert sorted(name for row in rows for name in row) == sorted(commands)
    assert all(len(row) == 1 for row in rows)


def test_the_help_names_every_group_that_a_recorded_run_may_change(cli: Cli) -> None:
    resumed, repeated = (" ".join(cli.done(command, "--help").split()) for command in ("resume", "rerun"))
    assert "another field of layout, records or rollout.engine, such as" in repeated
    assert set(LanguageKind.changeable) == {"layout", "records", "rollout.engine"}
    assert "another field of layout, records, rollout.engine or checkpoints, such as" in resumed
    assert LanguageKind.resumed_alone == ("checkpoints",)


def test_rerun_refuses_fields_that_it_does_not_use(cli: Cli, deterministic_run: Path) -> None:
    said = cli.refusal("rerun", deterministic_run, "--set", "checkpoints.every=1")
    assert "may change fields of layout and rollout.engine and records only" in said


def test_fields_takes_several_sections(cli: Cli) -> None:
    sections = cli.json("fields", "reward", "layout", "reward.terms")["sections"]
    found = [section["path"] for section in sections]
    assert {path.partition(".")[0] for path in found} == {"reward", "layout"}
    assert found.index("layout") > found.index("reward.terms"), "in the order of the command line"
    files = [section["file"] for section in sections if section["path"] == "layout"]
    assert files == ["run", "control", "dpo"], "each once"
    assert "must be one of" in one_line(cli("fields", "reward", "valeu")[2])


def test_a_run_says_how_long_an_iteration_takes_and_what_is_left(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("run", TINY, "--out", tmp_path, "--set", "ppo.iterations=3")
    lines = [line for line in err.splitlines() if line.startswith("iteration ")]
    assert code == 0
    assert len(lines) == 3
    assert all(re.search(r"  [0-9.e-]+ s each, \d+ s left$", line) for line in lines[:2])
    assert re.search(r"  [0-9.e-]+ s each$", lines[2])
