"""Read a run once, with one iteration in memory at a time, and return the counts and rows for its page.

All numbers are float64 from the recorded columns. Separate counts have the values that are not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clipping.clip_flags import recorded_clipped
from ppo_repro.analysis.mismatch import parity
from ppo_repro.analysis.mismatch.parity import Parity, parity_of
from ppo_repro.analysis.pairs.run_pairs import deltas
from ppo_repro.analysis.report import curves
from ppo_repro.analysis.report.run_facts import Facts, read_facts
from ppo_repro.analysis.report.run_figures import FLAG_WORDS
from ppo_repro.analysis.report.run_kinds import KINDS
from ppo_repro.analysis.stats.clusters import Floats
from ppo_repro.config.files import LANGUAGE
from ppo_repro.records import reader
from ppo_repro.runs.summary import draws_of_records
from ppo_repro.statistics.draws import NONE, Draws

Counts = npt.NDArray[np.int64]

DELTA_EDGES: Floats = 10.0 ** np.linspace(-9.0, 1.0, 31)  # of |old - rollout|, nats
QUANTILES = (0.0, 0.01, 0.5, 0.99, 1.0)
SEQUENCES = ["iteration", "sequence", "response_length", "scores", "is_correct"]
TOKENS = [*parity.TOKENS, "entropies", "ref_kl", "cumulative_probs"]
UPDATES = [*parity.UPDATES, "clip_flag"]


@dataclass(frozen=True)
class Scan:
    """Numbers for a run's page; `responses` is empty for a control run.

    Curves, values and responses are of all iterations; the other numbers are of those that the run itself computed.
    """

    curves: pd.DataFrame
    deltas: Counts  # of `delta_counts`
    nonfinite_deltas: int
    nonfinite_ratios: int
    ratios: pd.DataFrame  # of `ratio_quantiles`
    flags: pd.DataFrame  # iteration, token_updates and FLAG_WORDS: counts
    values: dict[int, Floats]  # scores, or returns of the episodes that ended, by iteration
    responses: pd.DataFrame  # of `_response_summary`
    draws: Draws
    parity: Parity


def summary_tables(facts: Facts) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the tables `iterations` and `steps`. Raises UserError if they are missing or damaged."""
    return (
        reader.read_iterations(facts.run_dir, recorded=facts.manifest),
        reader.read_steps(facts.run_dir, recorded=facts.manifest),
    )


