"""Several processes on one run: exchanges in one written order, and the fingerprint of one process."""

from __future__ import annotations

import json
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_repro.config.files import load_config
from ppo_repro.numerics.rows import slots_of, slots_of_rank
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.records import manifest
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY
from tests.support.processes.ranks_worker import QUICK, RUNS, summand
from tests.support.ranks import end, start_ranks

pytestmark = pytest.mark.timeout(600)  # of a machine that others use too


def bits(numbers: Tensor) -> list[int]:
    return numbers.view(torch.int32).tolist()


def found_by(size: int, what: str, folder: Path) -> list[dict[str, Any]]:
    """What each of several processes found, by rank."""
    folder.mkdir()
    command = ["-m", "tests.support.processes.ranks_worker", what, str(folder)]
    ended = end(start_ranks(*[command] * size), 500)
    assert [e.code for e in ended] == [0] * size, ended
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def test_shares_by_hand() -> None:
    assert [Ranks(rank, 2).mine(5) for rank in range(2)] == [range(0, 2), range(2, 5)]
    assert [Ranks(rank, 4).mine(2) for rank in range(4)] == [range(0), range(0, 1), range(1, 1), range(1, 2)]


@given(st.integers(0, 300), st.integers(1, 9))
def test_shares_are_complete_in_order_and_equal(count: int, size: int) -> None:
    shares = [Ranks(rank, size).mine(count) for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 300), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 16]))
def test_processes_hold_whole_slots(count: int, size: int, slots: int) -> None:
    each, found = slots // size, []
    for ranks in (Ranks(rank, size) for rank in range(size)):
        *own, last = slots_of_rank(count, slots, ranks).tolist()
        assert len(own) == len(ranks.mine(count)) and last == each and all(0 <= slot < each for slot in own)
        found += [slot + ranks.rank * each for slot in own]
    assert found == slots_of(range(count), count, slots).tolist()[:-1]


def test_one_process_exchanges_nothing() -> None:
    tensor = torch.tensor([1.5])
    ALONE.add_up([tensor])
    ALONE.exchange_sum(tensor)
    ALONE.require_same("thing", tensor)
    assert tensor.tolist() == [1.5] and ALONE.first(max, 2, 3) == 3 and ALONE.gather([1, 2]) == [1, 2]
    assert ALONE.mine(7) == range(7) and ALONE.is_first


@pytest.mark.slow
def test_four_processes_see_the_same_whole_and_add_in_the_order_of_a_tree(tmp_path: Path) -> None:
    found = found_by(4, "exchanges", tmp_path / "four")
    assert found == [found[0]] * 4
    mine, (zero, one, two, three) = found[0], map(summand, range(4))
    assert mine["gather"] == [[r, [10 * i, 10 * i + 1, 10 * i + 2]] for r in range(4) for i in range(r)]
    assert (mine["everyone"], mine["long"]) == ([0, 1, 2, 3], [10_000, 20_000, 30_000, 40_000])
    assert mine["integers"] == [[2**62 - 6, -26], []]
    assert mine["first"] == "rank 0" and mine["same"] == "nothing"
    assert mine["not same"] == "thing: rank 1 has 2, rank 0 has 0"
    assert mine["numbers"] == bits((zero + one) + (two + three))
    assert mine["numbers"] != bits(reduce(torch.add, (zero, one, two, three))), "any order would do"


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path, str]:
    """What two processes found of the runs of the worker, their folder, and the fingerprint of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    run_dir, _ = run(load_config(TINY, QUICK), folder / "made", Silent())
    shutil.copytree(run_dir, folder / "alone")
    return found_by(2, "runs", folder / "two"), folder / "two", manifest.load(run_dir).fingerprint


@pytest.mark.slow
def test_two_processes_record_and_rerun_what_one_does(together: tuple[list[dict[str, Any]], Path, str]) -> None:
    found, folder, alone = together
    assert [f["equal"] for f in found] == [alone] * 2
    assert [f["rerun"] for f in found] == [[True, alone]] * 2
    run_dir = next((folder / "equal").rglob("manifest.json")).parent
    assert json.loads((run_dir / "environment.json").read_text())["processes"] == 2
    assert (run_dir / "accuracy.json").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("row_noise")
@pytest.mark.parametrize(("name", "is_same"), [("one sequence a minibatch", True), ("native", False)])
def test_a_process_without_a_sequence_changes_nothing_and_native_numerics_differ(
    together: tuple[list[dict[str, Any]], Path, str], tmp_path: Path, name: str, is_same: bool
) -> None:
    run_dir, _ = run(load_config(TINY, RUNS[name]), tmp_path, Silent())
    assert (together[0][0][name] == manifest.load(run_dir).fingerprint) == is_same


@pytest.mark.slow
def test_gradients_that_are_not_added_up_are_noticed(together: tuple[list[dict[str, Any]], Path, str]) -> None:
    found, folder, _ = together
    for of_rank in found:
        assert of_rank["broken"].startswith("weights after an update: rank 1 has ")
    assert not list((folder / "broken").rglob("manifest.json"))
