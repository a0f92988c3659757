"""Read the curves of a run: each metric by iteration, computed from its samples or recorded in its tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis import agreement
from ppo_repro.analysis.report.data.metrics import Plotted
from ppo_repro.analysis.report.data.run_facts import Facts, read_facts
from ppo_repro.config.files import CONTROL
from ppo_repro.records import reader
from ppo_repro.records.manifest import has_responses
from ppo_repro.runs.summary import draws_of_records
from ppo_repro.statistics import clusters
from ppo_repro.statistics.clusters import Floats, Ratio
from ppo_repro.statistics.draws import Draws

_SEQUENCE_COLUMNS = ["iteration", "sequence", "response_length", "scores", "is_correct"]
_TOKEN_COLUMNS = [*agreement.TOKENS_COMPARED, "entropies", "ref_kl", "cumulative_probs"]


class Point(NamedTuple):
    """A point of a curve, with the ends of its band. A frame of curves is a pandas frame with one row per Point."""

    iteration: int
    metric: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class OneRun:
    """One run of a page about several: its facts, the table `iterations`, and its curves."""

    facts: Facts
    iterations: pd.DataFrame  # without the iterations that a fork copied, which have the settings of its origin
    curves: pd.DataFrame  # a frame of curves

    @property
    def unequal(self) -> int:
        """Return the number of log-probs that differ between sampler and trainer, without copied iterations."""
        return int(self.iterations["unequal_old_rollout_logprobs"].sum())

    @property
    def tokens(self) -> int:
        """Return the number of response tokens, or of environment steps, without copied iterations."""
        return int(self.iterations["tokens"].sum())


def read_run(run_dir: Path) -> OneRun:
    """Read a run of any kind. Raises UserError if it is damaged or has no complete iteration."""
    facts = read_facts(run_dir)
    iterations, steps = summary_tables(facts)
    return OneRun(facts, reader.own_rows(iterations, facts.manifest), run_curves(facts, iterations, steps))


def summary_tables(facts: Facts) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the tables `iterations` and `steps`. Raises UserError if they are missing or damaged."""
    return (
        reader.read_iterations(facts.run_dir, recorded=facts.manifest),
        reader.read_steps(facts.run_dir, recorded=facts.manifest),
    )


def run_curves(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return every curve of a run of any kind as a frame of curves."""
    sampled: list[Point] = []
    for iteration in facts.iterations:
        if has_responses(facts.manifest):
            sequences, tokens = read_sampled(facts, iteration)
            sampled += sampled_points(iteration, sequences, tokens, draws_of_records(iteration, tokens))
        elif facts.manifest.kind == CONTROL:
            sampled += return_points(iteration, returns_of(facts, iteration))
    return with_recorded(facts, sampled, iterations, steps)


def with_recorded(facts: Facts, sampled: list[Point], iterations: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return sampled and recorded curves as a frame of curves; no accuracies if responses cannot be right or wrong."""
    recorded = recorded_rows(iterations, steps, facts.manifest.final, facts.content.metrics)
    curves = pd.concat([pd.DataFrame(sampled), recorded], ignore_index=True) if sampled else recorded
    return curves if facts.is_judged else curves[~curves["metric"].isin(facts.content.accuracies)]


def read_sampled(facts: Facts, iteration: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read `sequences` and `tokens` of one iteration of a language run, with the columns that its curves need."""
    run_dir, one, recorded = facts.run_dir, [iteration], facts.manifest
    return (
        reader.read_sequences(run_dir, iterations=one, columns=_SEQUENCE_COLUMNS, recorded=recorded),
        reader.read_tokens(run_dir, iterations=one, columns=_TOKEN_COLUMNS, recorded=recorded),
    )


def returns_of(facts: Facts, iteration: int) -> Floats:
    """Return the returns of the episodes of a control run that ended in an iteration."""
    columns, one = ["episode_return"], [iteration]
    episodes = reader.read_sequences(facts.run_dir, iterations=one, columns=columns, recorded=facts.manifest)
    return episodes["episode_return"].dropna().to_numpy(np.float64)


def sampled_points(iteration: int, sequences: pd.DataFrame, tokens: pd.DataFrame, drawn: Draws) -> list[Point]:
    """Return the metrics of the sampled responses of one iteration; `drawn` has the draws of their tokens."""
    owner = tokens["sequence"].to_numpy(np.int64)
    lengths = sequences["response_length"].to_numpy(np.float64)

    def per_sequence(name: str) -> Floats:
        return np.asarray(np.bincount(owner, tokens[name].to_numpy(np.float64), len(sequences)), dtype=np.float64)

    estimates = {
        "score_mean": clusters.mean(sequences["scores"].to_numpy(np.float64)),
        "accuracy": clusters.mean(sequences["is_correct"].to_numpy(np.float64)),
        "ref_kl_per_sequence": clusters.mean(per_sequence("ref_kl")),
        "entropy": clusters.ratio_of_sums(per_sequence("entropies"), lengths),
        "response_length_mean": clusters.mean(lengths),
        "excess": Ratio(drawn.mean, drawn.error),
    }
    return [_point(iteration, name, estimate) for name, estimate in estimates.items()]


def recorded_rows(
    iterations: pd.DataFrame,
    steps: pd.DataFrame,
    final: Mapping[str, float | int | str],
    metrics: Sequence[Plotted],
) -> pd.DataFrame:
    """Return the metrics of the tables `iterations` and `steps` as a frame of curves.

    Args:
        iterations: the table `iterations`; low and high of its metrics are NaN.
        steps: the table `steps`; low and high are the smallest and largest step of the iteration.
        final: the final results; a metric of `iterations` in them has a point after the last iteration.
        metrics: metrics of any source.
    """
    tables = []
    for name in (metric.key for metric in metrics if metric.source == "iterations"):
        rows = iterations.loc[iterations[name].notna(), ["iteration", name]].rename(columns={name: "value"})
        if name in final and not math.isnan(float(final[name])):
            rows.loc[len(iterations)] = [len(iterations), float(final[name])]
        tables.append(rows.assign(metric=name, low=np.nan, high=np.nan))
    for name in (metric.key for metric in metrics if metric.source == "steps"):
        grouped = steps.groupby("iteration", as_index=False)[name].agg(value="mean", low="min", high="max")
        tables.append(grouped[grouped["value"].notna()].assign(metric=name))
    filled = [table for table in tables if len(table)]
    columns = list(Point._fields)
    return pd.concat(filled, ignore_index=True)[columns] if filled else pd.DataFrame(columns=columns)


def first_and_last(metrics: Sequence[Plotted], curves: pd.DataFrame) -> pd.DataFrame:
    """Return the first and last value of the metrics' curves: quantity, first, last, unit."""
    ends = curves.sort_values("iteration").groupby("metric")["value"].agg(["first", "last"])
    rows = [(m.title, *map(float, ends.loc[m.key]), m.unit) for m in metrics if m.key in ends.index]
    return pd.DataFrame(rows, columns=["quantity", "first", "last", "unit"])


def return_points(iteration: int, returns: Floats) -> list[Point]:
    """Return the mean return of the episodes that ended in an iteration; [] if none ended."""
    return [_point(iteration, "episode_return_mean", clusters.mean(returns))] if len(returns) else []


def _point(iteration: int, metric: str, estimate: Ratio) -> Point:
    mean, error = estimate
    return Point(iteration, metric, mean, mean - error, mean + error)
