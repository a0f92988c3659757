"""Compute the curves of a run, each metric by iteration, and their means over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.mean_text import finite_of
from ppo_repro.analysis.report.data.metrics import Metric, Range
from ppo_repro.analysis.report.data.run_facts import Facts, read_facts
from ppo_repro.analysis.significance import one_sample, t_interval
from ppo_repro.config.kinds import CONTROL
from ppo_repro.records.manifest import has_responses
from ppo_repro.runs.results import AgreementCounts, Change, draws_of_records, recorded_agreement
from ppo_repro.statistics import clusters
from ppo_repro.statistics.clusters import Floats, Ints, Ratio
from ppo_repro.statistics.draws import Draws

MANY_SEEDS = 5  # pages show fewer seeds one by one, not by an interval
_SEQUENCE_COLUMNS = ["iteration", "sequence", "response_length", "scores", "is_correct"]
_TOKEN_COLUMNS = ["sequence", "rollout_logprobs", "old_logprobs", "entropies", "ref_kl", "cumulative_probs"]


@dataclass(frozen=True)
class Curve:
    """A metric by iteration; `low` and `high` are the ends of its band, NaN without a band."""

    iteration: Ints
    value: Floats
    low: Floats
    high: Floats
    seeds: Ints | None = None  # of a mean over seeds: how many seeds each value has

    def since(self, iteration: int) -> Curve:
        """Return the part from an iteration on."""
        part = self.iteration >= iteration
        return Curve(self.iteration[part], self.value[part], self.low[part], self.high[part])

    @property
    def ends(self) -> Change:
        """Return the first and the last value that is a number; NaN if none is."""
        numbers = self.value[~np.isnan(self.value)]
        return Change(float(numbers[0]), float(numbers[-1])) if len(numbers) else Change(math.nan, math.nan)

    @property
    def table(self) -> pd.DataFrame:
        """Return a row per iteration, with the fields as columns."""
        return pd.DataFrame({name: values for name, values in vars(self).items() if values is not None})


Curves = Mapping[str, Curve]  # of a run, by metric
Means = Mapping[str, Ratio]  # of the samples of one iteration, by metric: mean and standard error


@dataclass(frozen=True)
class OneRun:
    """One run of a page about several: its facts and its curves."""

    facts: Facts
    curves: Curves

    @property
    def agreement(self) -> AgreementCounts:
        """Return the counts of unequal bits of a run of PPO, without copied iterations."""
        return recorded_agreement(self.facts.own_iterations)


def read_run(run_dir: Path) -> OneRun:
    """Read a run of any kind. Raises UserError if it is damaged or has no complete iteration."""
    facts = read_facts(run_dir)
    return OneRun(facts, run_curves(facts))


def run_curves(facts: Facts) -> Curves:
    """Return every curve of a run of any kind, by metric."""
    sampled: dict[int, Means] = {}
    for iteration in range(facts.manifest.num_iterations):
        if has_responses(facts.manifest):
            sequences, tokens = read_sampled(facts, iteration)
            sampled[iteration] = response_means(sequences, tokens, draws_of_records(iteration, tokens))
        elif facts.manifest.kind == CONTROL:
            sampled[iteration] = return_means(returns_of(facts, iteration))
    return curves_of(facts, sampled)


def curves_of(facts: Facts, sampled: Mapping[int, Means]) -> Curves:
    """Return the curves of a run by metric; no accuracies if responses cannot be right or wrong.

    A metric of `iterations` that is also a final result has a point after the last iteration. The band of a metric of
    `steps` is from the smallest to the largest step of an iteration. `sampled` has the means of each iteration.
    """

    def curve(metric: Metric) -> Curve:
        if metric.source == "samples":
            return _of_means({i: means[metric.key] for i, means in sampled.items() if metric.key in means})
        if metric.source == "steps":
            return _of_steps(facts.steps, metric.key)
        return _of_iterations(facts.iterations, metric.key, facts.manifest.final.get(metric.key))

    meant = [metric for metric in facts.content.metrics if facts.is_judged or not metric.accuracy_of]
    curves = {metric.key: curve(metric) for metric in meant}
    return {key: known for key, known in curves.items() if len(known.iteration)}


def _of_means(means: Mapping[int, Ratio]) -> Curve:
    value, error = (np.array([mean[k] for mean in means.values()], dtype=np.float64) for k in (0, 1))
    return Curve(np.array([*means], dtype=np.int64), value, value - error, value + error)


def _of_iterations(iterations: pd.DataFrame, name: str, final: float | str | None) -> Curve:
    known = iterations[iterations[name].notna()]
    at, value = known["iteration"].to_numpy(np.int64), known[name].to_numpy(np.float64)
    if final is not None and not math.isnan(float(final)):
        at, value = np.append(at, len(iterations)), np.append(value, float(final))
    no_band = np.full(len(at), np.nan)
    return Curve(at, value, no_band, no_band)


def _of_steps(steps: pd.DataFrame, name: str) -> Curve:
    known = steps.groupby("iteration")[name].agg(["mean", "min", "max"]).dropna(subset="mean")
    return Curve(known.index.to_numpy(np.int64), *known.to_numpy(np.float64).T)


def read_sampled(facts: Facts, iteration: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read `sequences` and `tokens` of one iteration of a language run, with the columns that its page needs."""
    tables = facts.tables
    return tables.read("sequences", _SEQUENCE_COLUMNS, iteration), tables.read("tokens", _TOKEN_COLUMNS, iteration)


