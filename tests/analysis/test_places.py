"""Lag, turn and route of tokens by hand, and runs that have none of them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from analysis.mismatch.bucket import bucket_sums, bucket_table
from analysis.mismatch.token import mismatch_token
from analysis.pairs.places import Recorded, recorded_places, routes_of, turns_of
from analysis.pairs.runs import run_pairs
from analysis.report.figures import BUCKETS, bucket_figure


def test_turns_by_hand() -> None:
    assert turns_of([0, 0, 1, 1, 0, 1, 0, 0]).tolist() == [0, 0, 1, 2, 2]
    assert turns_of([1, 0, 1]).tolist() == [1] and turns_of([0]).tolist() == [0] and turns_of([]).tolist() == []


@given(st.lists(st.booleans(), max_size=12))
def test_a_turn_is_how_often_the_environment_spoke_before(forced: list[bool]) -> None:
    speaks = [now and not (i and forced[i - 1]) for i, now in enumerate(forced)]
    expected = [sum(speaks[:i]) for i, is_forced in enumerate(forced) if not is_forced]
    assert turns_of([int(f) for f in forced]).tolist() == expected


def frame() -> pd.DataFrame:
    """Two responses: the second token of the first one flips; the last token of both differs by 0.5."""
    found = pd.DataFrame(
        {
            "iteration": 0,
            "sequence": [0, 0, 0, 1],
            "position": [0, 1, 2, 0],
            "token_id": 3,
            "logprobs_a": [-1.0, -1.0, -1.0, -2.0],
            "logprobs_b": [-1.0, -1.25, -1.5, -1.5],
            "rollout_routes": [[0, 1], [0, 1], [0, 1], [2]],
            "policy_routes": [[0, 1], [0, 2], [0, 1], [2]],
        }
    )
    return found.astype({"logprobs_a": "float32", "logprobs_b": "float32"})


def test_buckets_of_places_by_hand() -> None:
    tokens = frame()
    assert routes_of(tokens).tolist() == [0, 2, 1, 0]
    places = {"route": routes_of(tokens), "turn": [0, 0, 1, 3], "policy_lag": [2, 1, 0, 0]}
    table = bucket_table(bucket_sums(mismatch_token(tokens.assign(**places)))).set_index(["kind", "lo"])
    assert table.loc["route", "n"].to_dict() == {0.0: 2, 1.0: 1, 2.0: 1}
    assert table.loc["route", "abs_mean"].to_dict() == {0.0: 0.25, 1.0: 0.5, 2.0: 0.25}
    assert table.loc["turn", "abs_mean"].to_dict() == {0.0: 0.125, 1.0: 0.5, 2.0: 0.5}
    assert table.loc["policy_lag", "n"].to_dict() == {0.0: 2, 1.0: 1, 2.0: 1}
    for kind in ("route", "turn", "policy_lag"):
        assert bucket_figure(table.reset_index(), kind).title == BUCKETS[kind][0]


def test_a_run_without_them_has_no_such_buckets(deterministic_run: Path) -> None:
    assert recorded_places(deterministic_run) == Recorded()
    chunk = next(run_pairs(deterministic_run))
    assert not {"policy_lag", "turn", "route", "rollout_routes"} & set(chunk.columns)
    kinds = set(bucket_table(bucket_sums(mismatch_token(chunk)))["kind"])
    assert kinds == {"prob", "entropy", "position", "seq_len"}
