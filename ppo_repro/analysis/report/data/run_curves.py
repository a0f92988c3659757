"""Read the curves of a run: each metric by iteration, computed from its samples or recorded in its tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis import agreement
from ppo_repro.analysis.report.data.metrics import Metric
from ppo_repro.analysis.report.data.run_facts import Facts, read_facts
from ppo_repro.config.files import CONTROL
from ppo_repro.records import reader
from ppo_repro.records.manifest import has_responses
from ppo_repro.runs.summary import draws_of_records
from ppo_repro.statistics import clusters
from ppo_repro.statistics.clusters import Floats, Ints, Ratio
from ppo_repro.statistics.draws import Draws

_SEQUENCE_COLUMNS = ["iteration", "sequence", "response_length", "scores", "is_correct"]
_TOKEN_COLUMNS = [*agreement.TOKENS_COMPARED, "entropies", "ref_kl", "cumulative_probs"]


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
    def ends(self) -> tuple[float, float]:
        """Return the first and the last value that is a number; NaN if none is."""
        numbers = self.value[~np.isnan(self.value)]
        return (float(numbers[0]), float(numbers[-1])) if len(numbers) else (math.nan, math.nan)

    @property
    def table(self) -> pd.DataFrame:
        """Return a row per iteration, with the fields as columns."""
        return pd.DataFrame({name: values for name, values in vars(self).items() if values is not None})


Curves = Mapping[str, Curve]  # of a run, by metric


@dataclass(frozen=True)
class OneRun:
    """One run of a page about several: its facts, the table `iterations`, and its curves."""

    facts: Facts
    iterations: pd.DataFrame  # without the iterations that a fork copied, which have the settings of its origin
    curves: Curves

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


def run_curves(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame) -> Curves:
    """Return every curve of a run of any kind, by metric."""
    sampled: dict[int, Mapping[str, Ratio]] = {}
    for iteration in facts.iterations:
        if has_responses(facts.manifest):
            sequences, tokens = read_sampled(facts, iteration)
            sampled[iteration] = response_means(sequences, tokens, draws_of_records(iteration, tokens))
        elif facts.manifest.kind == CONTROL:
            sampled[iteration] = return_means(returns_of(facts, iteration))
    return curves_of(facts, sampled, iterations, steps)


def curves_of(
    facts: Facts, sampled: Mapping[int, Mapping[str, Ratio]], iterations: pd.DataFrame, steps: pd.DataFrame
) -> Curves:
    """Return the curves of a run by metric; no accuracies if responses cannot be right or wrong.

    Args:
        sampled: the means of the samples, by iteration and metric.
        iterations: the table `iterations`; a metric that is also a final result has a point after the last iteration.
        steps: the table `steps`; low and high are the smallest and largest step of the iteration.
    """

    def curve(metric: Metric) -> Curve:
        if metric.source == "samples":
            return _of_means({i: means[metric.key] for i, means in sampled.items() if metric.key in means})
        if metric.source == "steps":
            return _of_steps(steps, metric.key)
        return _of_iterations(iterations, metric.key, facts.manifest.final.get(metric.key))

    meant = [metric for metric in facts.content.metrics if facts.is_judged or not metric.accuracy_of]
    return {metric.key: found for metric in meant if len((found := curve(metric)).iteration)}


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


def response_means(sequences: pd.DataFrame, tokens: pd.DataFrame, drawn: Draws) -> dict[str, Ratio]:
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


def return_means(returns: Floats) -> dict[str, Ratio]:
    """Return the mean return of the episodes that ended in an iteration; {} if none ended."""
    return {"episode_return_mean": clusters.mean(returns)} if len(returns) else {}


def first_and_last(metrics: Sequence[Metric], curves: Curves) -> pd.DataFrame:
    """Return the first and last value of the metrics' curves: quantity, first, last, unit."""
    rows = [(m.title, *curves[m.key].ends, m.unit) for m in metrics if m.key in curves]
    return pd.DataFrame(rows, columns=["quantity", "first", "last", "unit"])
