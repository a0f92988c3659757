"""The memory plan of several processes: what each of them needs, what it sends, and how long a step takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from experiments.benchmarks import peak
from ppo_repro.config.files import load_config
from ppo_repro.runs.plan import FLOAT, PHASES, PROCESS, plan_run
from tests.support.cli import Cli, sets
from tests.support.paths import SMALL
from tests.support.ranks import end, start_ranks
from tests.support.runs import small_config

FILES = 200_000_000  # of PROCESS: mapped files
TRAINS_ALL = ("value={kind: separate, learning_rate: 1e-5}", "advantages={kind: gae}", "kl={placement: loss}")


def test_processes_divide_moments_and_send_a_share_of_the_weights_twice(cli: Cli) -> None:
    alone, config = plan_run(small_config()), small_config()
    trained = sum(model.trained for model in alone.models)
    collected = sum(model.collected for model in alone.models)
    assert alone.sent == 0
    for processes in (2, 4, 8):
        plan = plan_run(config, processes)
        assert plan.rows["moments"]["update"] == 8 * -(-trained // processes)
        assert plan.rows["all moments"] == {"saving": alone.rows["moments"]["update"]}
        assert plan.sent == FLOAT * (collected + trained) * (processes - 1) // processes
    assert cli.json("plan", SMALL, "--processes", "8")["sent"] == plan.sent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("processes", "vocabulary"), [(1, 16384), (2, 16384), (4, 4096)])  # 10 GB together
def test_each_process_needs_what_was_planned(
    processes: int, vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # glibc keeps no freed blocks
    peak.make_folder(tmp_path / "model", layers=4, vocab_size=vocabulary, hidden=896)
    changed = (*TRAINS_ALL, *peak.SHORT, "ppo.minibatch_size=4", "rollout.prompts_per_iteration=8")
    changed = (*changed, "layout.update_micro_batch=1", f"model.path={tmp_path}/model")
    command = ["-m", "ppo_repro", "run", str(peak.CONFIG), "--out", str(tmp_path / "runs"), *sets(*changed)]
    ranks = start_ranks(*[command] * processes)
    most = [0] * processes
    while any(rank.poll() is None for rank in ranks):
        for number, rank in enumerate(ranks):
            if rank.poll() is None:  # one that `poll` saw the end of has no entry in /proc
                most[number] = max(most[number], peak.anonymous_bytes(rank.pid))
        time.sleep(peak.INTERVAL)
    assert [ended.code for ended in end(ranks)] == [0] * processes
    plan = plan_run(load_config(peak.CONFIG, changed), processes)
    others = PROCESS + max(plan.total(phase) for phase in PHASES)  # they save nothing
    assert most[0] == pytest.approx(plan.peak - FILES, rel=0.1)
    assert most[1:] == [pytest.approx(others - FILES, rel=0.1)] * (processes - 1)
