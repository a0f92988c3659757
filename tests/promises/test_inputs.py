"""A run folder can be rerun without the original prompt and reward files; an edited input is another run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_repro.base.files import MANIFEST
from ppo_repro.records import manifest, reader
from tests.support.cli import PROMPTS, Cli, folder_config, write_prompts

REWARD = "def shorter(prompt, response, answer):\n    return -float(len(response))\n"


@pytest.fixture
def project(tmp_path: Path, deterministic_run: Path) -> Path:
    """A folder with everything that a run needs, the model too; its configuration has relative paths."""
    folder = tmp_path / "project"
    shutil.copytree(deterministic_run / "checkpoints" / "final", folder / "models" / "policy")
    (folder / "reward.py").write_text(REWARD)
    write_prompts(folder / "prompts.jsonl", *PROMPTS)
    folder_config(folder / "run.yaml", Path("models/policy"), Path("prompts.jsonl"), "reward.py:shorter")
    return folder


def ran(cli: Cli, project: Path) -> Path:
    return Path(cli.json("run", project / "run.yaml", "--out", project / "runs")["run_dir"])


def test_a_run_folder_reruns_at_another_path_without_its_originals(
    cli: Cli, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = ran(cli, project)
    moved = Path(shutil.move(project, tmp_path / "elsewhere" / "moved"))
    run_dir = moved / run_dir.relative_to(project)
    for name in ("reward.py", "prompts.jsonl", "run.yaml"):
        (moved / name).unlink()
    assert cli("rerun", run_dir)[0] == 0, "the model lies beside the run as it did"
    model = shutil.move(moved / "models" / "policy", tmp_path / "somewhere" / "else")
    said = cli.refusal("rerun", run_dir)
    assert "model.path = " in said
    assert "say with --inputs DIR where it is" in said
    cli.done("rerun", run_dir, "--inputs", tmp_path / "somewhere")
    # the control: files of these names with other bytes are not the inputs
    weights = Path(model) / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "nor is it below" in cli.refusal("rerun", run_dir, "--inputs", tmp_path / "somewhere")


def test_an_edited_input_is_another_run_and_an_unchanged_one_is_not(cli: Cli, project: Path) -> None:
    run_dir = ran(cli, project)
    sequences = reader.read_sequences(run_dir)
    assert (sequences["scores"] == -sequences["response"].str.len()).all()
    assert (run_dir / "inputs" / "reward.py").read_text() == REWARD
    assert manifest.load(run_dir).files.keys() > {"inputs/reward.py", "inputs/prompts.jsonl"}
    before = (run_dir / MANIFEST).read_bytes()
    said = cli.refusal("run", project / "run.yaml", "--out", project / "runs")
    assert "exists already, with this configuration and these inputs" in said
    assert (run_dir / MANIFEST).read_bytes() == before
    (project / "reward.py").write_text(REWARD.replace("float", "2.0 * float"))
    other = ran(cli, project)
    assert other.parent == run_dir.parent
    assert other != run_dir
    code, out, _ = cli("diff", run_dir, other)
    changed, first = out.splitlines()[1:]
    assert code == 1
    assert changed.startswith("  inputs/reward.py: ")
    assert first.startswith("different: table ")
    assert cli("rerun", run_dir)[0] == 0, "a rerun uses the copy"
    (project / "reward.py").write_text(REWARD)
    assert f"{run_dir}: exists already" in cli.refusal("run", project / "run.yaml", "--out", project / "runs")


def test_an_edited_copy_is_refused(cli: Cli, project: Path) -> None:
    run_dir = ran(cli, project)
    (run_dir / "inputs" / "reward.py").write_text(REWARD.replace("float", "2.0 * float"))
    for command in ("rerun", "verify", "fork"):
        assert "inputs/reward.py: has another SHA-256" in cli.refusal(command, run_dir)


def test_two_files_of_one_name_are_both_kept(cli: Cli, project: Path) -> None:
    (project / "more").mkdir()
    (project / "more" / "reward.py").write_text(REWARD.replace("shorter", "longer").replace("-float", "float"))
    text = (project / "run.yaml").read_text()
    term = '{kind: function, path: "reward.py:shorter"}'
    (project / "run.yaml").write_text(text.replace(term, f'{term}, {{kind: function, path: "more/reward.py:longer"}}'))
    run_dir = ran(cli, project)
    copies = {path.relative_to(run_dir / "inputs").as_posix() for path in (run_dir / "inputs").rglob("*.*")}
    assert copies == {"prompts.jsonl", "2/reward.py", "reward.py"}
    assert cli("rerun", run_dir)[0] == 0


HELPED = """
from helper import factor
def shorter(prompt, response, answer):
    from pack.late import sign
    return sign * factor * float(len(response))