def read_sampled(facts: Facts, iteration: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read `sequences` and `tokens` of one iteration of a language run, with the columns that its curves need."""
    run_dir, one, recorded = facts.run_dir, [iteration], facts.manifest
    return (
        reader.read_sequences(run_dir, iterations=one, columns=SEQUENCES, recorded=recorded),
        reader.read_tokens(run_dir, iterations=one, columns=TOKENS, recorded=recorded),
    )


def delta_counts(delta: Floats) -> Counts:
    """Count tokens with a finite delta by |delta| in bins of DELTA_EDGES: int64 [2, bins] for delta > 0 and delta < 0.

    Outer bins are open.
    """
    finite = delta[np.isfinite(delta)]
    inside = np.clip(np.abs(finite), DELTA_EDGES[0], DELTA_EDGES[-1])
    return np.array([np.histogram(inside[where], DELTA_EDGES)[0] for where in (finite > 0, finite < 0)])


def ratio_quantiles(iteration: int, updates: pd.DataFrame) -> pd.DataFrame:
    """Return iteration, epoch, minibatch and QUANTILES of the finite ratios of each step."""
    finite = updates[np.isfinite(updates["ratios"].to_numpy(np.float64))].astype({"ratios": "float64"})
    table = finite.groupby(["epoch", "minibatch"])["ratios"].quantile(list(QUANTILES)).unstack()
    return table.reindex(columns=QUANTILES).reset_index().assign(iteration=iteration)


def scan_run(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame) -> Scan:
    """Read all iterations of a run of PPO once, and return the numbers for its page."""
    run_dir, recorded = facts.run_dir, facts.manifest
    sampled, flags = list[dict[str, float | str]](), list[dict[str, int]]()
    ratios, responses, parities = list[pd.DataFrame](), list[pd.DataFrame](), list[Parity]()
    values: dict[int, Floats] = returns_of(facts) if facts.is_control else {}
    draws = NONE
    counted, nonfinite_deltas, nonfinite_ratios = np.zeros((2, len(DELTA_EDGES) - 1), np.int64), 0, 0
    for iteration in facts.iterations:
        one = [iteration]
        updates = reader.read_updates(run_dir, iterations=one, columns=UPDATES, recorded=recorded)
        if facts.is_control:
            tokens, drawn = reader.read_tokens(run_dir, iterations=one, columns=parity.TOKENS, recorded=recorded), NONE
        else:
            sequences, tokens = read_sampled(facts, iteration)
            drawn = draws_of_records(iteration, tokens)
            sampled += curves.sampled_rows(iteration, sequences, tokens, drawn)
            responses.append(_response_summary(iteration, sequences, tokens, updates))
            values[iteration] = sequences["scores"].to_numpy(np.float64)
        if iteration not in recorded.own_iterations:
            continue
        draws += drawn
        delta, flag = deltas(tokens), updates["clip_flag"]
        nonfinite_deltas += int(np.count_nonzero(~np.isfinite(delta)))
        # null reads as NaN; only the flag says whether there was a step
        broken = ~np.isfinite(updates["ratios"].to_numpy(np.float64)) & flag.notna().to_numpy()
        nonfinite_ratios += int(broken.sum())
        counted += delta_counts(delta)
        parities.append(parity_of(tokens, updates))
        ratios.append(ratio_quantiles(iteration, updates))
        counts = flag.value_counts()
        counts_of = {name: int(counts.get(name, 0)) for name in FLAG_WORDS}
        flags.append({"iteration": iteration, "token_updates": int(counts.sum()), **counts_of})
    if facts.is_control:
        sampled = curves.return_rows(values)
    all_curves = _with_recorded(facts, sampled, iterations, steps)
    of_responses = pd.concat(responses, ignore_index=True) if responses else pd.DataFrame()
    return Scan(
        curves=all_curves,
        deltas=counted,
        nonfinite_deltas=nonfinite_deltas,
        nonfinite_ratios=nonfinite_ratios,
        ratios=pd.concat(ratios, ignore_index=True),
        flags=pd.DataFrame(flags),
        values=values,
        responses=of_responses,
        draws=draws,
        parity=reduce(add, parities),
    )


def run_curves(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return every curve of a run of any kind, as rows iteration, metric, value, low, high."""
    sampled: list[dict[str, float | str]] = []
    if facts.is_control:
        sampled = curves.return_rows(returns_of(facts))
    elif facts.manifest.kind == LANGUAGE:
        for iteration in facts.iterations:
            sequences, tokens = read_sampled(facts, iteration)
            sampled += curves.sampled_rows(iteration, sequences, tokens, draws_of_records(iteration, tokens))
    return _with_recorded(facts, sampled, iterations, steps)


def _with_recorded(
    facts: Facts, sampled: list[dict[str, float | str]], iterations: pd.DataFrame, steps: pd.DataFrame
) -> pd.DataFrame:
    """Return sampled and recorded curves; no accuracies if responses cannot be right or wrong."""
    kind = KINDS[facts.manifest.kind]
    recorded = curves.recorded_rows(iterations, steps, facts.manifest.final, kind.metrics)
    metrics = pd.concat([pd.DataFrame(sampled), recorded], ignore_index=True) if sampled else recorded
    return metrics if facts.is_judged else metrics[~metrics["metric"].isin(kind.accuracies)]


@dataclass(frozen=True)
class OneRun:
    """One run of a page about several: its facts, the table `iterations`, and its curves."""

    facts: Facts
    iterations: pd.DataFrame
    curves: pd.DataFrame

    @property
    def unequal(self) -> int:
        """Return the number of log-probs that differ between sampler and trainer."""
        return int(self.iterations["unequal_old_rollout_logprobs"].sum())

    @property
    def tokens(self) -> int:
        """Return the number of response tokens, or of environment steps."""
        return int(self.iterations["tokens"].sum())


def read_run(run_dir: Path) -> OneRun:
    """Read a run of any kind. Raises UserError if it is damaged or has no complete iteration."""
    facts = read_facts(run_dir)
    iterations, steps = summary_tables(facts)
    return OneRun(facts, iterations, run_curves(facts, iterations, steps))


def returns_of(facts: Facts) -> dict[int, Floats]:
    """Return the returns of a control run's ended episodes, by iteration."""
    names = ["iteration", "episode_return"]
    episodes = reader.read_sequences(facts.run_dir, columns=names, recorded=facts.manifest)
    ended = episodes[episodes["episode_return"].notna()]
    groups = ended.groupby("iteration", sort=True)["episode_return"]
    return {int(str(iteration)): values.to_numpy(np.float64) for iteration, values in groups}


def _response_summary(
    iteration: int, sequences: pd.DataFrame, tokens: pd.DataFrame, updates: pd.DataFrame
) -> pd.DataFrame:
    """Return one row per response: iteration, sequence, tokens, score, max_abs_delta (nats), clipped (updates)."""
    delta = np.abs(deltas(tokens))
    largest = np.zeros(len(sequences))
    # NaN would win every comparison; the page counts differences that are not finite elsewhere
    np.maximum.at(largest, tokens["sequence"].to_numpy(np.int64), np.where(np.isfinite(delta), delta, 0.0))
    clipped = recorded_clipped(updates["clip_flag"])
    return pd.DataFrame(
        {
            "iteration": iteration, "sequence": sequences["sequence"],
            "tokens": sequences["response_length"], "score": sequences["scores"], "max_abs_delta": largest,
            "clipped": np.bincount(updates["sequence"].to_numpy(np.int64)[clipped], minlength=len(sequences)),
        }
    )  # fmt: skip
