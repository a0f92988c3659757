"""Read pairs of log-probs of the same token from recorded runs, in the frame that every source of pairs yields.

A source is an iterator of chunks, one per iteration. A chunk is a frame of pairs (`testing.pairs`) with one row per
token, in the order of (iteration, sequence, position). Side `a` sampled the token or came first. If the source has
them, a chunk also has the columns

    entropies, log_kept_mass: float32, nats
    prob_sq_sums: float32, sums of the squared probabilities
    advantages: float32
    policy_lag, turn, route: int32, see `lag_turn_route`

`chunk.attrs["masked"]` counts the tokens that a mask removed from the chunk, possibly all. Runs have no mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.pairs.lag_turn_route import ROUTE_COLUMNS, SEQUENCE_COLUMNS, with_lag_turn_route
from ppo_repro.analysis.stats.clusters import Floats
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.manifest import Manifest, require_responses
from ppo_repro.testing.pairs import KEY, PAIR

OPTIONAL = ["entropies", "prob_sq_sums", "log_kept_mass", "advantages"]
PAIRS = ("rollout_vs_old", "old_vs_first_new")


def chosen_iterations(recorded: Manifest, iterations: Sequence[int] | None) -> Sequence[int]:
    """Return `iterations`, or all recorded iterations if None."""
    return range(recorded.num_iterations) if iterations is None else iterations


def own_iterations(run_dir: Path | str, recorded: Manifest, iterations: Sequence[int] | None) -> Sequence[int]:
    """Return `iterations`, or all that a language run itself computed if None, where its settings are applied.

    Raises UserError for a run without responses, and for an iteration of a fork's origin.
    """
    require_responses(run_dir, recorded)
    own = recorded.own_iterations
    if copied := [i for i in iterations or () if 0 <= i < own.start]:
        whose = "is of the run that was forked, which has settings of its own; give the folder of that run"
        raise UserError(f"{run_dir}: iteration {copied[0]} {whose}")
    return own if iterations is None else iterations


def run_pairs(
    run_dir: Path | str,
    pair: str = "rollout_vs_old",
    *,
    iterations: Sequence[int] | None = None,
    allow_incomplete: bool = False,
) -> Iterator[pd.DataFrame]:
    """Yield the pairs of a recorded run, one iteration at a time.

    Args:
        pair: `rollout_vs_old`: rollout_logprobs against old_logprobs, sampler and trainer with the same weights.
            `old_vs_first_new`: old_logprobs against new_logprobs of the first epoch, without minibatches in which the
            policy took no step.
        iterations: the iterations to read; None for all.
        allow_incomplete: also read a run that is not complete.

    Raises:
        UserError: another pair, a run without responses, or records that are missing, unknown or damaged.
    """
    if pair not in PAIRS:
        raise UserError(f"pair = {pair!r}: must be {' or '.join(PAIRS)}")
    read = rollout_and_old if pair == "rollout_vs_old" else _old_and_first_new
    recorded = reader.open_manifest(run_dir, allow_incomplete)
    require_responses(run_dir, recorded)
    return (read(run_dir, recorded, iteration) for iteration in chosen_iterations(recorded, iterations))


def deltas(tokens: pd.DataFrame) -> Floats:
    """Return old_logprobs - rollout_logprobs of each row of the table `tokens`, nats, float64."""
    return tokens["old_logprobs"].to_numpy(np.float64) - tokens["rollout_logprobs"].to_numpy(np.float64)


def rollout_and_old(run_dir: Path | str, recorded: Manifest, iteration: int) -> pd.DataFrame:
    """Return the pairs `rollout_vs_old` of one iteration."""
    columns, one = [*KEY, "token_id", "rollout_logprobs", "old_logprobs", *OPTIONAL, *ROUTE_COLUMNS], [iteration]
    tokens = reader.read_tokens(run_dir, iterations=one, columns=columns, recorded=recorded)
    sequences = reader.read_sequences(run_dir, iterations=one, columns=SEQUENCE_COLUMNS, recorded=recorded)
    renamed = tokens.rename(columns={"rollout_logprobs": "logprobs_a", "old_logprobs": "logprobs_b"})
    return with_lag_turn_route(renamed, sequences)


def _old_and_first_new(run_dir: Path | str, recorded: Manifest, iteration: int) -> pd.DataFrame:
    columns = [*KEY, "token_id", "old_logprobs", *OPTIONAL]
    tokens = reader.read_tokens(run_dir, iterations=[iteration], columns=columns, recorded=recorded)
    # clip_flag is null exactly where the policy takes no step; new_logprobs can also be a recorded NaN
    columns = [*KEY, "epoch", "new_logprobs", "clip_flag"]
    updates = reader.read_updates(run_dir, iterations=[iteration], columns=columns, recorded=recorded)
    first = updates[(updates["epoch"] == 0) & updates["clip_flag"].notna()][[*KEY, "new_logprobs"]]
    joined = tokens.merge(first, on=KEY, how="inner", validate="one_to_one").sort_values(KEY, ignore_index=True)
    renamed = joined.rename(columns={"old_logprobs": "logprobs_a", "new_logprobs": "logprobs_b"})
    return renamed[[*PAIR, *OPTIONAL]]
