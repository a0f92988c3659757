"""Lag, turn and route of a token by their definitions."""

from __future__ import annotations

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.records.logprob_pairs import LAG, ROUTE, TURN, routes_of, turns_of, with_lag_turn_route


@given(st.lists(st.booleans(), max_size=12))
def test_a_turn_is_how_often_the_environment_spoke_before(forced: list[bool]) -> None:
    speaks = [now and not (i and forced[i - 1]) for i, now in enumerate(forced)]
    expected = [sum(speaks[:i]) for i, is_forced in enumerate(forced) if not is_forced]
    assert turns_of([int(f) for f in forced]).tolist() == expected


def test_lags_turns_and_routes_by_hand() -> None:
    """Two responses: the second token of the first one flips; the environment spoke before its last token."""
    tokens = pd.DataFrame(
        {
            "iteration": 2,
            "sequence": [0, 0, 0, 1],
            "rollout_routes": [[0, 1], [0, 1], [0, 1], [2]],
            "policy_routes": [[0, 1], [0, 2], [0, 1], [2]],
        }
    )
    assert routes_of(tokens).tolist() == [0, 2, 1, 0]
    sequences = pd.DataFrame(
        {"sequence": [0, 1], "rollout_policy_versions": [[0, 1, 2], [2]], "is_forced": [[0, 0, 1, 0], [0]]}
    )
    found = with_lag_turn_route(tokens, sequences)
    assert found[[LAG, TURN, ROUTE]].to_numpy().T.tolist() == [[2, 1, 0, 0], [0, 0, 1, 0], [0, 2, 1, 0]]
