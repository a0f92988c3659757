"""Read one row for each token that an update step used: the frame of the clip analyses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clusters import Floats
from ppo_repro.analysis.pairs import own_iterations
from ppo_repro.base.errors import UserError
from ppo_repro.config.algorithm import ClipObjective, PredictedValue, clip_band
from ppo_repro.config.run import RunConfig
from ppo_repro.records import reader
from ppo_repro.records.folder import load_recorded_config

Bool = npt.NDArray[np.bool_]

# objectives whose bounds the clip analyses do not count: they are not on the ratio of each token
NOT_BY_TOKEN = {
    "sequence_clip": "clips whole responses",
    "cispo": "bounds weights and clips nothing",
    "function": "has bounds of its own",
}

TOKEN = ["sequence", "position"]
STEP = ["epoch", "minibatch"]
TOKEN_COLUMNS = [
    *("iteration", "sequence", "position", "rollout_logprobs", "old_logprobs", "entropies"),
    *("values", "advantages", "returns"),
]


@dataclass(frozen=True)
class ClipRule:
    """Clip range of one iteration. Ratios in [1 - low, 1 + high] are in the band."""

    anchor: str  # rollout or old: the denominator of the ratio
    low: float
    high: float
    dual: float | None  # where the advantage is negative, ratios above it have no gradient
    value_range: float | None  # of the value around its old prediction, reward units; None: not clipped


@dataclass(frozen=True)
class IterationRows:
    """Tables of one iteration: its tokens, its steps, and one row per step and token."""

    iteration: int
    rule: ClipRule
    tokens: pd.DataFrame  # TOKEN_COLUMNS
    steps: pd.DataFrame  # epoch, minibatch in order
    rows: pd.DataFrame  # rows of `updates` with the columns of their token, and float64 log_ratios


def clip_rule(config: RunConfig, iteration: pd.Series, band: tuple[float, float] | None = None) -> ClipRule:
    """Return the clip range of a row of the table `iterations`; `band` (low, high) replaces the run's range.

    Raises UserError if the objective does not clip token ratios and `band` is None, or for a wrong band.
    """
    objective, value = config.ppo.objective, config.value
    dual = objective.dual_clip if band is None and isinstance(objective, ClipObjective) else None
    found = band or clip_band(objective, float(iteration["clip_range"]))
    if found is None:
        what = NOT_BY_TOKEN.get(objective.kind, "clips nothing")
        raise UserError(
            f"ppo.objective.kind = {objective.kind} {what}, only clip and adaptive_clip clip by the token's ratio; "
            "give a clip range to see what it would have clipped"
        )
    low, high = found
    if not (0.0 < low < 1.0 and 0.0 < high < np.inf):
        raise UserError(f"clip range = {low:g}, {high:g}: the lower must be between 0 and 1, the upper above 0")
    value_range = None
    if isinstance(value, PredictedValue) and value.clip_range is not None:
        value_range = value.clip_range * (float(iteration["return_scale"]) if value.normalize_returns else 1.0)
    return ClipRule(config.ppo.ratio_anchor, low, high, dual, value_range)


def join_tokens(tokens: pd.DataFrame, updates: pd.DataFrame, anchor: str) -> pd.DataFrame:
    """Return the rows of `updates` with their token's columns and log_ratios = new_logprobs - anchor, float64 nats.

    The order of `updates` is kept. Raises UserError if a row has no token.
    """
    rows = updates.merge(tokens, on=TOKEN, how="inner", validate="many_to_one")
    if len(rows) != len(updates):
        raise UserError(f"{len(updates) - len(rows)} rows of updates have no row in tokens; the records are damaged")
    new = rows["new_logprobs"].to_numpy(np.float64)
    rows["anchor_logprobs"] = rows[f"{anchor}_logprobs"].to_numpy(np.float64)
    rows["log_ratios"] = new - rows["anchor_logprobs"].to_numpy()
    return rows


def load_iterations(
    run_dir: Path | str,
    *,
    iterations: Sequence[int] | None = None,
    band: tuple[float, float] | None = None,
) -> Iterator[IterationRows]:
    """Yield the iterations of a run; `band` (low, high) replaces the run's clip range.

    A fork begins with its first own iteration, because its configuration is not the origin's. Raises UserError for
    missing or damaged records, for an iteration of the origin, or if the run clips nothing and `band` is None.
    """
    recorded = reader.open_manifest(run_dir)
    overview = reader.read_iterations(
        run_dir, iterations=own_iterations(run_dir, recorded, iterations), recorded=recorded
    )
    config = load_recorded_config(run_dir)
    for _, row in overview.iterrows():
        index = int(row["iteration"])
        rule = clip_rule(config, row, band)
        one = [index]
        tokens = reader.read_tokens(run_dir, iterations=one, columns=TOKEN_COLUMNS, recorded=recorded)
        updates = reader.read_updates(run_dir, iterations=one, recorded=recorded).drop(columns="iteration")
        yield IterationRows(
            iteration=index,
            rule=rule,
            tokens=tokens,
            steps=reader.read_steps(run_dir, iterations=one, columns=STEP, recorded=recorded),
            rows=join_tokens(tokens, updates, rule.anchor),
        )


def policy_rows(item: IterationRows) -> pd.DataFrame:
    """Return the rows of the steps in which the policy was updated."""
    return item.rows[item.rows["clip_flag"].notna()]


def steps_of(rows: pd.DataFrame) -> dict[tuple[int, int], npt.NDArray[np.intp]]:
    """Return the indices of the rows of each step, by (epoch, minibatch)."""
    epochs, minibatches = (rows[name].to_numpy(np.int64) for name in STEP)
    present = np.unique(np.stack([epochs, minibatches]), axis=1).T.tolist()
    return {(e, m): np.flatnonzero((epochs == e) & (minibatches == m)) for e, m in present}


def column(rows: pd.DataFrame, name: str) -> Floats:
    """Return a column as a float64 array."""
    return rows[name].to_numpy(dtype=np.float64)
