"""What the benchmarks compute from times: intervals, and growth of memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmarks import grid_cells, learning


def test_the_interval_of_a_paired_difference_by_hand() -> None:
    centre, low, high = learning.interval([1.0, 2.0, 3.0])
    # t of 2 degrees of freedom at 97.5 % is 4.3027; the standard error is 1 / sqrt 3
    assert centre == 2.0
    assert (low, high) == (
        pytest.approx(2.0 - 4.3027 / 3**0.5, rel=1e-4),
        pytest.approx(2.0 + 4.3027 / 3**0.5, rel=1e-4),
    )


def test_the_synthetic_run_has_the_rows_and_the_mismatch_that_it_says(tmp_path: Path) -> None:
    from analysis.mismatch import tables as mismatch
    from experiments.benchmarks import analysis_scale

    analysis_scale.write_run(tmp_path / "run", 5_000)
    found = mismatch.summary(tmp_path / "run").set_index(["metric", "reduction"])["value"]
    assert found["n_tokens", "count"] == 5_000
    # 60 % are equal, and of the others those whose noise rounds away: within 4 binomial standard errors
    assert 0.6 - 4 * (0.24 / 5_000) ** 0.5 < found["frac_bitwise_equal", "token_mean"] < 0.65


def test_disagreements_are_named_and_the_disk_is_asked_first(tmp_path: Path) -> None:
    from experiments.benchmarks.analysis_scale import SHARED, Result, benchmark, disagreements, markdown
    from ppo_repro.errors import UserError

    same = dict.fromkeys(SHARED, 1.0)
    results = [Result("a", 10, 2.0, 1.0, 5.0, same), Result("b", 10, 4.0, 1.0, 5.0, same | {"k3": 1.1})]
    assert disagreements(results) == ["10 rows, k3: 1.0 by a, 1.1 by b"]
    assert "| 10 | a | 2.0 | 1.0 | 5 | 5 |" in markdown(results)
    with pytest.raises(UserError, match=r"MiB free, .* rows need"):
        benchmark(10**15, tmp_path, ["summary, pages"])
    assert list(tmp_path.iterdir()) == []


def _walk(rng: np.random.Generator, move: float) -> list[float]:
    """KiB of 300 iterations: a page more or less, each with probability `move`; nothing draws it anywhere."""
    return list(1e6 + 4.0 * np.cumsum(rng.choice([-1.0, 0.0, 1.0], 300, p=[move, 1 - 2 * move, move])))


def test_growth_by_hand() -> None:
    from experiments.benchmarks import memory

    levels = [0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0]  # ten increments, five of them 1
    values = [9.0, *[level for level in levels for _ in range(2)][1:]]  # blocks of 2; the first value is left out
    found = memory.growth(values, 2)
    # mean 0.5 by block, standard deviation sqrt(10/36); t of 9 degrees of freedom at 97.5 % is 2.2622
    half = 2.2622 * (10 / 36 / 10) ** 0.5 / 2
    assert found.per_iteration == 0.25
    assert (found.low, found.high) == (pytest.approx(0.25 - half, rel=1e-4), pytest.approx(0.25 + half, rel=1e-4))


@pytest.mark.parametrize("move", [0.005, 0.02, 0.3])
def test_a_random_walk_of_memory_is_no_growth_and_least_squares_would_say_so(move: float) -> None:
    from experiments.benchmarks import memory

    rng = np.random.default_rng(0)
    walks = [_walk(rng, move) for _ in range(400)]
    wrong = [s for walk in walks if not (s := memory.growth(walk, 100)).low <= 0.0 <= s.high]
    # 5 % are meant; 0.083 is 3 binomial standard errors above
    assert len(wrong) <= 0.083 * len(walks)
    squares = [s for walk in walks if not (s := memory.trend(walk[100:])).low <= 0.0 <= s.high]
    assert len(squares) > 0.4 * len(walks)


def test_growth_of_a_kibibyte_is_found_among_pages_that_come_and_go() -> None:
    from experiments.benchmarks import memory

    rng = np.random.default_rng(1)
    for _ in range(100):
        grown = 4.0 * np.floor(np.arange(300) / 4 + rng.uniform())  # resident memory comes in pages of 4 KiB
        found = memory.growth(list(np.asarray(_walk(rng, 0.02)) + grown), 100)
        assert found.verdict(memory.MATTERS_KIB) == "grows"


def test_one_large_step_is_neither_growth_nor_called_flat() -> None:
    from experiments.benchmarks import memory

    step = memory.growth([0.0] * 250 + [3700.0] * 50, 100)
    assert step.verdict(memory.MATTERS_KIB) == "undecided: 0 and 1 are in the interval"
    assert memory.growth([5.0] * 300, 100).verdict(1.0) == "flat: 0 is in the interval, 1 is not"
    assert memory.growth([-float(n) for n in range(300)], 100).verdict(1.0) == "falls"


def test_what_malloc_gave_out_counts_a_block_from_when_it_is_kept_until_it_is_not() -> None:
    from experiments.benchmarks import memory

    for kib in (100, 10_000):  # from the heap, and mapped by itself
        before = memory.allocated_kib()
        kept = bytearray(kib * 1024)
        during = memory.allocated_kib()
        del kept
        # what else the process allocates meanwhile is far below 50 KiB
        assert abs(during - before - kib) < 50 and abs(memory.allocated_kib() - before) < 50


def test_filled_caches_do_not_grow_again() -> None:
    from experiments.benchmarks import memory

    def arrays() -> list[list[np.ndarray]]:
        return [[np.empty(size, np.uint8) for _ in range(7)] for size in range(1, 1024)]

    memory.fill_caches()
    before = memory.allocated_kib()
    first = arrays()
    # shape and strides of 7,161 arrays take 32 bytes each from malloc, 224 KiB; the blocks would be 3,580 KiB more
    assert memory.allocated_kib() - before < 500
    second = arrays()  # while the first are held there is nothing to take them from
    assert memory.allocated_kib() - before > 3000
    del first, second
    before = memory.allocated_kib()
    for number in range(400_000):
        sys.intern(f"another interned string {number}")
    # twice the size would be hundreds of KiB more
    assert abs(memory.allocated_kib() - before) < 200


@pytest.mark.long
def test_the_ways_to_run_cells_have_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "cells.json"
    grid_cells.main(["--cells", "3", "--workers", "2", "--compared", "2", "--json", str(table)])
    costs = json.loads(table.read_text())
    assert [(cost["way"], cost["cells"]) for cost in costs] == [
        ("a process each", 2),
        ("one worker", 2),
        ("2 workers", 3),
    ]
    # the files of a cell are the same whoever starts it, and each cell has some
    assert costs[0]["files"] == costs[1]["files"] == costs[2]["files"] > 10
    assert "flushes" in capsys.readouterr().out
