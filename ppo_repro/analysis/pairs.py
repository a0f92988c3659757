"""Choose the iterations and the two log-probs that an analysis of a recorded run compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.logprob_pairs import KEY, OPTIONAL, PAIR, pairs_of_iteration
from ppo_repro.records.manifest import Manifest, require_responses
from ppo_repro.statistics.clusters import Floats

PAIRS = ("rollout_vs_old", "old_vs_first_new")
NO_TOKEN = "there is no token to compare; give a run or a file with responses"


def chosen_iterations(recorded: Manifest, iterations: Sequence[int] | None) -> Sequence[int]:
    """Return `iterations`, or all recorded iterations if None. Raises UserError for an empty list."""
    if iterations is not None and not len(iterations):
        raise UserError("iterations = []: names no iteration; leave it out for all iterations")
    return range(recorded.num_iterations) if iterations is None else iterations


def own_iterations(run_dir: Path | str, recorded: Manifest, iterations: Sequence[int] | None) -> Sequence[int]:
    """Return `iterations`; if None, all iterations that a language run computed itself, with its own settings.

    Raises UserError for a run without responses, for an empty list, and for an iteration of a fork's origin.
    """
    require_responses(run_dir, recorded)
    computed = recorded.own_iterations
    chosen = computed if iterations is None else chosen_iterations(recorded, iterations)
    if copied := [i for i in chosen if 0 <= i < computed.start]:
        whose = "is of the run that was forked, which has settings of its own; give the folder of that run"
        raise UserError(f"{run_dir}: iteration {copied[0]} {whose}")
    return chosen


def run_pairs(
    run_dir: Path | str,
    pair: str = "rollout_vs_old",
    *,
    iterations: Sequence[int] | None = None,
    allow_incomplete: bool = False,
) -> Iterator[pd.DataFrame]:
    """Yield the pairs (`records.logprob_pairs`) of a recorded run, one iteration at a time.

    Args:
        pair: `rollout_vs_old`: rollout_logprobs against old_logprobs, sampler and trainer with the same weights.
            `old_vs_first_new`: old_logprobs against new_logprobs of the first epoch, without minibatches in which the
            policy took no step; without lag, turn and route.
        iterations: the iterations to read; None for all that the run computed itself.
        allow_incomplete: also read a run that is not complete.

    Raises:
        UserError: another pair, a run without responses, an iteration of a fork's origin, or records that are missing,
            unknown or damaged.
    """
    if pair not in PAIRS:
        raise UserError(f"pair = {pair!r}: must be {' or '.join(PAIRS)}")
    read = pairs_of_iteration if pair == "rollout_vs_old" else _old_and_first_new
    recorded = reader.open_manifest(run_dir, allow_incomplete)
    return (read(run_dir, recorded, iteration) for iteration in own_iterations(run_dir, recorded, iterations))


def deltas(tokens: pd.DataFrame) -> Floats:
    """Return old_logprobs - rollout_logprobs of each row of the table `tokens`, nats, float64."""
    return tokens["old_logprobs"].to_numpy(np.float64) - tokens["rollout_logprobs"].to_numpy(np.float64)


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


def masked_tokens(chunk: pd.DataFrame) -> int:
    """Return the number of tokens that a mask removed from a chunk."""
    return int(chunk.attrs.get("masked", 0))


def iteration_of(chunk: pd.DataFrame) -> int:
    """Return the iteration of a chunk, even if a mask removed every row."""
    return int(chunk["iteration"].iloc[0] if len(chunk) else chunk.attrs["iteration"])
