"""Sentences and figures that the report takes from the other analyses, computed from their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.clipping.step import clip_step
from analysis.clipping.update_rows import load_iterations
from analysis.diagnosis.diagnose import diagnose_chunks
from analysis.mismatch.bucket import bucket_table
from analysis.mismatch.tables import measure, tables, whole
from analysis.pairs.run_evidence import run_evidence
from analysis.pairs.runs import run_pairs
from analysis.report.drawing.figure import Figure, Verdict
from analysis.report.figures.clipping import definition_figure
from analysis.report.figures.mismatch import BUCKETS, bucket_figure, divergence_figure
from ppo_repro.config.run import RunConfig

DIVERGENCES = ("k1", "k2", "k3")


@dataclass(frozen=True)
class Findings:
    """Sentences for the summary, and figures for a section."""

    verdicts: tuple[Verdict, ...]
    figures: tuple[Figure, ...]


def mismatch(run_dir: Path, iterations: Sequence[int]) -> Findings:
    """Why and where sampler and trainer differ: by probability, position, lag, turn and route, over the iterations."""

    pairs = run_pairs(run_dir, iterations=iterations, allow_incomplete=True)
    measured = list(measure(pairs))
    update = tables(measured).update
    is_divergence = update["metric"].isin(DIVERGENCES) & (update["reduction"] == "token_mean")
    buckets = bucket_table(whole(measured).buckets)
    cause = diagnose_chunks(run_evidence(run_dir, iterations, allow_incomplete=True))
    named = cause.verdict.replace("_", " ")
    verdict = Verdict("fact", f"Cause of the difference: {named} (tier {cause.tier}). {cause.advice}")
    figures = (
        *(bucket_figure(buckets, kind) for kind in BUCKETS if (buckets["kind"] == kind).any()),
        divergence_figure(update.loc[is_divergence, ["iteration", "metric", "value", "se"]]),
    )
    return Findings((verdict,), figures)


def clipping(run_dir: Path, config: RunConfig, iterations: Sequence[int]) -> Findings:
    """Clip fractions by several definitions, for objectives that clip."""
    read = load_iterations(run_dir, iterations=iterations, allow_incomplete=True)
    tables = [clip_step(item, config) for item in read]
    steps = pd.concat([table[table["subset"] == "all"] for table in tables], ignore_index=True)
    return Findings((), (definition_figure(steps),))
