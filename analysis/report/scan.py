"""One pass over the iterations of a run, one in memory at a time: the counts and rows that its page shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.report import counts, curves
from analysis.report.facts import Facts
from ppo_repro.config.files import DPO
from ppo_repro.errors import UserError
from ppo_repro.records import reader

SEQUENCES = ["iteration", "sequence", "response", "response_length", "scores", "is_correct"]
TOKENS = [
    "iteration", "sequence", "position", "rollout_logprobs", "old_logprobs", "entropies", "ref_kl", "advantages",
]  # fmt: skip
UPDATES = ["iteration", "epoch", "minibatch", "sequence", "position", "ratios", "clip_flag"]
CONTROL_UPDATES = ["iteration", "epoch", "minibatch", "advantages", "ratios", "clip_flag"]
LOGPROBS = ["iteration", "rollout_logprobs", "old_logprobs"]


@dataclass(frozen=True)
class Scan:
    """What a run's page shows, see `counts`; the last two only of language runs."""

    curves: pd.DataFrame
    deltas: counts.Counts
    nonfinite_deltas: int
    ratios: pd.DataFrame
    quadrants: counts.Counts
    flags: pd.DataFrame
    extremes: pd.DataFrame
    values: dict[int, counts.Floats]  # scores, or returns of the episodes that ended, by iteration
    probabilities: counts.Counts
    responses: pd.DataFrame  # rows of `response_summary`


@dataclass(frozen=True)
class IterationRecords:
    """One iteration; `advantages[i]` belongs to row i of `updates`; sequences are None in control runs."""

    iteration: int
    sequences: pd.DataFrame | None
    tokens: pd.DataFrame
    updates: pd.DataFrame
    advantages: counts.Floats


