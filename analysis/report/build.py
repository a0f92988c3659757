"""Builds the HTML file of a recorded run, or of a folder of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.mismatch.parity import Parity, parity
from analysis.report import analyses
from analysis.report.analyses import Findings
from analysis.report.drawing.figure import Section
from analysis.report.drawing.markup import number
from analysis.report.facts import (
    RunFacts,
    accuracy_numbers,
    accuracy_verdict,
    clip_bounds,
    first_and_last_numbers,
    learning_verdicts,
    nonfinite_verdict,
    parity_verdicts,
    read_facts,
    run_facts,
    whole_run_numbers,
)
from analysis.report.figures import clipping, counts, curves, mismatch, units
from analysis.report.grid import grid_page, runs_below
from analysis.report.load import IterationRecords, iterations_of
from analysis.report.page import page, summary_html
from analysis.report.responses import MAX_TOKENS, response_summary, select, token_data
from ppo_repro.disk import durable
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader, times

DEFAULT_RESPONSES = 60


@dataclass(frozen=True)
class Scan:
    """The counts and rows of one pass over a run's iterations; see `figures.counts` and `responses`."""

    curves: pd.DataFrame
    probabilities: counts.Counts
    deltas: counts.Counts
    nonfinite_deltas: int
    ratios: pd.DataFrame
    quadrants: counts.Counts
    overshoot: pd.DataFrame
    flags: pd.DataFrame
    extremes: pd.DataFrame
    text: pd.DataFrame
    responses: pd.DataFrame


def write_report(target: Path, out: Path | None, responses: int | None) -> tuple[Path, int]:
    """Write the report of a run or of a folder of runs; return its path and its size in bytes. Raises UserError."""
    if (target / manifest.FILE_NAME).exists() or not target.is_dir():
        text = run_page(target, DEFAULT_RESPONSES if responses is None else responses)
    else:
        if responses is not None:
            raise UserError(f"--responses {responses}: a grid has no token view; give the folder of one run")
        text = grid_page(target, runs_below(target))
    path = target / "report.html" if out is None else out
    data = text.encode()
    durable.atomic_write(path, data)
    return path, len(data)


def run_page(run_dir: Path, responses: int) -> str:
    """The report of one run as HTML; the same records give the same bytes."""
    facts = read_facts(run_dir)
    iterations, steps = reader.read_iterations(run_dir), reader.read_steps(run_dir)
    scan = scan_run(facts, iterations, steps)
    counted = parity(run_dir)
    of_mismatch = analyses.mismatch(run_dir) if counted.unequal_old_rollout_logprobs else Findings((), ())
    verdicts = (
        *parity_verdicts(counted, facts.config),
        *of_mismatch.verdicts,
        *accuracy_verdict(facts.accuracy),
        *nonfinite_verdict(scan.extremes, scan.nonfinite_deltas),
        *learning_verdicts(facts, iterations),
    )
    tables = (
        (
            "Whole run",
            whole_run_numbers(
                iterations, counted, times.by_phase(run_dir, facts.manifest, times.phases_of(iterations))
            ),
        ),
        ("First and last iteration", first_and_last_numbers(iterations, steps)),
        *accuracy_numbers(facts.accuracy),
    )
    summary = summary_html(verdicts, run_facts(facts), tables, facts.config_text)
    sections = (
        Section("learning", "Learning", (), curves.learning_figures([("this run", scan.curves)])),
        mismatch_section(scan, counted, of_mismatch),
        clipping_section(facts, iterations, scan),
        text_section(scan),
    )
    if responses == 0:
        return page(facts.name, summary, sections, None, "")
    selected = select(scan.responses, responses)
    return page(facts.name, summary, sections, token_data(run_dir, selected), selection_words(selected, scan.responses))


def scan_run(facts: RunFacts, iterations: pd.DataFrame, steps: pd.DataFrame) -> Scan:
    """One pass over the iterations, with one in memory at a time."""
    bounds = clip_bounds(facts.config, iterations)
    rows: dict[str, list] = {name: [] for name in ("curves", "flags", "extremes", "text")}
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in ("ratios", "overshoot", "responses")}
    probabilities, deltas, quadrants, nonfinite = _zero_2d(), _zero_deltas(), _zero_quadrants(), 0
    for records in iterations_of(facts.run_dir, len(iterations)):
        delta = counts.deltas(records.tokens)
        nonfinite += int(np.count_nonzero(~np.isfinite(delta)))
        probabilities = probabilities + counts.probability_grid(records.tokens)
        deltas = deltas + counts.histogram(delta, counts.DELTA_EDGES)
        quadrants = quadrants + counts.quadrant_grid(_advantages(records), records.updates)
        rows["curves"] += curves.sampled_rows(records.iteration, records.sequences, records.tokens)
        rows["flags"].append(counts.flag_row(records.iteration, records.updates))
        rows["extremes"].append(counts.extremes_row(records.iteration, records.updates))
        rows["text"].append(counts.text_row(records.iteration, records.sequences, records.tokens))
        frames["ratios"].append(counts.ratio_histogram(records.updates))
        frames["responses"].append(response_summary(records))
        if bounds is not None:
            frames["overshoot"].append(counts.overshoot_counts(records.updates, bounds.low, bounds.high))
    recorded = curves.recorded_rows(iterations, steps, float(facts.manifest.final["eval_accuracy"]))
    return Scan(
        curves=pd.concat([pd.DataFrame(rows["curves"]), recorded], ignore_index=True),
        probabilities=probabilities,
        deltas=deltas,
        nonfinite_deltas=nonfinite,
        ratios=_added(frames["ratios"], ["epoch", "minibatch", "bin_lo", "bin_hi"]),
        quadrants=quadrants,
        overshoot=_added(frames["overshoot"], ["epoch", "beyond"]),
        flags=pd.DataFrame(rows["flags"]),
        extremes=pd.DataFrame(rows["extremes"]),
        text=pd.DataFrame(rows["text"]),
        responses=pd.concat(frames["responses"], ignore_index=True),
    )


