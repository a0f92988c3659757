"""A run with functions of the user's: recorded, replayed, rerun, forked, put in a grid and reported as any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ppo_repro.records import manifest, reader
from tests.grids.small_grids import grid_file
from tests.support.cli import Cli, sets
from tests.support.language import fork, rerun, tiny_run
from tests.support.paths import TINY
from tests.support.ranks import cli_ranks
from tests.support.runs import recomputed, run_below

SMALLEST = ("model.warm_start_steps=4", "layout.update_micro_batch=2", "ppo.minibatch_size=5")
# as ppo.objectives.Clip, ppo.advantages.gae, ppo.kl.k1 and ppo.rewards.place_scores compute them
OWN = """
import torch
from helper import ClipFlag

def loss(batch, low, high=0.2):
    r, a = batch.ratios, batch.advantages
    above, below = r > torch.tensor(1.0 + high), r < torch.tensor(1.0 - low)
    flags = torch.zeros(r.shape, dtype=torch.uint8)
    flags[above & (a > 0)], flags[below & (a < 0)] = ClipFlag.CLIP_HIGH, ClipFlag.CLIP_LOW
    flags[above & (a < 0)], flags[below & (a > 0)] = ClipFlag.WRONG_HIGH, ClipFlag.WRONG_LOW
    cut = (flags == ClipFlag.CLIP_HIGH) | (flags == ClipFlag.CLIP_LOW)
    bounded = r.detach().clamp(torch.tensor(1.0 - low), torch.tensor(1.0 + high))
    return -(torch.where(cut, bounded, r) * a), flags

def gae(batch, decay):
    found, running = [], 0.0
    for t in reversed(range(len(batch.rewards))):
        is_last = bool(batch.positions[t] + 1 == batch.lengths[t])
        after, running = (torch.zeros(()), torch.zeros(())) if is_last else (batch.values[t + 1], running)
        running = (batch.rewards[t] + after * 1.0) - batch.values[t] + running * decay
        found.append(running)
    return torch.stack(found[::-1])

def k1(logprobs, ref_logprobs):
    return logprobs - ref_logprobs

def last(batch):
    return torch.where(batch.positions + 1 == batch.lengths, batch.of_tokens(batch.scores), 0.0)
"""


def own(folder: Path) -> tuple[str, ...]:
    """Overrides that put functions which equal the package's in place of them."""
    (folder / "own.py").write_text(OWN)
    (folder / "helper.py").write_text("from ppo_repro.ppo.objectives import ClipFlag\n")
    path = f"kind: function, path: {folder}/own.py"
    return (
        f"ppo.objective={{{path}:loss, parameters: {{low: 0.2}}}}",
        f"advantages={{{path}:gae, parameters: {{decay: 0.95}}, whiten: full}}",
        f"kl.estimator={{{path}:k1}}",
        f"reward.placement={{{path}:last}}",
    )


def recorded_in(out: Path, *overrides: str) -> Path:
    return tiny_run(out, *SMALLEST, *overrides)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    return recorded_in(folder, *own(folder))


def test_functions_that_equal_the_packages_give_its_fingerprint(recorded: Path, tmp_path: Path) -> None:
    built_in = recorded_in(tmp_path)
    assert manifest.load(recorded).fingerprint == manifest.load(built_in).fingerprint
    flags = reader.read_updates(recorded, columns=["clip_flag"])["clip_flag"].unique()
    assert len(flags) > 1, "some tokens are cut"
    other = recorded_in(tmp_path, *own(tmp_path), "ppo.objective.parameters.low=0.1")
    assert manifest.load(other).fingerprint != manifest.load(built_in).fingerprint, "the negative control"


def test_replay_rerun_and_fork_take_the_copy_in_the_run(recorded: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(recorded, tmp_path / "run"))
    for name in ("own.py", "helper.py"):
        (recorded.parents[1] / name).unlink()
    found = recomputed(run_dir)
    assert found.difference is None, found.lines()
    assert rerun(run_dir, ["layout.update_micro_batch=1", "layout.padding=left"]).difference is None
    forked = fork(run_dir, tmp_path, None, "ppo.iterations=3", "ppo.objective.parameters.high=0.3")
    assert recomputed(forked).difference is None
    assert (forked / "inputs" / "own.py").read_bytes() == (run_dir / "inputs" / "own.py").read_bytes()