def summary_tables(facts: Facts) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables `iterations` and `steps`; raises UserError on anything missing or damaged."""
    return (
        reader.read_iterations(facts.run_dir, iterations=facts.iterations, allow_incomplete=True),
        reader.read_steps(facts.run_dir, iterations=facts.iterations, allow_incomplete=True),
    )


def iterations_of(facts: Facts) -> Iterator[IterationRecords]:
    """The iterations of a run, one at a time; raises UserError on anything missing or damaged."""
    for iteration in facts.iterations:
        which: dict[str, Any] = {"iterations": [iteration], "allow_incomplete": True}
        if facts.is_control:
            updates = reader.read_updates(facts.run_dir, columns=CONTROL_UPDATES, **which)
            tokens = reader.read_tokens(facts.run_dir, columns=LOGPROBS, **which)
            yield IterationRecords(iteration, None, tokens, updates, updates["advantages"].to_numpy(np.float64))
            continue
        sequences = reader.read_sequences(facts.run_dir, columns=SEQUENCES, **which)
        tokens = reader.read_tokens(facts.run_dir, columns=TOKENS, **which)
        updates = reader.read_updates(facts.run_dir, columns=UPDATES, **which)
        rows = token_rows(tokens, updates, f"{facts.run_dir}: iteration {iteration}")
        yield IterationRecords(iteration, sequences, tokens, updates, tokens["advantages"].to_numpy(np.float64)[rows])


def token_rows(tokens: pd.DataFrame, updates: pd.DataFrame, where: str) -> npt.NDArray[np.int64]:
    """The row of `tokens` for every row of `updates`; raises UserError if there is none."""
    keys = ["sequence", "position"]
    rows = pd.MultiIndex.from_frame(tokens[keys]).get_indexer(pd.MultiIndex.from_frame(updates[keys]))
    if (rows < 0).any():
        raise UserError(f"{where}: the updates name tokens that are not in the tokens table; the records are damaged")
    return np.asarray(rows, dtype=np.int64)


def run_curves(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """iteration, metric, value, low, high of every curve of a run, without the other counts of its page."""
    if facts.is_control:
        return curves.control_curves(iterations, steps, facts.manifest.final, returns_of(facts))
    if facts.manifest.kind == DPO:
        names = [[metric.key for metric in metrics] for metrics in curves.BY_KIND[DPO]]
        return curves.recorded_rows(iterations, steps, facts.manifest.final, *names)
    rows: list[dict[str, float | str]] = []
    for one in iterations_of(facts):
        assert one.sequences is not None
        rows += curves.sampled_rows(one.iteration, one.sequences, one.tokens)
    return pd.concat([pd.DataFrame(rows), curves.recorded_rows(iterations, steps, facts.manifest.final)])


def returns_of(facts: Facts) -> dict[int, counts.Floats]:
    """The returns of the episodes of a control run that ended, by iteration."""
    names = ["iteration", "episode_return"]
    found = reader.read_sequences(facts.run_dir, iterations=facts.iterations, columns=names, allow_incomplete=True)
    ended = found[found["episode_return"].notna()]
    groups = ended.groupby("iteration", sort=True)["episode_return"]
    return {int(str(iteration)): values.to_numpy(np.float64) for iteration, values in groups}


def scan_run(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame) -> Scan:
    """The pass over all iterations."""
    sampled = list[dict[str, float | str]]()
    flags, extremes = list[dict[str, float]](), list[dict[str, float]]()
    ratios, responses = list[pd.DataFrame](), list[pd.DataFrame]()
    values: dict[int, counts.Floats] = returns_of(facts) if facts.is_control else {}
    probability = len(counts.PROBABILITY_EDGES) - 1
    probabilities = np.zeros((probability, probability), dtype=np.int64)
    deltas = np.zeros(len(counts.DELTA_EDGES) - 1, dtype=np.int64)
    quadrants = np.zeros((len(counts.ADVANTAGE_EDGES) - 1, len(counts.RATIO_EDGES) - 1), dtype=np.int64)
    nonfinite = 0
    for one in iterations_of(facts):
        delta = counts.deltas(one.tokens)
        nonfinite += int(np.count_nonzero(~np.isfinite(delta)))
        deltas += counts.histogram(delta, counts.DELTA_EDGES)
        quadrants += counts.quadrant_grid(one.advantages, one.updates)
        ratios.append(counts.ratio_histogram(one.updates))
        flags.append(counts.flag_row(one.iteration, one.updates))
        extremes.append(counts.extremes_row(one.iteration, one.updates))
        if one.sequences is not None:
            probabilities += counts.probability_grid(one.tokens)
            sampled += curves.sampled_rows(one.iteration, one.sequences, one.tokens)
            responses.append(response_summary(one.iteration, one.sequences, one.tokens, one.updates))
            values[one.iteration] = one.sequences["scores"].to_numpy(np.float64)
    if facts.is_control:
        found = curves.control_curves(iterations, steps, facts.manifest.final, values)
    else:
        found = pd.concat([pd.DataFrame(sampled), curves.recorded_rows(iterations, steps, facts.manifest.final)])
    by_bin = pd.concat(ratios, ignore_index=True).groupby(["epoch", "minibatch", "bin_lo", "bin_hi"], as_index=False)
    return Scan(
        found, deltas, nonfinite, by_bin.sum(), quadrants, pd.DataFrame(flags), pd.DataFrame(extremes), values,
        probabilities, pd.concat(responses, ignore_index=True) if responses else pd.DataFrame(),
    )  # fmt: skip


def response_summary(
    iteration: int, sequences: pd.DataFrame, tokens: pd.DataFrame, updates: pd.DataFrame
) -> pd.DataFrame:
    """iteration, sequence, tokens, score, max_abs_delta (nats), clipped (token updates)."""
    delta = np.abs(counts.deltas(tokens))
    largest = np.zeros(len(sequences))
    # NaN would win every comparison; the page reports what is not finite elsewhere
    np.maximum.at(largest, tokens["sequence"].to_numpy(np.int64), np.where(np.isfinite(delta), delta, 0.0))
    clipped = updates["clip_flag"].str.startswith("clip_").fillna(False).to_numpy(np.bool_)
    return pd.DataFrame(
        {
            "iteration": iteration, "sequence": sequences["sequence"],
            "tokens": sequences["response_length"], "score": sequences["scores"], "max_abs_delta": largest,
            "clipped": np.bincount(updates["sequence"].to_numpy(np.int64)[clipped], minlength=len(sequences)),
        }
    )  # fmt: skip
