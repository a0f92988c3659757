"""What the benchmarks compute from times: ratios and intervals; and the work that they give to both sides."""

from __future__ import annotations

import pytest

from experiments.benchmarks import learning, timing
from experiments.benchmarks.timing import Cost


def test_the_interval_of_a_paired_difference_by_hand() -> None:
    centre, low, high = learning.interval([1.0, 2.0, 3.0])
    # t of 2 degrees of freedom at 97.5 % is 4.3027; the standard error is 1 / sqrt 3
    assert centre == 2.0
    assert (low, high) == (
        pytest.approx(2.0 - 4.3027 / 3**0.5, rel=1e-4),
        pytest.approx(2.0 + 4.3027 / 3**0.5, rel=1e-4),
    )


def test_speedups_are_taken_round_by_round_by_hand() -> None:
    peer, own = [Cost(4.0, 2.0), Cost(9.0, 3.0), Cost(6.0, 3.0)], [Cost(2.0, 2.0), Cost(3.0, 1.0), Cost(6.0, 1.0)]
    rows = timing.compared("rollout", "m", 1, 30, {"peer": peer, "own": own}, "peer")
    mine = rows[1]
    assert (mine.wall.median, mine.wall.lowest, mine.wall.highest) == (3.0, 2.0, 6.0)
    assert (mine.speedup.median, mine.speedup.lowest, mine.speedup.highest) == (2.0, 1.0, 3.0)
    assert mine.cpu_speedup.median == 3.0 and rows[0].speedup.median == 1.0
    line = "| rollout | m | 1 | own | 3 | 3.000 (2.000-6.000) | 1.000 | 10 | 2.00 (1.00-3.00) | 3.00 |"
    assert line in timing.table(rows)