"""


def with_modules(project: Path) -> None:
    (project / "reward.py").write_text(HELPED)
    (project / "helper.py").write_text("from deeper import factor\n")
    (project / "deeper.py").write_text("factor = 2.0\n")
    (project / "pack").mkdir()
    (project / "pack" / "__init__.py").write_text("")
    (project / "pack" / "late.py").write_text("sign = -1.0\n")


def started(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """A command of its own in a folder, in an environment in which the package is installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_modules_beside_a_reward_are_found_however_a_run_is_started_and_copied(project: Path, tmp_path: Path) -> None:
    """By the module and by the program, in the folder of the reward and elsewhere; and in a rerun without the files."""
    with_modules(project)
    module, program = (sys.executable, "-m", "ppo_repro"), (Path(sys.executable).with_name("ppo-repro"),)
    fingerprints = set()
    for number, (folder, start) in enumerate(((project, module), (tmp_path, program))):
        out = tmp_path / f"runs{number}"
        done = started(folder, *start, "run", project / "run.yaml", "--out", out, "--json")
        assert done.returncode == 0, done.stderr
        fingerprints.add(json.loads(done.stdout)["fingerprint"])
    assert len(fingerprints) == 1
    run_dir = Path(json.loads(done.stdout)["run_dir"])
    names = {"prompts.jsonl", "reward.py", "helper.py", "deeper.py", "pack/__init__.py", "pack/late.py"}
    assert {name.removeprefix("inputs/") for name in manifest.load(run_dir).inputs if "/" in name} >= names
    for name in ("helper.py", "deeper.py", "reward.py"):
        (project / name).unlink()
    assert started(tmp_path, *program, "rerun", run_dir).returncode == 0
    (run_dir / "inputs" / "deeper.py").write_text("factor = 3.0\n")
    done = started(tmp_path, *program, "rerun", run_dir)
    assert done.returncode == 2
    assert "inputs/deeper.py: has another SHA-256" in done.stderr


def test_modules_beside_a_reward_are_copied_and_an_edited_one_is_another_run(cli: Cli, project: Path) -> None:
    with_modules(project)
    run_dir = ran(cli, project)
    copies = {path.relative_to(run_dir / "inputs").as_posix() for path in (run_dir / "inputs").rglob("*.*")}
    own = {"reward.py", "helper.py", "deeper.py", "pack/__init__.py", "pack/late.py"}
    assert copies == {*own, "prompts.jsonl"}
    assert own <= {n.removeprefix("inputs/") for n in manifest.load(run_dir).inputs}
    (project / "deeper.py").write_text("factor = 3.0\n")
    assert ran(cli, project) != run_dir


@pytest.mark.slow
def test_a_module_of_the_current_folder_is_not_found_by_chance(project: Path, tmp_path: Path) -> None:
    """`python -m` would find it there, and no rerun elsewhere would."""
    with_modules(project)
    (tmp_path / "here").mkdir()
    (project / "deeper.py").rename(tmp_path / "here" / "deeper.py")
    done = started(tmp_path / "here", sys.executable, "-m", "ppo_repro", "run", project / "run.yaml")
    assert done.returncode == 2
    assert "ModuleNotFoundError: No module named 'deeper'" in done.stderr
