"""Columns of a rollout that some samplers lack."""

from __future__ import annotations

import pytest

from ppo_repro.stages.rollout import known


def test_a_column_has_a_value_for_every_response_or_for_none() -> None:
    assert known("routes", [0, 5]) == (0, 5)
    assert known("routes", [None, None]) is None
    with pytest.raises(ValueError, match="routes: the sampler has it for 1 of 2 responses"):
        known("routes", [None, 5])
