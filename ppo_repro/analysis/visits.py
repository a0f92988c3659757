"""Read the token visits of a run for the clip analyses: a row per token and optimizer step, one iteration in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.clip_flags import Bool, column
from ppo_repro.analysis.clip_rules import ClipRule, counted_rule, value_reach
from ppo_repro.analysis.run_tables import run_tables
from ppo_repro.base.errors import UserError
from ppo_repro.records.logprob_pairs import KEY_IN_ITERATION, TOKEN_KEY

STEP_KEY = ["epoch", "minibatch"]
CLIP_TOKEN_COLUMNS = [
    *TOKEN_KEY, "rollout_logprobs", "old_logprobs", "entropies", "values", "advantages", "returns",
]  # fmt: skip
ALL = "all"
SUBSETS = {ALL: 0, "adv_pos": 1, "adv_neg": -1}  # the sign of the advantages; 0 for any


@dataclass(frozen=True)
class IterationRows:
    """Tables of one iteration: its steps, and one row per step and token."""

    iteration: int
    rule: ClipRule
    value_reach: float
    steps: pd.DataFrame  # epoch, minibatch in order
    rows: pd.DataFrame  # rows of `join_tokens`


def join_tokens(tokens: pd.DataFrame, updates: pd.DataFrame, anchor: str) -> pd.DataFrame:
    """Return the rows of `updates`, in their order, with the columns CLIP_TOKEN_COLUMNS of their token and two more.

    anchor_logprobs are the log-probs of the anchor, and log_ratios = new_logprobs - anchor_logprobs; both are float64,
    nats. Raises UserError if a row has no token.
    """
    rows = updates.merge(tokens, on=KEY_IN_ITERATION, how="inner", validate="many_to_one")
    if len(rows) != len(updates):
        raise UserError(f"{len(updates) - len(rows)} rows of updates have no row in tokens; the records are damaged")
    anchor_logprobs = column(rows, f"{anchor}_logprobs")
    return rows.assign(anchor_logprobs=anchor_logprobs, log_ratios=column(rows, "new_logprobs") - anchor_logprobs)


def load_iterations(
    run_dir: Path | str,
    *,
    iterations: Sequence[int] | None = None,
    band: tuple[float, float] | None = None,
) -> Iterator[IterationRows]:
    """Yield the iterations of a run; `band` (low, high) replaces the run's clip range.

    A fork begins with the first iteration that it computed, because its origin has another configuration. Raises
    UserError for missing or damaged records, for an iteration of the origin, or if the run clips nothing and `band` is
    None.
    """
    tables = run_tables(run_dir, iterations)
    for _, summary in tables.read("iterations").iterrows():
        iteration = int(summary["iteration"])
        rule = counted_rule(tables.config.ppo, float(summary["clip_range"]), band)
        tokens = tables.read("tokens", CLIP_TOKEN_COLUMNS, iteration)
        updates = tables.read("updates", iteration=iteration).drop(columns="iteration")
        yield IterationRows(
            iteration=iteration,
            rule=rule,
            value_reach=value_reach(tables.config.value, float(summary["return_scale"])),
            steps=tables.read("steps", STEP_KEY, iteration),
            rows=join_tokens(tokens, updates, rule.anchor),
        )


def policy_rows(loaded: IterationRows) -> pd.DataFrame:
    """Return the rows of the steps in which the policy was updated."""
    return loaded.rows[loaded.rows["clip_flag"].notna()]


def value_rows(loaded: IterationRows) -> pd.DataFrame:
    """Return the rows of the steps in which the value model was updated."""
    return loaded.rows[loaded.rows["new_values"].notna()]


def in_subset(subset: str, rows: pd.DataFrame) -> Bool:
    """Return which rows are in a subset of SUBSETS, bool [N]."""
    sign = SUBSETS[subset]
    return (sign * column(rows, "advantages") > 0) | (sign == 0)