def mismatch_section(scan: Scan, counted: Parity, analysed: Findings) -> Section:
    """The mismatch between sampler and trainer; where every bit agrees, a sentence replaces most figures."""
    grid = mismatch.probability_figure(scan.probabilities)
    if counted.unequal_old_rollout_logprobs == 0:
        note = f"All {counted.tokens:,} differences are exactly 0, so there is no distribution of them to draw."
        return Section("mismatch", "Sampler and trainer", (note,), (grid,))
    figures = (grid, mismatch.delta_figure(scan.deltas), *analysed.figures)
    return Section("mismatch", "Sampler and trainer", (), figures)


def clipping_section(facts: RunFacts, iterations: pd.DataFrame, scan: Scan) -> Section:
    """Ratios and clipping; a sentence where the policy took no step with a ratio."""
    title = "Ratios and clipping"
    if not len(scan.ratios):
        return Section("clipping", title, ("The policy took no step, so there are no ratios.",), ())
    bounds = clip_bounds(facts.config, iterations)
    figures = [
        clipping.ratio_figure(scan.ratios, bounds),
        clipping.quadrant_figure(scan.quadrants, bounds),
        clipping.extremes_figure(scan.extremes, bounds),
    ]
    if bounds is None:
        kind = facts.config.ppo.objective.kind
        if scan.flags[list(counts.FLAGS)].to_numpy().any():
            figures.insert(1, clipping.flag_figure(scan.flags))
        return Section("clipping", title, (f"The objective {kind} does not clip by a token's ratio.",), tuple(figures))
    figures.insert(1, clipping.flag_figure(scan.flags))
    figures += analyses.clipping(facts.run_dir, facts.config).figures
    if scan.overshoot["count"].any():
        figures.append(clipping.overshoot_figure(scan.overshoot))
        return Section("clipping", title, (), tuple(figures))
    return Section("clipping", title, ("No ratio ever left the clip bounds.",), tuple(figures))


def text_section(scan: Scan) -> Section:
    """KL in several units, and the shares of first and later tokens of words."""
    figures = [units.unit_figure(scan.text)] if _positive(scan.text, "kl") else []
    figures += [units.share_figure(scan.text, name) for name in ("kl", "entropy") if _positive(scan.text, name)]
    notes = () if _positive(scan.text, "kl") else ("The policy is the reference throughout: KL is 0.",)
    return Section("text", "Text and tokens", notes, tuple(figures))


def selection_words(selected: pd.DataFrame, everything: pd.DataFrame) -> str:
    """Which responses the token view shows, out of how many."""
    return (
        f"{number(len(selected))} of {number(len(everything))} responses, "
        f"{number(int(selected['tokens'].sum()))} tokens: in turn those with the largest |old - rollout| difference, "
        "the most clipped token updates, the best score, the worst score (the latest first), and the first responses "
        "of the first and of the last iteration; "
        f"at most {number(MAX_TOKENS)} tokens. --responses N chooses another number."
    )


def _advantages(records: IterationRecords) -> counts.Floats:
    return records.tokens["advantages"].to_numpy(np.float64)[records.token_rows]


def _added(frames: list[pd.DataFrame], keys: list[str]) -> pd.DataFrame:
    """The counts of all iterations, added by key."""
    if not frames:
        return pd.DataFrame(columns=[*keys, "count", "total"])
    return pd.concat(frames, ignore_index=True).groupby(keys, as_index=False, sort=True).sum()


def _positive(text: pd.DataFrame, quantity: str) -> bool:
    return bool((text[[f"{quantity}_{share}" for share in units.PARTS]].to_numpy() > 0).any())


def _zero_2d() -> counts.Counts:
    bins = len(counts.PROBABILITY_EDGES) - 1
    return np.zeros((bins, bins), dtype=np.int64)


def _zero_quadrants() -> counts.Counts:
    return np.zeros((len(counts.ADVANTAGE_EDGES) - 1, len(counts.RATIO_EDGES) - 1), dtype=np.int64)


def _zero_deltas() -> counts.Counts:
    return np.zeros(len(counts.DELTA_EDGES) - 1, dtype=np.int64)
