"""Return recorded facts about each token: the age of the sampler's weights, the turn of a dialogue, the experts.

Each fact is a column of small integers in the pairs of a run: `policy_lag`, `turn` and `route`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

LAG = "policy_lag"  # how many iterations older the weights were that sampled a token
TURN = "turn"  # of the model, from 0: how often the environment spoke before
ROUTE = "route"  # an index into ROUTES
LAG_TURN_ROUTE = (LAG, TURN, ROUTE)
# "flipped": sampler and trainer chose different experts; after that, their later tokens see different pasts
ROUTES = ("same", "same after a flip", "flipped")
ROUTE_COLUMNS = ["rollout_routes", "policy_routes"]
SEQUENCE_COLUMNS = ["sequence", "rollout_policy_versions", "is_forced"]


def turns_of(is_forced: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the turn of each sampled token of a response; `is_forced` is 1 for a token of the environment."""
    forced = np.asarray(is_forced, dtype=bool)
    begins = forced & ~np.concatenate([[False], forced[:-1]])
    return np.cumsum(begins)[~forced].astype(np.int32)


def routes_of(tokens: pd.DataFrame) -> npt.NDArray[np.int32]:
    """Return each token's index into ROUTES; `tokens` has whole responses of the table `tokens`, in order."""
    pairs = zip(*(tokens[name] for name in ROUTE_COLUMNS), strict=True)
    flipped = pd.Series([list(a) != list(b) for a, b in pairs], index=tokens.index, dtype=bool)
    so_far = flipped.groupby([tokens["iteration"], tokens["sequence"]]).cummax()
    return np.where(flipped, 2, np.where(so_far, 1, 0)).astype(np.int32)


def with_lag_turn_route(tokens: pd.DataFrame, sequences: pd.DataFrame) -> pd.DataFrame:
    """Return the tokens of one iteration with the recorded columns of LAG_TURN_ROUTE, and without ROUTE_COLUMNS.

    `sequences` has SEQUENCE_COLUMNS of the same iteration.
    """
    found = {}
    _, versions, forced = (sequences[name] for name in SEQUENCE_COLUMNS)
    if versions.notna().any():
        found[LAG] = (tokens["iteration"].to_numpy() - np.concatenate(versions.to_list())).astype(np.int32)
    if forced.notna().any():
        found[TURN] = np.concatenate([turns_of(one) for one in forced])
    if tokens[ROUTE_COLUMNS].notna().any(axis=None):
        found[ROUTE] = routes_of(tokens)
    return tokens.drop(columns=ROUTE_COLUMNS).assign(**found)
