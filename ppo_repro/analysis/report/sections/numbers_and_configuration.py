"""Make the section "Numbers and configuration" of a page, which ends with the terms of the pages in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from ppo_repro.analysis.html.markup import element, table
from ppo_repro.analysis.html.page import Section, folded_table, folded_text, scrolled
from ppo_repro.analysis.report.data.run_curves import Curves, first_and_last
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.analysis.report.sections.curve_figures import PageLine, informative
from ppo_repro.records.notes import by_phase, phases_of
from ppo_repro.runs.results import LanguageResults, PPOResults

TERMS = {
    "token_mean": "averaged over all tokens alike, whatever response they are in",
    "k1": "mean of -log r: unbiased, noisy, can be negative",
    "k2": "mean of (log r)^2 / 2: never negative, slightly biased",
    "k3": "mean of r - 1 - log r: never negative and unbiased",
    "anchor": "the log-probs that a ratio is measured against: the sampler's (rollout) or the trainer's (old)",
    "ratio": "exp(new log-prob - anchor): how much likelier the policy now makes a token than when it was sampled",
    "advantage": "how much better a token turned out than was expected",
    "GAE": "generalized advantage estimation: advantages from rewards and predicted values, smoothed by gae_lambda",
    "explained variance": "1: values predict the returns exactly; 0: no better than their mean; below 0: worse",
    "nats": "natural units of information: 1 nat = 1.44 bit",
}


def numbers_section(tables: Mapping[str, pd.DataFrame], folded: Sequence[str]) -> Section:
    """Return the section with tables by title, side by side, above folded HTML and the terms."""
    scrolling = [scrolled(table(frame, title)) for title, frame in tables.items()]
    beside = [element("div", "".join(scrolling), class_="tables")] if len(scrolling) > 1 else scrolling
    return Section("numbers", "Numbers and configuration", blocks=[*beside, *folded, folded_terms()])


def folded_terms() -> str:
    """Return the terms of the pages in plain words as folded HTML."""
    return folded_table("Terms in words", pd.DataFrame(list(TERMS.items()), columns=["term", "in words"]))


def ppo_numbers_section(facts: Facts, results: PPOResults, curves: Curves) -> Section:
    """Return the section of one run of PPO: key numbers, times, configuration and the user's code."""
    metrics = informative(facts.content.metrics, [PageLine("this run", curves)])
    tables = {"Whole run": _whole_run(facts, results), "First and last value": first_and_last(metrics, curves)}
    if isinstance(results, LanguageResults) and (measured := results.figures.numerical_accuracy) is not None:
        title = f"Log-probs of {measured.tokens:,} tokens at the start, distance from float64"
        rows = [
            ("deterministic", measured.deterministic_rms, measured.deterministic_max),
            (f"stock {measured.stock}", measured.stock_rms, measured.stock_max),
        ]
        tables[title] = pd.DataFrame(rows, columns=["numerics", "rms, nats", "largest, nats"])
    spent = by_phase(facts.run_dir, facts.manifest, phases_of(facts.iterations))
    seconds = pd.DataFrame([(phase, round(value, 1)) for phase, value in spent.items()], columns=["phase", "seconds"])
    folded = [
        folded_table("Where the time went", seconds),
        folded_text("Configuration", facts.config_text),
        *(folded_text(f"Code: {name}", text) for name, text in facts.code.items()),
    ]
    return numbers_section(tables, folded)


def _whole_run(facts: Facts, results: PPOResults) -> pd.DataFrame:
    counts = results.agreement
    rows = [
        ("iterations", f"{len(facts.iterations):,} of {facts.config.iterations:,}"),
        *((total.title, int(facts.iterations[total.key].sum())) for total in facts.content.totals),
        ("optimizer steps", len(facts.steps)),
        (f"unequal old and rollout log-probs, {facts.content.token_unit}", counts.unequal_old_rollout_logprobs),
        ("largest |old - rollout|, nats", counts.max_abs_old_rollout),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value"])
