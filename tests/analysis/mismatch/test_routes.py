"""Flipped routes and the log-prob differences of tokens with and without one."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.mismatch.routes import flips, table_of

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
