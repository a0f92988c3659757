"""Implement `ppo-repro analyse tokenization`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ppo_repro.analysis.tokenization.recorded_tokenizer import recorded_tokenizer
from ppo_repro.analysis.tokenization.tables import drift_by_iteration, iteration_tables
from ppo_repro.analysis.tokenization.words import BOUNDARIES
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import print_result
from ppo_repro.records import reader


def add_options(option: Callable[..., argparse.Action]) -> None:
    """Add the options of the command."""
    option("run", type=run_named, help="folder of a recorded run")
    option("--iteration", type=int, help="the iteration that is analysed; default the last one")
    about = "whether white space belongs to the word after it (leading, the default) or before it (trailing)"
    option("--boundary", choices=BOUNDARIES, default="leading", help=about)


def command(arguments: argparse.Namespace) -> None:
    """Print KL and entropy of an iteration by unit, its clip band for words, and responses whose ids change."""
    run_dir, boundary = arguments.run, arguments.boundary
    recorded = reader.open_manifest(run_dir)
    iteration = recorded.num_iterations - 1 if arguments.iteration is None else arguments.iteration
    tables = iteration_tables(run_dir, iteration, boundary=boundary, recorded=recorded)
    summary, band = tables.summary.drop(columns="iteration"), tables.clip_band
    drift = drift_by_iteration(run_dir, recorded_tokenizer(run_dir), iterations=[iteration])
    lines = [f"{run_dir}: iteration {iteration}, boundary {boundary}, nats, standard errors by response"]
    lines.append(summary.to_string(index=False, float_format="%.6g"))
    if band is not None:
        lines += ["", "clip band", band.to_string(index=False, float_format="%.4g")]
    elif iteration not in recorded.own_iterations:
        lines += ["", f"clip band: not counted, iteration {iteration} is of the run that was forked"]
    lines += ["", "encode(decode(ids))", drift.to_string(index=False, float_format="%.4g")]
    value = {
        "iteration": iteration,
        "boundary": boundary,
        "summary": summary.to_dict("records"),
        "clip": None if band is None else band.to_dict("records"),
        "drift": drift.to_dict("records"),
    }
    print_result(arguments.json, value, lines)
