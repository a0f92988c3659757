"""Flipped routes in mixtures of experts: tokens that sampler and trainer send to different experts, and what that does.

A token's route is the experts of every layer that computed its distribution (`rollout_routes`, `policy_routes`). A run
at `records.level: deep` has them. Routes of the prompt are not recorded: a flip there is seen by its effect only.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.pairs.places import ROUTE_COLUMNS, ROUTES, routes_of
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader

_ROWS = (*ROUTES, "all")
# what of the table `tokens` these functions need
ROUTED = ["iteration", "sequence", "position", "rollout_logprobs", "old_logprobs", *ROUTE_COLUMNS]


def flips(tokens: pd.DataFrame) -> pd.DataFrame:
    """One row per token, in their order: `delta` = old_logprobs - rollout_logprobs (float64, nats), `route` (string).

    route: `flipped` where the experts of any layer differ, `same after a flip` where those of an earlier token of the
    response did, so that this one saw another past, else `same`. `tokens` has the columns of the table `tokens`.
    """
    ordered = tokens.sort_values(["iteration", "sequence", "position"])
    route = np.array(ROUTES)[routes_of(ordered)]
    delta = ordered["old_logprobs"].astype(np.float64) - ordered["rollout_logprobs"].astype(np.float64)
    return pd.DataFrame({"delta": delta, "route": route}, index=ordered.index).reindex(tokens.index)


def table_of(tokens: pd.DataFrame) -> pd.DataFrame:
    """`route_table` of rows of the table `tokens`."""
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
    """Say how many tokens took which kind of route (`flips`), and how far their log-probs are apart, over a whole run.

    Columns: tokens; share of all tokens; rms_delta and max_abs_delta of old_logprobs - rollout_logprobs, nats, NaN
    without tokens. Index: ROUTES, then all. UserError where the run has recorded no routes.
    """
    tokens = reader.read_tokens(run_dir, columns=ROUTED)
    if tokens["rollout_routes"].isna().any() or tokens["policy_routes"].isna().any():
        raise UserError(f"{run_dir}: has no routes of its tokens; record a mixture of experts, by the built-in engine")
    return table_of(tokens)
