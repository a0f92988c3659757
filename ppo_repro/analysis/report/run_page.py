"""Make the page of one run: of PPO, on language or on a Gymnasium environment, or of DPO."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.html.markup import sentence
from ppo_repro.analysis.html.page import Card, Section, Statement, facts_html, folded_text, page
from ppo_repro.analysis.report.data.chosen_responses import choose_responses
from ppo_repro.analysis.report.data.page_numbers import read_mismatch, read_page_numbers
from ppo_repro.analysis.report.data.run_curves import Curves, run_curves
from ppo_repro.analysis.report.data.run_facts import Facts, read_facts, repeating
from ppo_repro.analysis.report.data.token_view import read_token_view
from ppo_repro.analysis.report.sections import curve_figures, verdicts
from ppo_repro.analysis.report.sections.curve_figures import PageLine
from ppo_repro.analysis.report.sections.histograms import change_figures, distribution_figure
from ppo_repro.analysis.report.sections.numbers_and_configuration import numbers_section, ppo_numbers_section
from ppo_repro.analysis.report.sections.ratios_and_clipping import clipping_section
from ppo_repro.analysis.report.sections.responses import samples_section, token_section
from ppo_repro.analysis.report.sections.sampler_and_trainer import cause_statement, mismatch_section
from ppo_repro.config.kinds import DPO
from ppo_repro.records.manifest import has_responses
from ppo_repro.runs.results import ppo_results
from ppo_repro.runs.summary import on_policy_lines, summarise

RESPONSES = 60


def run_page(run_dir: Path, responses: int = RESPONSES) -> str:
    """Return the page of one run of any kind; equal records give equal bytes.

    The page of a language run shows up to `responses` responses token by token. Raises UserError if the run has no
    complete iteration, or if a DPO run is not complete.
    """
    facts = read_facts(run_dir)
    return _dpo_page(facts) if facts.manifest.kind == DPO else _ppo_page(facts, responses)


def _ppo_page(facts: Facts, responses: int) -> str:
    numbers, content = read_page_numbers(facts), facts.content
    results = ppo_results(facts.run_dir, facts.manifest, facts.iterations, numbers.counts.draws)
    on_policy = [Statement(line.kind, sentence(line.text)) for line in on_policy_lines(results)]
    mismatch = None
    has_mismatch = results.agreement.unequal_old_rollout_logprobs or numbers.counts.deltas.any()
    if has_mismatch and has_responses(facts.manifest):
        mismatch = read_mismatch(facts)
        on_policy.append(cause_statement(mismatch))
    learning, optimisation, beside_mismatch = (
        curve_figures.metric_figures(wanted, [PageLine("this run", numbers.curves)], forked_at=facts.forked_at)
        for wanted in (content.learning, content.optimisation, content.beside_mismatch)
    )
    distributions = change_figures(numbers.values, content.first_chart[-1].title, content.samples)
    tokens = None
    if responses and len(numbers.responses):
        tokens = read_token_view(facts.tables, choose_responses(numbers.responses, responses))
    cards = [
        Card(
            "Did it learn?",
            [*verdicts.origin(facts), *verdicts.learning(facts, results)],
            chart=curve_figures.run_chart(facts, numbers.curves),
        ),
        Card("Is it on-policy?", on_policy),
        Card("What went wrong?", verdicts.troubles(facts, results, numbers.counts)),
        _repeat_card(facts),
    ]
    sections = [
        Section("learning", "Learning", figures=[*learning, *distributions]),
        Section("optimisation", "Optimisation", figures=optimisation),
        mismatch_section(numbers.counts, mismatch, beside_mismatch),
        clipping_section(facts, numbers),
        *samples_section(facts),
        ppo_numbers_section(facts, results, numbers.curves),
        *([] if tokens is None else [token_section(tokens, len(numbers.responses))]),
    ]
    return page(facts.name, cards, sections, tokens)


def _repeat_card(facts: Facts) -> Card:
    command = f"ppo-repro rerun RUN, where RUN is the folder {facts.run_dir.resolve().name}"
    return Card("How to repeat it", blocks=[facts_html({"run again": command} | repeating(facts))])


def _dpo_page(facts: Facts) -> str:
    curves = run_curves(facts)
    rows = facts.tables.read("margins", ["held_out", "margins"], facts.manifest.num_iterations - 1)
    pairs = {"training pairs": rows[~rows["held_out"]], "held-out pairs": rows[rows["held_out"]]}
    cards = [
        Card(
            "Did it learn?",
            [Statement("fact", sentence(line)) for line in summarise(facts.run_dir).sentences],
            chart=curve_figures.run_chart(facts, curves),
        ),
        _repeat_card(facts),
    ]
    by_step = [curve_figures.metric_by_step(metric, facts.steps) for metric in facts.content.by_step]
    sections = [
        _dpo_learning(facts, curves, pairs),
        Section("steps", "Steps", figures=by_step),
        numbers_section({"Whole run": _whole_dpo_run(facts, pairs)}, [folded_text("Configuration", facts.config_text)]),
    ]
    return page(facts.name, cards, sections)


def _dpo_learning(facts: Facts, curves: Curves, pairs: dict[str, pd.DataFrame]) -> Section:
    """Return the section Learning; if no margin is finite, a sentence replaces the figure of margins after training."""
    figures = curve_figures.metric_figures(facts.content.learning, [PageLine("this run", curves)])
    margins = {group: rows["margins"].to_numpy(np.float64) for group, rows in pairs.items() if len(rows)}
    if not any(np.isfinite(values).any() for values in margins.values()):
        note = "No margin after training is finite, so there is no figure of them."
        return Section("learning", "Learning", (note,), figures)
    caption = "Difference of the implicit rewards after training; above 0 the preferred response is the likelier one."
    after = distribution_figure("Margins after training", margins, "margin", facts.content.samples, caption)
    return Section("learning", "Learning", figures=[*figures, after])


def _whole_dpo_run(facts: Facts, pairs: dict[str, pd.DataFrame]) -> pd.DataFrame:
    rows = [
        *((group, len(rows)) for group, rows in pairs.items()),
        ("optimizer steps", len(facts.steps)),
        *((key, value) for key, value in facts.manifest.final.items() if not isinstance(value, str)),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value"])
