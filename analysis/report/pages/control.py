"""The page of one control run: returns, learning and clipping of PPO on a Gymnasium environment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.mismatch.parity import Parity, parity
from analysis.report.drawing.figure import Section
from analysis.report.drawing.page import page, summary_html
from analysis.report.figures import clipping, counts, curves, metrics, mismatch
from analysis.report.figures.clipping import ClipBounds
from analysis.report.figures.scores import distribution_figures
from analysis.report.pages.run import folded
from analysis.report.reading.facts import (
    ControlFacts,
    agreement_of,
    control_verdicts,
    parity_verdicts,
    run_facts,
    state_verdict,
)
from analysis.report.reading.load import summary_tables
from analysis.report.reading.numbers import CONTROL, CONTROL_STEPS, first_and_last_numbers, whole_run_numbers
from ppo_repro.records import reader, times


@dataclass(frozen=True)
class ControlScan:
    """The counts and rows of one pass over the iterations of a control run."""

    returns: dict[int, counts.Floats]  # of the episodes that ended, by iteration
    deltas: counts.Counts
    ratios: pd.DataFrame
    quadrants: counts.Counts
    flags: pd.DataFrame
    extremes: pd.DataFrame


def control_page(facts: ControlFacts) -> str:
    """The report of one control run as HTML; the same records give the same bytes."""
    run_dir, only = facts.run_dir, facts.iterations
    iterations, steps = summary_tables(run_dir, only)
    scan = scan_control(facts)
    counted = parity(run_dir, iterations=only, allow_incomplete=True)
    verdicts = (
        *state_verdict(facts),
        *parity_verdicts(counted, agreement_of(facts.config)),
        *control_verdicts(facts, iterations),
    )
    spent = times.by_phase(run_dir, facts.manifest, times.phases_of(iterations))
    tables = (
        ("Whole run", whole_run_numbers(_counts(iterations, steps), counted, "steps", spent)),
        ("First and last iteration", first_and_last_numbers(iterations, steps, CONTROL, CONTROL_STEPS)),
    )
    named = [("this run", control_curves(facts, iterations, steps, scan.returns))]
    learning = curves.metric_figures(metrics.CONTROL_LEARNING, named)
    optimisation = curves.metric_figures(metrics.CONTROL_OPTIMISATION, named)
    sections = (
        Section("learning", "Learning", (), (*learning, *distribution_figures(scan.returns, "return", "episodes"))),
        Section("optimisation", "Optimisation", (), optimisation),
        _mismatch(scan, counted),
        _clipping(scan, steps),
    )
    return page(facts.name, summary_html(verdicts, run_facts(facts), tables, folded(facts)), sections)


def control_curves(
    facts: ControlFacts, iterations: pd.DataFrame, steps: pd.DataFrame, returns: dict[int, counts.Floats]
) -> pd.DataFrame:
    """iteration, metric, value, low, high of every curve of a control run."""
    rows = [row for iteration, found in returns.items() for row in curves.episode_rows(iteration, found)]
    recorded = curves.recorded_rows(
        iterations, steps, facts.manifest.final, metrics.CONTROL_OF_ITERATIONS, metrics.CONTROL_OF_STEPS
    )
    return pd.concat([pd.DataFrame(rows), recorded], ignore_index=True) if rows else recorded


def returns_of(facts: ControlFacts) -> dict[int, counts.Floats]:
    """The returns of the episodes that ended, by iteration."""
    names = ["iteration", "episode_return"]
    found = reader.read_sequences(facts.run_dir, iterations=facts.iterations, columns=names, allow_incomplete=True)
    ended = found[found["episode_return"].notna()]
    return {
        int(str(iteration)): rows["episode_return"].to_numpy(np.float64)
        for iteration, rows in ended.groupby("iteration", sort=True)
    }


def scan_control(facts: ControlFacts) -> ControlScan:
    """One pass over the iterations, with one in memory at a time."""
    names = ["iteration", "epoch", "minibatch", "advantages", "ratios", "clip_flag"]
    logprobs = ["iteration", "rollout_logprobs", "old_logprobs"]
    ratios, flags, extremes = list[pd.DataFrame](), list[dict[str, float]](), list[dict[str, float]]()
    deltas = np.zeros(len(counts.DELTA_EDGES) - 1, dtype=np.int64)
    quadrants = np.zeros((len(counts.ADVANTAGE_EDGES) - 1, len(counts.RATIO_EDGES) - 1), dtype=np.int64)
    for iteration in facts.iterations:
        only = [iteration]
        updates = reader.read_updates(facts.run_dir, iterations=only, columns=names, allow_incomplete=True)
        tokens = reader.read_tokens(facts.run_dir, iterations=only, columns=logprobs, allow_incomplete=True)
        deltas = deltas + counts.histogram(counts.deltas(tokens), counts.DELTA_EDGES)
        quadrants = quadrants + counts.quadrant_grid(updates["advantages"].to_numpy(np.float64), updates)
        ratios.append(counts.ratio_histogram(updates))
        flags.append(counts.flag_row(iteration, updates))
        extremes.append(counts.extremes_row(iteration, updates))
    by_step = ["epoch", "minibatch", "bin_lo", "bin_hi"]
    added = pd.concat(ratios, ignore_index=True).groupby(by_step, as_index=False, sort=True).sum()
    return ControlScan(returns_of(facts), deltas, added, quadrants, pd.DataFrame(flags), pd.DataFrame(extremes))


def _counts(iterations: pd.DataFrame, steps: pd.DataFrame) -> dict[str, int]:
    return {
        "iterations": len(iterations),
        "environment steps": int(iterations["tokens"].sum()),
        "episodes that ended": int(iterations["episodes"].sum()),
        "optimizer steps": len(steps),
    }


def _mismatch(scan: ControlScan, counted: Parity) -> Section:
    if counted.unequal_old_rollout_logprobs == 0:
        note = f"All {counted.tokens:,} differences of log-probs are exactly 0."
        return Section("mismatch", "Sampler and trainer", (note,), ())
    return Section("mismatch", "Sampler and trainer", (), (mismatch.delta_figure(scan.deltas),))


def _clipping(scan: ControlScan, steps: pd.DataFrame) -> Section:
    last = float(steps["clip_range"].iloc[-1])
    bounds = ClipBounds(1.0 - last, 1.0 + last, bool(steps["clip_range"].nunique() > 1))
    figures = (
        clipping.ratio_figure(scan.ratios, bounds),
        clipping.flag_figure(scan.flags),
        clipping.quadrant_figure(scan.quadrants, bounds),
        clipping.extremes_figure(scan.extremes, bounds),
    )
    return Section("clipping", "Ratios and clipping", (), figures)
