"""Flipped routes and the log-prob differences of tokens with and without one."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.mismatch.routes import flips, table_of

FIELDS = ["iteration", "sequence", "position", "rollout_logprobs", "old_logprobs", "rollout_routes", "policy_routes"]


def frame(rows: list[tuple[int, int, int, float, float, list[int], list[int]]]) -> pd.DataFrame:
    found = pd.DataFrame(rows, columns=FIELDS)
    return found.astype({"rollout_logprobs": np.float32, "old_logprobs": np.float32})


def test_a_case_by_hand() -> None:
    tokens = frame(
        [
            (0, 0, 0, -1.0, -1.0, [0, 2], [0, 2]),
            (0, 0, 1, -1.0, -1.5, [0, 2], [1, 2]),
            (0, 0, 2, -2.0, -1.75, [1, 2], [1, 2]),
            (0, 1, 0, -1.0, -1.5, [0, 1], [0, 1]),
            (1, 1, 0, -3.0, -2.0, [0, 1], [0, 2]),
        ]
    )
    assert flips(tokens)["route"].tolist() == ["same", "flipped", "same after a flip", "same", "flipped"]
    found = table_of(tokens)
    assert found["tokens"].to_dict() == {"same": 2, "same after a flip": 1, "flipped": 2, "all": 5}
    assert found["share"].tolist() == [0.4, 0.2, 0.4, 1.0]
    expected = [math.sqrt(0.25 / 2), 0.25, math.sqrt((0.25 + 1.0) / 2), math.sqrt((0.25 + 0.0625 + 0.25 + 1.0) / 5)]
    # square roots and means in float64
    assert found["rms_delta"].tolist() == pytest.approx(expected, rel=1e-15)
    assert found["max_abs_delta"].tolist() == [0.5, 0.25, 1.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.booleans()), min_size=1, max_size=12), st.randoms())
def test_routes_are_those_of_the_definition_in_any_order_of_the_rows(
    made: list[tuple[int, int, bool]], random: object
) -> None:
    rows = [(i, s, position, -1.0, -1.0, [0], [int(f)]) for position, (i, s, f) in enumerate(made)]
    random.shuffle(rows)  # type: ignore[attr-defined]
    tokens = frame(rows)
    expected = []
    for i, s, position, _, _, _, policy in rows:
        before = any(r[:2] == (i, s) and r[2] < position and r[6] == [1] for r in rows)
        expected.append("flipped" if policy == [1] else "same after a flip" if before else "same")
    assert flips(tokens)["route"].tolist() == expected
    assert table_of(tokens)["tokens"].tolist()[:3] == [
        expected.count(r) for r in ("same", "same after a flip", "flipped")
    ]
