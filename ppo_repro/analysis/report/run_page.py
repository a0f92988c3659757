"""Make the page of one run of PPO, on language or on a Gymnasium environment."""

from __future__ import annotations

import pandas as pd

from ppo_repro.analysis.html.page import Card, Section, facts_html, folded_table, folded_text, page
from ppo_repro.analysis.report.data.chosen_responses import choose_responses
from ppo_repro.analysis.report.data.mismatch_cause import read_mismatch
from ppo_repro.analysis.report.data.page_numbers import read_page_numbers
from ppo_repro.analysis.report.data.run_curves import Curves, first_and_last, summary_tables
from ppo_repro.analysis.report.data.run_facts import Facts, repeating
from ppo_repro.analysis.report.data.token_view import read_token_view
from ppo_repro.analysis.report.sections import curve_figures, verdicts
from ppo_repro.analysis.report.sections.curve_figures import PageLine
from ppo_repro.analysis.report.sections.held_out import samples_section
from ppo_repro.analysis.report.sections.histograms import change_figures
from ppo_repro.analysis.report.sections.numbers_and_configuration import numbers_section
from ppo_repro.analysis.report.sections.ratios_and_clipping import clipping_section
from ppo_repro.analysis.report.sections.sampler_and_trainer import cause_statement, mismatch_figures, mismatch_section
from ppo_repro.analysis.report.sections.tokens import token_section
from ppo_repro.records.manifest import has_responses
from ppo_repro.records.notes import Accuracy, by_phase, phases_of
from ppo_repro.records.reader import own_rows


def run_page(facts: Facts, responses: int) -> str:
    """Return the page of one run of PPO, which shows `responses` responses token by token."""
    iterations, steps = summary_tables(facts)
    own_iterations, own_steps = (own_rows(rows, facts.manifest) for rows in (iterations, steps))
    numbers = read_page_numbers(facts, iterations, steps)
    counts, content = numbers.counts, facts.content
    is_diagnosed = counts.agreement.unequal_old_rollout_logprobs and has_responses(facts.manifest)
    mismatch = read_mismatch(facts) if is_diagnosed else None
    cause = [cause_statement(mismatch)] if is_diagnosed else []
    by_bucket = [] if mismatch is None else mismatch_figures(mismatch)
    learning, optimisation, beside_mismatch = (
        curve_figures.metric_figures(wanted, [PageLine("this run", numbers.curves)], forked_at=facts.forked_at)
        for wanted in (content.learning, content.optimisation, content.beside_mismatch)
    )
    distributions = change_figures(numbers.values, content.first_chart[-1].title, content.samples)
    tokens = None
    if responses and len(numbers.responses):
        tokens = read_token_view(facts.run_dir, facts.manifest, choose_responses(numbers.responses, responses))
    cards = [
        Card(
            "Did it learn?",
            [*verdicts.origin(facts), *verdicts.learning(facts, iterations)],
            chart=curve_figures.run_chart(facts, numbers.curves),
        ),
        Card("Is it on-policy?", [*verdicts.on_policy(facts, counts.agreement, counts.draws), *cause]),
        Card(
            "What went wrong?",
            verdicts.troubles(facts, own_iterations, counts.nonfinite_ratios, counts.nonfinite_deltas),
        ),
        Card("How to repeat it", blocks=[facts_html(repeating(facts))]),
    ]
    sections = [
        Section("learning", "Learning", figures=[*learning, *distributions]),
        Section("optimisation", "Optimisation", figures=optimisation),
        mismatch_section(counts, by_bucket, beside_mismatch),
        clipping_section(facts, own_iterations, own_steps, numbers),
        *samples_section(facts),
        numbers_section(_tables(facts, iterations, steps, numbers.curves), _folded(facts, iterations)),
        *([] if tokens is None else [token_section(tokens, len(numbers.responses))]),
    ]
    return page(facts.name, cards, sections, tokens)


def _tables(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame, curves: Curves) -> dict[str, pd.DataFrame]:
    """Return the tables of key numbers by title."""
    metrics = curve_figures.informative(facts.content.metrics, [PageLine("this run", curves)])
    tables = {
        "Whole run": _whole_run(facts, iterations, steps),
        "First and last value": first_and_last(metrics, curves),
    }
    measured = facts.accuracy
    if measured is not None:
        title = f"Log-probs of {measured.tokens:,} tokens at the start, distance from float64"
        tables[title] = _distances(measured)
    return tables


def _whole_run(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    own = own_rows(iterations, facts.manifest)
    unequal = f"unequal old and rollout log-probs, {facts.content.token_unit}"
    rows = [
        ("iterations", f"{len(iterations):,} of {facts.config.iterations:,}"),
        *((total.title, int(iterations[total.key].sum())) for total in facts.content.totals),
        ("optimizer steps", len(steps)),
        (unequal, int(own["unequal_old_rollout_logprobs"].sum())),
        ("largest |old - rollout|, nats", float(own["max_abs_old_rollout"].max(skipna=False))),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value"])


def _distances(measured: Accuracy) -> pd.DataFrame:
    rows = [
        ("deterministic", measured.deterministic_rms, measured.deterministic_max),
        (f"stock {measured.stock}", measured.stock_rms, measured.stock_max),
    ]
    return pd.DataFrame(rows, columns=["numerics", "rms, nats", "largest, nats"])


def _folded(facts: Facts, iterations: pd.DataFrame) -> list[str]:
    """Return times, configuration and the user's code as folded HTML."""
    spent = by_phase(facts.run_dir, facts.manifest, phases_of(iterations))
    seconds = pd.DataFrame([(phase, round(value, 1)) for phase, value in spent.items()], columns=["phase", "seconds"])
    return [
        folded_table("Where the time went", seconds),
        folded_text("Configuration", facts.config_text),
        *(folded_text(f"Code: {name}", text) for name, text in facts.code.items()),
    ]
