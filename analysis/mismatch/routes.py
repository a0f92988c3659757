"""Find flipped routes in mixtures of experts: tokens that sampler and trainer send to different experts.

A token's route is the experts of every layer that computed its distribution (`rollout_routes`, `policy_routes`). A run
at `records.level: deep` records routes of responses, but not of prompts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.pairs.places import ROUTE_COLUMNS, ROUTES, routes_of
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader

_ROWS = (*ROUTES, "all")
# the columns of the table `tokens` that these functions need
ROUTED = ["iteration", "sequence", "position", "rollout_logprobs", "old_logprobs", *ROUTE_COLUMNS]


def flips(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return delta = old_logprobs - rollout_logprobs (float64, nats) and the route (string) of each token.

    The route is `flipped` if sampler and trainer chose different experts in any layer, `same after a flip` if their
    experts differed for an earlier token of the response, and `same` otherwise. `tokens` has the columns ROUTED.
    """
    ordered = tokens.sort_values(["iteration", "sequence", "position"])
    route = np.array(ROUTES)[routes_of(ordered)]
    delta = ordered["old_logprobs"].astype(np.float64) - ordered["rollout_logprobs"].astype(np.float64)
    return pd.DataFrame({"delta": delta, "route": route}, index=ordered.index).reindex(tokens.index)


def table_of(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return `route_table` for rows of the table `tokens`, with the columns ROUTED."""
    found = flips(tokens)
    rows = []
    for route in _ROWS:
        delta = found["delta"] if route == "all" else found.loc[found["route"] == route, "delta"]
        empty = delta.empty
        rows.append(
            {
                "tokens": len(delta),
                "share": len(delta) / len(found),
                "rms_delta": np.nan if empty else float(np.sqrt(np.mean(delta**2))),
                "max_abs_delta": np.nan if empty else float(delta.abs().max()),
            }
        )
    return pd.DataFrame(rows, index=pd.Index(_ROWS, name="route"))


def route_table(run_dir: Path | str) -> pd.DataFrame:
    """Return the number of a run's tokens per kind of route, and the distance of their log-probs.

    Columns: tokens; share of all tokens; rms_delta and max_abs_delta of old_logprobs - rollout_logprobs, nats, NaN
    without tokens. Index: ROUTES, then all. Raises UserError if the run recorded no routes.
    """
    tokens = reader.read_tokens(run_dir, columns=ROUTED)
    if tokens["rollout_routes"].isna().any() or tokens["policy_routes"].isna().any():
        raise UserError(f"{run_dir}: has no routes of its tokens; record a mixture of experts, by the built-in engine")
    return table_of(tokens)
