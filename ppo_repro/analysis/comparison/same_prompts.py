"""Pair the responses of two runs to the same prompts, and compare the log-probs of their tokens.

A pair is two responses to the same prompt at the same place of the same iteration. delta = log-prob of b - log-prob of
a, over the pairs whose tokens are all the same. After the runs have diverged, likely responses agree more often, so
delta does not describe all responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from ppo_repro.analysis.iterations import chosen_iterations
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.logprob_pairs import KEY_IN_ITERATION
from ppo_repro.records.manifest import Manifest, require_responses
from ppo_repro.statistics.bits import unequal_bits
from ppo_repro.statistics.clusters import segment_sums

LOGPROB_COLUMNS = ("old_logprobs", "rollout_logprobs", "ref_logprobs")


def manifests(run_a: Path | str, run_b: Path | str) -> tuple[Manifest, Manifest]:
    """Return both manifests. Raises UserError if a run is incomplete or damaged, or if the kinds differ."""
    a, b = (reader.open_manifest(run) for run in (run_a, run_b))
    if a.kind != b.kind:
        raise UserError(f"{run_a} is a {a.kind} run, {run_b} a {b.kind} run; compare runs of one kind")
    return a, b


def paired_responses(
    run_a: Path | str,
    run_b: Path | str,
    *,
    column: str = "old_logprobs",
    iterations: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return one row for each pair of responses to the same prompt in two runs.

    Args:
        column: the log-probs to compare, one of LOGPROB_COLUMNS.
        iterations: the iterations to compare; None for all.

    Returns:
        The columns iteration, sequence, and

        diverged: whether a token differs
        compared: number of tokens up to and including the first different token, or of all
        delta_sum, abs_sum: sums of delta and |delta| over the tokens, nats, float64; NaN for a pair that diverged
        unequal: number of tokens whose log-probs differ in any bit; 0 for a pair that diverged

    Raises:
        UserError: another column, runs without responses, damaged records, or, without `iterations`, different
            numbers of iterations.
    """
    if column not in LOGPROB_COLUMNS:
        raise UserError(f"column = {column!r}: must be {', '.join(LOGPROB_COLUMNS)}")
    runs = tuple(zip((run_a, run_b), manifests(run_a, run_b), strict=True))
    require_responses(*runs[0])
    selected, others = (chosen_iterations(recorded, iterations) for _, recorded in runs)
    if len(selected) != len(others):
        raise UserError(
            f"{run_a} has {len(selected)} iterations, {run_b} has {len(others)}; name the iterations to compare"
        )
    return pd.concat([_one_iteration(runs, column, i) for i in selected], ignore_index=True)


def _one_iteration(runs: Sequence[tuple[Path | str, Manifest]], column: str, iteration: int) -> pd.DataFrame:
    one, names = [iteration], ["sequence", "prompt_ids", "response_length"]
    texts = [reader.read_sequences(run, iterations=one, columns=names, recorded=recorded) for run, recorded in runs]
    responses = texts[0].merge(texts[1], on="sequence", suffixes=("_a", "_b"), validate="one_to_one")
    prompts = zip(responses["prompt_ids_a"], responses["prompt_ids_b"], strict=True)
    responses = responses[np.array([np.array_equal(x, y) for x, y in prompts], bool)]
    names = [*KEY_IN_ITERATION, "token_id", column]
    tokens = [reader.read_tokens(run, iterations=one, columns=names, recorded=recorded) for run, recorded in runs]
    both = tokens[0].merge(tokens[1], on=KEY_IN_ITERATION, suffixes=("_a", "_b"), validate="one_to_one")
    a, b = (both[f"{column}_{side}"].to_numpy(np.float32) for side in "ab")
    delta = b.astype(np.float64) - a.astype(np.float64)
    starts = np.flatnonzero(np.diff(both["sequence"], prepend=-1))
    # numpy, because pandas would skip NaN in sums
    sums = pd.DataFrame({"sequence": both["sequence"].to_numpy()[starts]})
    for name, values in (("delta", delta), ("abs_delta", np.abs(delta)), ("unequal", unequal_bits(a, b).astype(float))):
        sums[name] = segment_sums(values, starts)
    parted = both[both["token_id_a"] != both["token_id_b"]].groupby("sequence")["position"].min()
    return _responses(responses.merge(sums, on="sequence"), parted, iteration)


def _responses(responses: pd.DataFrame, first_difference: pd.Series, iteration: int) -> pd.DataFrame:
    lengths = responses[["response_length_a", "response_length_b"]].to_numpy(np.int64)
    first = responses["sequence"].map(first_difference).to_numpy(np.float64)
    # if a limit cut one response short, the first different token is the token after it
    inside, longer = ~np.isnan(first), lengths[:, 0] != lengths[:, 1]
    diverged = inside | longer
    return pd.DataFrame(
        {
            "iteration": np.full(len(responses), iteration, np.int32),
            "sequence": responses["sequence"].to_numpy(),
            "compared": np.where(inside, np.nan_to_num(first) + 1, lengths.min(axis=1) + longer).astype(np.int64),
            "diverged": diverged,
            "delta_sum": np.where(diverged, np.nan, responses["delta"]),
            "abs_sum": np.where(diverged, np.nan, responses["abs_delta"]),
            "unequal": np.where(diverged, 0, responses["unequal"]).astype(np.int64),
        }
    )


class Hazard(NamedTuple):
    """First differences per compared token, with the exact 95 % Poisson interval [low, high]."""

    rate: float
    low: float
    high: float


def hazard(compared: npt.NDArray[np.int64], diverged: npt.NDArray[np.bool_]) -> Hazard:
    """Return the hazard h = first differences / compared tokens.

    If h is the same at every position, a response of T tokens is identical with probability about exp(-h T).
    """
    exposure, count = int(compared.sum()), int(diverged.sum())
    low = float(stats.chi2.ppf(0.025, 2 * count)) / 2 if count else 0.0
    high = float(stats.chi2.isf(0.025, 2 * (count + 1))) / 2
    return Hazard(count / exposure, low / exposure, high / exposure)