def returns_of(facts: Facts, iteration: int) -> Floats:
    """Return the returns of the episodes of a control run that ended in an iteration."""
    returns = facts.tables.read("sequences", ["episode_return"], iteration)["episode_return"]
    return returns.dropna().to_numpy(np.float64)


def response_means(sequences: pd.DataFrame, tokens: pd.DataFrame, drawn: Draws) -> Means:
    """Return the metrics of the sampled responses of one iteration; `drawn` has the draws of their tokens."""
    owner = tokens["sequence"].to_numpy(np.int64)
    lengths = sequences["response_length"].to_numpy(np.float64)

    def per_sequence(name: str) -> Floats:
        return np.asarray(np.bincount(owner, tokens[name].to_numpy(np.float64), len(sequences)), dtype=np.float64)

    return {
        "score_mean": clusters.mean(sequences["scores"].to_numpy(np.float64)),
        "accuracy": clusters.mean(sequences["is_correct"].to_numpy(np.float64)),
        "ref_kl_per_sequence": clusters.mean(per_sequence("ref_kl")),
        "entropy": clusters.ratio_of_sums(per_sequence("entropies"), lengths),
        "response_length_mean": clusters.mean(lengths),
        "excess": Ratio(drawn.mean, drawn.error),
    }


def return_means(returns: Floats) -> Means:
    """Return the mean return of the episodes that ended in an iteration; {} if none ended."""
    return {"episode_return_mean": clusters.mean(returns)} if len(returns) else {}


def first_and_last(metrics: Sequence[Metric], curves: Curves) -> pd.DataFrame:
    """Return the first and last value of the metrics' curves: quantity, first, last, unit."""
    rows = [(m.title, *curves[m.key].ends, m.unit) for m in metrics if m.key in curves]
    return pd.DataFrame(rows, columns=["quantity", "first", "last", "unit"])


def over_seeds(runs: Sequence[Curves], metrics: Sequence[Metric], score: Range) -> Curves:
    """Return the mean over seeds of each metric that has a finite value; `score` is the possible range of scores."""
    means = {}
    for metric in metrics:
        curves = [run[metric.key] for run in runs if metric.key in run]
        if any(np.isfinite(curve.value).any() for curve in curves):
            means[metric.key] = _mean(curves, score if metric.possible is None else metric.possible)
    return means


def _mean(seeds: Sequence[Curve], possible: Range) -> Curve:
    """Return the mean of one metric; an iteration's mean is over the seeds that have a finite value there.

    low and high are the ends of the 95 % Student interval, clipped to the possible values. With fewer than MANY_SEEDS
    seeds an interval says little, so low and high are the smallest and the largest value.
    """
    by_seed = pd.concat([pd.Series(seed.value, seed.iteration) for seed in seeds], axis=1).sort_index()
    rows = []
    for iteration, values in zip(by_seed.index, by_seed.to_numpy(np.float64), strict=True):
        finite, _ = finite_of(values)  # the column `seeds` counts them
        if len(finite):
            estimate = one_sample(finite)
            ends = (finite.min(), finite.max()) if len(finite) < MANY_SEEDS else t_interval(estimate, 0.95)
            rows.append((iteration, estimate.mean, *np.clip(ends, *possible), len(finite)))
    at, mean, low, high, counts = np.array(rows, dtype=np.float64).T
    return Curve(at.astype(np.int64), mean, low, high, counts.astype(np.int64))
