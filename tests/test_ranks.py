"""Several processes on one run: one fingerprint, whoever does what; one error, whoever meets it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.config.files import load_config
from ppo_repro.errors import UserError
from ppo_repro.numerics.optim import optimizer
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.records import manifest
from ppo_repro.shares import check_shares, share_ranges
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY
from tests.support.processes.ranks_worker import FIRST, QUICK, RUNS, note_tokens
from tests.support.ranks import cli_ranks, end, start_ranks

pytestmark = pytest.mark.timeout(600)  # of a machine that others use too

shares = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


def test_shares_by_hand() -> None:
    assert share_ranges(5, [1, 1]) == [range(0, 2), range(2, 5)]
    assert share_ranges(5, [3, 1]) == [range(0, 3), range(3, 5)]
    assert share_ranges(6, [1, 0, 2]) == [range(0, 2), range(2, 2), range(2, 6)]
    assert share_ranges(1, [1, 1, 1]) == [range(0, 0), range(0, 0), range(0, 1)]
    assert share_ranges(0, [2, 1]) == [range(0, 0), range(0, 0)]


@given(st.integers(0, 300), shares)
def test_shares_are_complete_disjoint_in_order_and_proportional(count: int, proportions: list[int]) -> None:
    ranges = share_ranges(count, proportions)
    assert len(ranges) == len(proportions)
    assert [i for r in ranges for i in r] == list(range(count))
    for found, share in zip(ranges, proportions, strict=True):
        assert abs(len(found) * sum(proportions) - count * share) < sum(proportions), "off by less than one sequence"
        assert share or not found


@given(st.integers(0, 50), st.integers(1, 6))
def test_no_shares_are_equal_shares(count: int, size: int) -> None:
    parts = [Ranks(rank, size).mine(count, ()) for rank in range(size)]
    assert parts == share_ranges(count, [1] * size)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_as_many_shares_as_processes() -> None:
    check_shares((), 3)
    check_shares((1, 0, 2), 3)
    with pytest.raises(UserError, match=r"^layout.rank_shares = \[1, 2\]: must have one entry for each of the 3 "):
        check_shares((1, 2), 3)
    with pytest.raises(UserError, match=r"layout.rank_shares = .*at least one must be greater than 0"):
        load_config(TINY, ["layout.rank_shares=[0,0]"])


def test_a_world_of_one_exchanges_nothing() -> None:
    tensor = torch.tensor([1.5])
    ALONE.check()
    ALONE.add_up([tensor])
    ALONE.require_same("thing", tensor)
    assert tensor.tolist() == [1.5] and ALONE.first(max, 2, 3) == 3 and ALONE.gather([1, 2]) == [1, 2]
    assert ALONE.mine(7, ()) == range(7) and ALONE.is_first


@dataclass(frozen=True)
class Together:
    """What two processes found, and what one alone finds."""

    found: list[dict[str, Any]]  # by rank
    folder: Path
    alone: str  # fingerprint
    chain: list[str]  # link of each iteration of the one alone
    tokens: list[int]  # of each optimizer step of the one alone


def _together(folder: Path, *arguments: str) -> Together:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizer, "assert_no_wrap", optimizer.assert_no_wrap)  # put back afterwards
        noted = note_tokens()
        run_dir, _ = run(load_config(TINY, QUICK), folder / "made", Silent())
    shutil.copytree(run_dir, folder / "alone")
    (folder / "two").mkdir()
    command = ["-m", "tests.support.processes.ranks_worker", str(folder / "two"), *arguments]
    ended = end(start_ranks(command, command))
    assert [e.code for e in ended] == [0, 0], ended
    found = [json.loads((folder / "two" / f"{rank}.json").read_text()) for rank in range(2)]
    whole = manifest.load(run_dir)
    return Together(found, folder, whole.fingerprint, [entry.chain for entry in whole.iterations], noted)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    """Two processes on all the runs of the worker: for slow tests."""
    return _together(tmp_path_factory.mktemp("ranks"), "whole")


def test_two_processes_exchange_and_record_what_one_does(tmp_path: Path) -> None:
    short = _together(tmp_path)
    exchanged = [found["exchanges"]["first"] for found in short.found]
    assert exchanged == ["rank 0"] * 2
    assert [found[f"chain of {FIRST}"] for found in short.found] == [short.chain[:1]] * 2


@pytest.mark.slow
def test_every_rank_sees_the_same_whole(together: Together) -> None:
    expected = {
        "gather": [[1, [0, 1, 2]]],
        "long": [12288, 24576],
        "sums": [[2**63 - 1, -11], [[1.5] * 3] * 2, [], 14],
        "first": "rank 0",
    }
    for found in together.found:
        assert found["exchanges"] == expected
        assert found["exchanges in small buckets"] == expected


@pytest.mark.slow
def test_what_is_not_the_same_is_refused_on_every_rank(together: Together) -> None:
    for found in together.found:
        assert found["same"] == "nothing"
        assert found["not same"] == "PromiseBroken: thing: rank 1 has 2, rank 0 has 0"
        assert found["out of step"] == "PromiseBroken: rank 1 is at 'gather', rank 0 at 'check'"
        assert found["other shapes"].startswith("PromiseBroken: shapes of the tensors to sum: rank 1 has ")


@pytest.mark.slow
def test_two_processes_leave_the_fingerprint_of_one(together: Together) -> None:
    assert [found["equal"] for found in together.found] == [together.alone] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three to one", "all on the second"])
def test_two_processes_with_unequal_shares_record_what_one_does(together: Together, name: str) -> None:
    assert [found[f"chain of {name}"] for found in together.found] == [together.chain[:1]] * 2


@pytest.mark.slow
def test_the_overflow_bound_is_asked_about_the_tokens_of_all_ranks(together: Together) -> None:
    assert len(set(together.tokens)) > 3
    assert [found["tokens"] for found in together.found] == [together.tokens] * 2


@pytest.mark.slow
def test_minibatches_smaller_than_the_number_of_processes(together: Together, tmp_path: Path) -> None:
    name = "one sequence a minibatch"
    run_dir, _ = run(load_config(TINY, RUNS[name]), tmp_path, Silent())
    assert together.found[0][name] == manifest.load(run_dir).fingerprint


@pytest.mark.slow
@pytest.mark.usefixtures("row_noise")
def test_two_native_processes_leave_another_fingerprint(together: Together, tmp_path: Path) -> None:
    run_dir, _ = run(load_config(TINY, RUNS["native"]), tmp_path, Silent())
    assert together.found[0]["native"] != manifest.load(run_dir).fingerprint


@pytest.mark.slow
def test_two_processes_rerun_what_one_recorded(together: Together) -> None:
    for found in together.found:
        assert found["rerun"] == [True, together.alone]


@pytest.mark.slow
def test_gradients_that_are_not_added_up_are_noticed(together: Together) -> None:
    for found in together.found:
        assert found["broken"].startswith("PromiseBroken: weights after an update: rank 1 has ")
    assert not list((together.folder / "two" / "broken").rglob("manifest.json"))


@pytest.mark.slow
def test_only_the_first_rank_records(together: Together) -> None:
    run_dir = next((together.folder / "two" / "equal").rglob("manifest.json")).parent
    assert manifest.load(run_dir).status == "complete"
    assert json.loads((run_dir / "environment.json").read_text())["processes"] == 2
    assert (run_dir / "accuracy.json").is_file()


@pytest.mark.slow
def test_a_mistake_is_said_once_and_ends_every_rank(tmp_path: Path) -> None:
    ended = cli_ranks(2, "run", TINY, "--out", tmp_path, "--set", "ppo.epochs=two")
    assert [e.code for e in ended] == [2, 2]
    assert len(ended[0].errors) == 1
    assert ended[0].errors[0].startswith(f"error: {TINY}: ppo.epochs = 'two': input should be a valid integer")
    assert (ended[0].out, ended[1].out, ended[1].err) == ("", "", "")