def test_verify_of_the_files_alone_calls_no_function(cli: Cli, tmp_path: Path) -> None:
    fields, mark = own(tmp_path), tmp_path / "called"
    (tmp_path / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n{OWN}")
    run_dir = recorded_in(tmp_path, *fields)
    for arguments, is_called in ((["--files"], False), ([], True)):
        mark.unlink(missing_ok=True)
        cli.done("verify", run_dir, *arguments)
        assert mark.exists() is is_called


def refused(cli: Cli, folder: Path, text: str, *more: str) -> tuple[str, Path]:
    """The error line of a run with this file as objective, behind the field and the file; and the folder of runs."""
    (folder / "own.py").write_text(text)
    objective = f"{{kind: function, path: {folder}/own.py:loss}}"
    said = cli.refusal("run", TINY, *sets(*SMALLEST, f"ppo.objective={objective}"), *more, "--out", folder / "runs")
    line = said.removeprefix("error: ").removeprefix("ppo.objective.path: ")
    return line.removeprefix(f"{folder}/own.py"), folder / "runs"


def test_what_the_trial_refuses_leaves_no_run(cli: Cli, tmp_path: Path) -> None:
    found, runs = refused(cli, tmp_path, "def loss(b): return -b.ratios / len(b.ratios)")
    assert found.startswith(":1: loss depends on the layout. micro batch 1: l")
    assert not list(runs.rglob("manifest.json"))


LATE = """
calls = []

def loss(batch):
    calls.append(0)
    if len(batch.advantages) and len(calls) > {limit}:
        {late}
    return -batch.ratios * batch.advantages

from torch.autograd import Function
class Fails(Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad): raise ValueError("backward")
"""


@pytest.mark.parametrize(
    ("late", "line"),
    [
        ("raise ValueError('late')", ":7: loss raised ValueError: late"),
        ("return batch.ratios * float('nan')", ":4: loss returned nan at response "),
        pytest.param("return batch.ratios[:-1]", ":4: loss returned a tensor [", marks=pytest.mark.slow),
        ("batch.ratios.sum().backward()", ":4: loss calls backward() itself; let it return the loss alone"),
        ("return Fails.apply(batch.ratios)", ":15: raised ValueError: backward"),
    ],
)
def test_what_goes_wrong_later_keeps_the_complete_iterations(cli: Cli, tmp_path: Path, late: str, line: str) -> None:
    """--unchecked counts no call before the first update: an iteration has 2 epochs of 3 minibatches of 3 parts."""
    found, runs = refused(cli, tmp_path, LATE.format(limit=20, late=late), "--unchecked")
    assert found.startswith(line)
    run_dir = run_below(runs)
    left = manifest.load(run_dir)
    assert (left.status, left.num_iterations) == ("failed", 1)
    assert "checked: false" in (run_dir / "config.yaml").read_text()


def test_a_late_call_that_changes_the_current_folder_keeps_the_complete_iterations(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder named relative to the current one."""
    monkeypatch.chdir(tmp_path)
    text = "import os\n" + LATE.format(limit=20, late="os.chdir('/')")
    found, _ = refused(cli, tmp_path, text, "--unchecked", "--out", "runs")
    assert found.startswith(":5: loss or its file changes the current folder (os.chdir), "), found
    assert "; let it leave that: it moves the relative paths of the run; take absolute paths instead; " in found
    left = manifest.load(run_below(tmp_path / "runs"))
    assert (left.status, left.num_iterations) == ("failed", 1)


SPOILS = """
import torch

def spoils(given, *results):
    for memory in torch.kept:
        memory.detach().numpy()[...] = 3
    tensors = [x for g in given for x in ([g] if isinstance(g, torch.Tensor) else vars(g).values()) if x is not None]
    torch.kept[:] = [*tensors, *results]
    return results if len(results) > 1 else results[0]

def loss(batch):
    cut = torch.where(batch.ratios > 1.1, 1, 0).to(torch.uint8)
    return spoils([batch], -batch.ratios * batch.advantages + batch.entropies * 0.01, cut)

def advantages(batch): return spoils([batch], batch.rewards - batch.values)
def k1(logprobs, ref_logprobs): return spoils([logprobs, ref_logprobs], logprobs - ref_logprobs)
def last(batch):
    return spoils([batch], torch.where(batch.positions + 1 == batch.lengths, batch.of_tokens(batch.scores), 0.0))
"""


@pytest.mark.parametrize("kl", ["loss", pytest.param("reward", marks=pytest.mark.slow)])
def test_what_a_function_writes_into_old_batches_and_results_reaches_no_record(
    tmp_path: Path, kl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NumPy, which torch does not see, from all functions into what any of them got or returned before."""
    monkeypatch.setattr(torch, "kept", [], raising=False)

    def run(text: str) -> manifest.Manifest:
        (tmp_path / "own.py").write_text(text)
        path = f"kind: function, checked: false, path: {tmp_path}/own.py"
        fields = {"ppo.objective": "loss", "advantages": "advantages", "reward.placement": "last", "kl.estimator": "k1"}
        own = (f"{field}={{{path}:{name}}}" for field, name in fields.items())
        return manifest.load(recorded_in(tmp_path / str(len(text)), *own, f"kl.placement={kl}", "ppo.iterations=1"))

    assert run(SPOILS).fingerprint == run(SPOILS.replace("detach()", "detach().clone()")).fingerprint


def test_rerun_finds_a_function_that_depends_on_more_than_its_batch(cli: Cli, tmp_path: Path) -> None:
    """After as many calls as the trial makes, which a run has behind it and every process alike."""
    (tmp_path / "own.py").write_text(
        "import os, time\n\ndef loss(batch):\n    return -batch.ratios * batch.advantages * (1 + time.time_ns() % 97)\n"
    )
    objective = f"ppo.objective={{kind: function, path: {tmp_path}/own.py:loss, checked: false}}"
    run_dir = recorded_in(tmp_path, objective)
    cli("report", run_dir, "--out", tmp_path / "page.html")
    assert (
        "own.py:loss, the objective of this run, does not say which tokens it cut."
        in (tmp_path / "page.html").read_text()
    )
    code, out, err = cli("rerun", run_dir)
    assert code == 1
    assert "table updates, iteration 0, column" in out + err


def test_what_it_prints_goes_to_stderr(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("print('file')\ndef loss(batch):\n    print('call'); return -batch.ratios\n")
    objective = f"ppo.objective={{kind: function, path: {tmp_path}/own.py:loss}}"
    _, out, err = cli("run", TINY, "--json", "--set", objective, "--set", SMALLEST[0], "--out", tmp_path)
    assert json.loads(out)
    assert "file" in err
    assert "call" in err


def test_a_run_says_once_which_way_the_steps_moved_log_probs(cli: Cli, tmp_path: Path) -> None:
    for sign, ends in (
        ("-", "(mean over tokens)\n"),
        ("", "(mean over tokens); does the loss, or the advantage, have the"),
    ):
        (tmp_path / "own.py").write_text(f"def f(batch):\n    return {sign}batch.ratios * batch.advantages\n")
        objective = f"ppo.objective={{kind: function, path: {tmp_path}/own.py:f}}", "ppo.learning_rate=0.01"
        code, _, said = cli("run", TINY, "--out", tmp_path / f"runs{sign}", *sets(*SMALLEST, *objective))
        assert code == 0
        moved = "iteration 0: the steps moved log-probs by "
        assert said.count(moved) == 1
        assert ends in said[said.index(moved) :], said


def test_a_wrong_path_or_parameter_is_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def loss(batch): return batch.ratios")
    for value, expected in (
        ("path: own.txt:loss", "must be FILE.py:NAME, with the name of a function or class in the file"),
        (f"path: {tmp_path}/own.py:loss, parameters: {{low: 0.1}}", "got an unexpected keyword argument 'low'"),
    ):
        said = cli.refusal("run", TINY, "--set", f"ppo.objective={{kind: function, {value}}}", "--out", tmp_path)
        assert expected in said


@pytest.mark.slow
def test_two_processes_give_the_fingerprint_of_one(recorded: Path, tmp_path: Path) -> None:
    for ended in cli_ranks(2, "run", TINY, *sets(*SMALLEST, *own(tmp_path)), "--out", tmp_path / "runs"):
        assert ended.code == 0, ended.err
    run_dir = run_below(tmp_path / "runs")
    assert manifest.load(run_dir).fingerprint == manifest.load(recorded).fingerprint


def test_verify_calls_a_function_with_the_micro_batches_of_the_run(tmp_path: Path) -> None:
    """In native numerics a loss may depend on the number of tokens in a call, as torch's rounding does."""
    (tmp_path / "own.py").write_text("def loss(b): return -b.ratios * b.advantages * (1.0 + len(b.ratios) * 1e-3)")
    objective = f"ppo.objective={{kind: function, path: {tmp_path}/own.py:loss, checked: false}}"
    batches = ("rollout.prompts_per_iteration=12", "ppo.minibatch_size=36", "layout.update_micro_batch=7")
    fields = sets("numerics.mode=native", "model.warm_start_steps=4", objective, *batches)
    for ended in cli_ranks(2, "run", TINY, *fields, "--out", tmp_path / "runs"):
        assert ended.code == 0, ended.err
    verified = recomputed(run_below(tmp_path / "runs"))
    assert verified.difference is None, verified.lines()


@pytest.mark.slow
def test_a_grid_of_three_functions_has_its_page(cli: Cli, tmp_path: Path) -> None:
    text = "def {0}(batch, scale=1.0):\n    return -batch.ratios * batch.advantages * scale * {1}\n"
    (tmp_path / "own.py").write_text("\n".join(text.format(name, n) for n, name in enumerate("abc", 1)))
    own = {name: {"ppo.objective": {"kind": "function", "path": f"own.py:{name}"}} for name in "abc"}
    file = grid_file(tmp_path, {"objective": own}, [1], **{"model.warm_start_steps": 4})
    cli.done("grid", file, "--out", tmp_path / "runs")
    cli.done("report", tmp_path / "runs" / "g")
    page = (tmp_path / "runs" / "g" / "report.html").read_text()
    assert all(f"objective={name}" in page or f">{name}<" in page for name in "abc")
