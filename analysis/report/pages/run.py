"""The page of one language run."""

from __future__ import annotations

import pandas as pd

from analysis.mismatch.parity import parity
from analysis.report.drawing.figure import Section
from analysis.report.drawing.markup import number
from analysis.report.drawing.page import Tokens, folded_table, folded_text, page, summary_html
from analysis.report.figures import curves, metrics
from analysis.report.figures.scores import distribution_figures
from analysis.report.pages.sections import clipping_section, mismatch_section, text_section
from analysis.report.reading import analyses
from analysis.report.reading.analyses import Findings
from analysis.report.reading.facts import (
    Facts,
    RunFacts,
    accuracy_verdict,
    agreement_of,
    disturbance_verdict,
    learning_verdicts,
    nonfinite_verdict,
    parity_verdicts,
    run_facts,
    state_verdict,
)
from analysis.report.reading.load import summary_tables
from analysis.report.reading.numbers import accuracy_numbers, first_and_last_numbers, whole_run_numbers
from analysis.report.tokens.responses import MAX_TOKENS, select, token_data
from analysis.report.tokens.samples import samples_section
from analysis.report.tokens.scan import scan_run
from analysis.report.tokens.token_view import token_section
from analysis.words import config_in_words, terms
from ppo_repro.records import times


def run_page(facts: RunFacts, responses: int) -> str:
    """The report of one language run as HTML; the same records give the same bytes."""
    run_dir, only = facts.run_dir, facts.iterations
    iterations, steps = summary_tables(run_dir, only)
    scan = scan_run(facts, iterations, steps)
    counted = parity(run_dir, iterations=only, allow_incomplete=True)
    of_mismatch = analyses.mismatch(run_dir, only) if counted.unequal_old_rollout_logprobs else Findings((), ())
    verdicts = (
        *state_verdict(facts),
        *disturbance_verdict(facts.config),
        *parity_verdicts(counted, agreement_of(facts.config)),
        *of_mismatch.verdicts,
        *accuracy_verdict(facts.accuracy),
        *nonfinite_verdict(scan.extremes, scan.nonfinite_deltas),
        *learning_verdicts(facts, iterations),
    )
    spent = times.by_phase(run_dir, facts.manifest, times.phases_of(iterations))
    tables = (
        ("Whole run", whole_run_numbers(_counts(iterations), counted, "tokens", spent)),
        ("First and last iteration", first_and_last_numbers(iterations, steps)),
        *accuracy_numbers(facts.accuracy),
    )
    summary = summary_html(verdicts, run_facts(facts), tables, folded(facts))
    named = [("this run", scan.curves)]
    learning = curves.metric_figures(metrics.LEARNING, named)
    sections = (
        Section("learning", "Learning", (), (*learning, *distribution_figures(scan.scores, "score", "responses"))),
        Section("optimisation", "Optimisation", (), curves.metric_figures(metrics.OPTIMISATION, named)),
        mismatch_section(scan, counted, of_mismatch),
        clipping_section(facts, iterations, scan),
        text_section(scan),
        *samples_section(facts, scan.prompts),
    )
    if responses == 0:
        return page(facts.name, summary, sections)
    selected = select(scan.responses, responses)
    data = token_data(run_dir, selected)
    return page(facts.name, summary, sections, Tokens(token_section(data, _words(selected, scan.responses)), data))


def folded(facts: Facts) -> tuple[str, ...]:
    """The configuration as it was written, field by field in words, and the terms of the page, each to open."""
    return (
        folded_text("Configuration", facts.config_text),
        folded_table("Configuration, field by field in words", config_in_words(facts.config)),
        folded_table("Terms in words", terms()),
    )


def _counts(iterations: pd.DataFrame) -> dict[str, int]:
    return {
        "iterations": len(iterations),
        "responses": int(iterations["sequences"].sum()),
        "response tokens": int(iterations["tokens"].sum()),
        "optimizer steps of the policy": int(iterations["policy_steps"].sum()),
    }


def _words(selected: pd.DataFrame, everything: pd.DataFrame) -> str:
    """Which responses the token view shows, out of how many."""
    return (
        f"{number(len(selected))} of {number(len(everything))} responses, "
        f"{number(int(selected['tokens'].sum()))} tokens: in turn those with the largest |old - rollout| difference, "
        "the most clipped token updates, the best score, the worst score (the latest first), and the first responses "
        "of the first and of the last iteration; "
        f"at most {number(MAX_TOKENS)} tokens. --responses N chooses another number."
    )
