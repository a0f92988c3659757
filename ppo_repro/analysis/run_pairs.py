"""Read two log-probs of each token of a recorded run: of sampler and trainer, or of the trainer twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.run_tables import RunTables, run_tables
from ppo_repro.base.errors import UserError
from ppo_repro.records.logprob_pairs import OPTIONAL, PAIR, TOKEN_KEY, pairs_of_iteration

PAIRS = ("rollout_vs_old", "old_vs_first_new")


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
    tables = run_tables(run_dir, iterations, allow_incomplete)
    if pair == "rollout_vs_old":
        return (pairs_of_iteration(run_dir, tables.recorded, iteration) for iteration in tables.iterations)
    return (_old_and_first_new(tables, iteration) for iteration in tables.iterations)


def _old_and_first_new(tables: RunTables, iteration: int) -> pd.DataFrame:
    tokens = tables.read("tokens", [*TOKEN_KEY, "token_id", "old_logprobs", *OPTIONAL], iteration)
    # clip_flag is null exactly where the policy takes no step; new_logprobs can also be a recorded NaN
    updates = tables.read("updates", [*TOKEN_KEY, "epoch", "new_logprobs", "clip_flag"], iteration)
    first = updates[(updates["epoch"] == 0) & updates["clip_flag"].notna()][[*TOKEN_KEY, "new_logprobs"]]
    joined = tokens.merge(first, on=TOKEN_KEY, how="inner", validate="one_to_one")
    renamed = joined.rename(columns={"old_logprobs": "logprobs_a", "new_logprobs": "logprobs_b"})
    return renamed.sort_values(TOKEN_KEY, ignore_index=True)[[*PAIR, *OPTIONAL]]
