"""Any number of processes gives one fingerprint, and a process that fails or is killed ends the run."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.base.errors import RankLost, UserError
from ppo_repro.base.peers import KILLED, NO_LAUNCHER
from ppo_repro.base.ranks import Ranks
from ppo_repro.config.files import load_config
from ppo_repro.numerics.sequences import slots_of, slots_of_rank
from ppo_repro.records import manifest, reader
from tests.support.cli import Cli, sets
from tests.support.forked import forked
from tests.support.language import fork, run, tiny_run
from tests.support.paths import ROOT, SMALL, TINY
from tests.support.ranks import Ended, cli_ranks, end, fingerprint_of, free_port, start_ranks, torchrun
from tests.support.resume import require_as_uninterrupted
from tests.support.runs import recorded_iterations, run_below
from tests.support.variants import ABLE
from tests.support.waiting import require_ended, until

slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(600)
HOST = socket.gethostname()
QUICK = ("model.warm_start_steps=4",)  # each process computes all of the warm start


@given(st.integers(0, 300), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 16]))
def test_ranks_divide_sequences_in_order_and_have_whole_slots(count: int, size: int, slots: int) -> None:
    ranks, each, found = [Ranks(rank, size) for rank in range(size)], slots // size, []
    assert [i for rank in ranks for i in rank.mine(count)] == list(range(count))
    assert max(len(r.mine(count)) for r in ranks) - min(len(r.mine(count)) for r in ranks) <= 1
    for rank in ranks:
        *own, last = slots_of_rank(count, slots, rank).tolist()
        assert len(own) == len(rank.mine(count))
        assert last == each
        assert all(0 <= slot < each for slot in own)
        found += [slot + rank.rank * each for slot in own]
    assert found == slots_of(range(count), count, slots).tolist()[:-1]


@pytest.fixture(scope="session")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("tiny"), *QUICK)


def test_two_processes_do_not_change_the_fingerprint(quick_run: Path, tmp_path: Path) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ("run", TINY, "--out", tmp_path / "runs", *sets(*QUICK))
    ranks = [forked(tmp_path / f"log{rank}", *command, RANK=str(rank), **shared) for rank in range(2)]
    for rank, process in enumerate(ranks):
        process.join()
        assert process.exitcode == 0, (tmp_path / f"log{rank}").read_text()
    assert (tmp_path / "log1").read_text() == "", "the first process alone speaks"
    assert manifest.load(run_below(tmp_path)).fingerprint == manifest.load(quick_run).fingerprint


@slow
def test_processes_with_other_instruction_sets_have_one_fingerprint(quick_run: Path, tmp_path: Path) -> None:
    """As on machines with other processors. The control is a rank with other bits, below."""
    able = [variant.name for variant in ABLE]
    if len(able) < 2:
        pytest.skip("this CPU runs one variant of the kernels")
    shared = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ("run", TINY, "--out", tmp_path / "runs", *sets(*QUICK))
    ranks = [
        forked(tmp_path / f"log{rank}", *command, RANK=str(rank), PPO_REPRO_KERNELS=able[rank % len(able)], **shared)
        for rank in range(4)
    ]
    for rank, process in enumerate(ranks):
        process.join()
        assert process.exitcode == 0, (tmp_path / f"log{rank}").read_text()
    assert manifest.load(run_below(tmp_path)).fingerprint == manifest.load(quick_run).fingerprint


@slow
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_no_number_of_processes_changes_the_fingerprint(quick_run: Path, tmp_path: Path, processes: int) -> None:
    assert fingerprint_of(processes, TINY, tmp_path, *QUICK) == manifest.load(quick_run).fingerprint


@slow
@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        (SMALL, ("rollout.top_k=4", "rollout.top_p=0.9", "ppo.iterations=2")),
        (TINY, (*QUICK, "ppo.iterations=1", "ppo.minibatch_size=1")),  # a process without a sequence
        (TINY, (*QUICK, "mismatch.sampler.lag=1", "ppo.iterations=3")),
    ],
    ids=["cut distributions", "one sequence a minibatch", "lag"],
)
def test_two_processes_do_what_one_does(config: Path, overrides: tuple[str, ...], tmp_path: Path) -> None:
    alone, _ = run(load_config(config, overrides), tmp_path / "alone")
    layout = ("layout.padding=left", "layout.rollout_slots=5")
    assert fingerprint_of(2, config, tmp_path / "two", *overrides, *layout) == manifest.load(alone).fingerprint


@slow
def test_two_processes_fork_as_one_does(quick_run: Path, tmp_path: Path) -> None:
    folder, changed = tmp_path / "two", "ppo.iterations=4"
    done = torchrun(2, "fork", quick_run, "--out", folder, "--json", "--set", changed, "--set", "kl.kl_coef=0.5")
    assert done.returncode == 0, done.stderr
    alone = fork(quick_run, tmp_path / "one", None, changed, "kl.kl_coef=0.5")
    assert json.loads(done.stdout)["fingerprint"] == manifest.load(alone).fingerprint
    assert torchrun(2, "rerun", next(folder.glob("*/*"))).returncode == 0


@slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("lora={rank: 4, alpha: 8}", "value={learning_rate: 1e-3, lora: {rank: 2, alpha: 2}}"),
        ("value={kind: head}",),
        ("advantages={kind: group}", "value={kind: none}", "kl={placement: none}", "rollout.samples_per_prompt=3"),
    ],
    ids=["adapters", "value head", "GRPO"],
)
def test_whatever_is_trained_is_divided(overrides: tuple[str, ...], tmp_path: Path) -> None:
    overrides = (*QUICK, "ppo.iterations=2", *overrides)
    alone, _ = run(load_config(TINY, overrides), tmp_path / "alone")
    for processes in (2, 4):
        found = fingerprint_of(processes, TINY, tmp_path / str(processes), *overrides)
        assert found == manifest.load(alone).fingerprint


@slow
def test_a_run_of_four_processes_goes_on_in_one_and_then_in_two(tmp_path: Path) -> None:
    options = (*QUICK, "ppo.iterations=6", "checkpoints.every=1")
    whole, _ = run(load_config(TINY, options), tmp_path / "whole")
    folder = tmp_path / "parts"
    command = ["-m", "ppo_repro", "run", str(TINY), "--out", str(folder), *sets(*options)]
    for processes in (4, 1):
        ranks, before = start_ranks(*[command] * processes), recorded_iterations(folder)
        until(lambda before=before: recorded_iterations(folder) > before, "an iteration", 300.0)  # type: ignore[misc]
        ranks[0].send_signal(signal.SIGKILL)
        end(ranks)
        command = ["-m", "ppo_repro", "resume", str(run_below(folder))]
    assert end(start_ranks(command, command))[0].code == 0
    require_as_uninterrupted(run_below(folder), whole)


@slow
@pytest.mark.usefixtures("row_noise")
def test_native_numerics_and_shares_that_are_not_exchanged_are_noticed(
    native_run: Path, quick_run: Path, tmp_path: Path
) -> None:
    """The negative controls."""
    quick = manifest.load(quick_run).fingerprint
    ended = cli_ranks(2, "rerun", native_run)  # recorded with other linear layers than these processes have
    assert [e.code for e in ended] == [1, 1]
    assert ended[0].out.startswith("different: table ")
    assert ended[1].out == ended[1].err == ""
    assert fingerprint_of(2, TINY, tmp_path / "own", *QUICK, module="tests.promises.without_sums") != quick
    arguments = ("run", TINY, "--out", tmp_path / "kept", "--set", QUICK[0])
    done = torchrun(2, *arguments, module="tests.promises.without_spreading")
    assert done.returncode == 1
    assert f"promise broken: weights after an update: rank 1 on {HOST} has " in done.stderr
    assert not list((tmp_path / "kept").rglob("iteration=000000.parquet"))


@slow
def test_a_mistake_is_said_once_with_the_number_of_its_rank(quick_run: Path, tmp_path: Path) -> None:
    done = torchrun(2, "run", TINY, "--out", tmp_path, "--set", "ppo.epochs=two")
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("exitcode  : 2") >= 1
    assert len([line for line in done.stderr.splitlines() if f"error: {TINY}: ppo.epochs = 'two'" in line]) == 1
    good = ["-m", "ppo_repro", "run", str(TINY), "--out", str(tmp_path)]
    ended = end(start_ranks(good, [*good, "--set", "seed=8"]))
    assert ended[0].code == 2
    assert ended[0].errors[0].startswith(f"error: command line: rank 1 on {HOST} has ['run', ")
    assert not list(tmp_path.rglob("manifest.json"))
    before = (quick_run / "manifest.json").read_bytes()
    ended = cli_ranks(2, "run", TINY, "--out", quick_run.parents[1], "--set", QUICK[0])
    assert [e.code for e in ended] == [2, RankLost.EXIT_CODE]
    assert "exists already" in ended[0].errors[0]
    assert ended[1].err == ""
    assert (quick_run / "manifest.json").read_bytes() == before


@slow
def test_unequal_bits_of_one_rank_end_every_rank(tmp_path: Path) -> None:
    command = ["run", str(TINY), "--out", str(tmp_path), "--set", QUICK[0]]
    ended = end(start_ranks(["-m", "ppo_repro", *command], ["-m", "tests.support.unequal", *command]))
    assert ended[0].code == 1, ended
    assert ended[1].code in (1, RankLost.EXIT_CODE), "it finds the same, or hears of it first"
    # 15 responses: the first one of the second rank
    assert ended[0].errors[0].startswith("promise broken: iteration 1, response 7, token 0: rollout_logprobs ")
    recorded = manifest.load(run_below(tmp_path))
    assert recorded.status == "failed"
    assert len(recorded.iterations) == 1


BREAKS = {
    "other version": (3, 2, "error: ppo_repro: rank 3 on {host} has 0, ", "environment.__version__ = '0'"),
    "a judge that fails": (
        3, 3, "stopped: rank 3 on {host}: no judge; ", "loop.score_rollout = lambda *a: fail(UserError('no judge'))"
    ),
    "a fault": (
        3, 3, "stopped: rank 3 on {host}: a fault; ", "loop.score_rollout = lambda *a: fail(ValueError('a fault'))"
    ),
    "full disk": (
        0, 2, "error: run.json: cannot be used (full)",
        "writer.RunWriter.append = lambda *a: fail(OSError(28, 'full', 'run.json'))",
    ),
}  # fmt: skip
BROKEN = """
from ppo_repro import loop
from ppo_repro.base.errors import UserError
from ppo_repro.commands import cli
from ppo_repro.records import writer
from ppo_repro.runs import environment

def fail(error):
    raise error

{change}
cli.main()
"""


@slow
@pytest.mark.parametrize("case", BREAKS)
def test_a_rank_that_differs_or_fails_is_named_and_ends_the_others(case: str, tmp_path: Path) -> None:
    broken, code, line, change = BREAKS[case]
    words = ["run", str(TINY), "--out", str(tmp_path), *sets(*QUICK)]
    ranks = [["-m", "ppo_repro", *words] for _ in range(4)]
    ranks[broken] = ["-c", BROKEN.format(change=change), *words]
    ended = end(start_ranks(*ranks))
    assert ended[0].code == code, ended
    assert ended[0].errors[0].startswith(line.format(host=HOST)), ended[0].errors
    assert all(rank.code for rank in ended)
    if case == "full disk":
        assert [rank.code for rank in ended[1:]] == [RankLost.EXIT_CODE] * 3


@slow
@pytest.mark.parametrize(
    ("late", "line"),
    [
        ("2", "error: rank 2: did not start within 5 s; start every machine"),
        ("0", "error: rank 1: rank 0 did not start within 5 s, or has ended; start every machine"),
    ],
)
def test_a_rank_that_never_joins_is_named(
    late: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATE", late)
    done = torchrun(4 if late == "2" else 2, "run", TINY, "--out", tmp_path, module="tests.support.late")
    assert done.returncode == 1
    assert done.stderr.splitlines().count(line) == 1, done.stderr
    assert "ppo_repro.base.errors" not in done.stderr, "torchrun's signal found the others waiting for the line"
    assert not list(tmp_path.iterdir())


@slow
def test_processes_end_when_their_torchrun_is_killed(tmp_path: Path) -> None:
    words = ["run", str(TINY), "--out", str(tmp_path), *sets(*QUICK, "ppo.iterations=2000")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ppo_repro"]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen([*command, *words], cwd=ROOT, stdout=log, stderr=log)
    until(lambda: recorded_iterations(tmp_path) > 1, "two iterations", 300.0)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    launcher.kill()
    launcher.wait()
    require_ended(*map(int, children))
    said = (tmp_path / "log").read_text()
    assert f"{HOST}: {NO_LAUNCHER}; " in said
    assert manifest.load(run_below(tmp_path)).status == "interrupted"


@slow
@pytest.mark.parametrize(("number", "how"), [(signal.SIGINT, "interrupted"), (signal.SIGKILL, KILLED)])
def test_a_process_that_ends_ends_the_run_and_complete_iterations_stay(number: int, how: str, tmp_path: Path) -> None:
    command = ["-m", "ppo_repro", "run", str(TINY), "--out", str(tmp_path), "--set", "ppo.iterations=2000"]
    processes = start_ranks(*[[*command, "--set", QUICK[0]]] * 2)
    until(lambda: recorded_iterations(tmp_path) > 1, "two iterations", 300.0)
    processes[1].send_signal(number)
    ended: list[Ended] = end(processes)
    assert ended[0].code == 3, ended
    assert len(ended[0].errors) == 1, ended
    assert ended[0].errors[0].startswith(f"stopped: rank 1 on {HOST}: {how}; ")
    run_dir = run_below(tmp_path)
    assert manifest.load(run_dir).status == "interrupted"
    with pytest.raises(UserError, match="the run is "):
        reader.read_tokens(run_dir)
    rows = reader.read_iterations(run_dir, allow_incomplete=True)
    assert rows["iteration"].tolist() == list(range(len(rows)))
    assert len(rows) >= 1


REFUSED = {
    ("2", "0", "show", "."): "only run, fork, rerun and resume work in several processes; start this without",
    ("3", "0", "run", str(TINY)): "torchrun --nproc-per-node: 3 processes were started; a run takes 1, 2, 4 or 8",
    ("two", "0", "run", str(TINY)): "RANK, WORLD_SIZE = 0, two: must be counts, as torchrun sets them",
    ("2", "2", "run", str(TINY)): "RANK, WORLD_SIZE = 2, 2: the first must be smaller, as torchrun sets them",
}


@pytest.mark.parametrize("case", REFUSED, ids=" ".join)
def test_what_cannot_run_in_several_processes_is_one_line(
    case: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    size, rank, *command = case
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    code, _, err = cli(*command)
    assert code == 2
    assert err.startswith(f"error: {REFUSED[case]}")
    assert len(err.splitlines()) == 1
