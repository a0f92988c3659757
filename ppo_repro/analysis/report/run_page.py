"""Make the page of one run of PPO, on language or on a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ppo_repro.analysis.html.markup import element, table
from ppo_repro.analysis.html.page import (
    Card,
    Figure,
    Section,
    Verdict,
    facts_html,
    folded_table,
    folded_text,
    page,
    scrolled,
)
from ppo_repro.analysis.html.token_data import token_data
from ppo_repro.analysis.html.token_section import select, token_section
from ppo_repro.analysis.mismatch.mismatch_buckets import bucket_table
from ppo_repro.analysis.mismatch.mismatch_tables import Measured, measure, tables
from ppo_repro.analysis.mismatch.parity import Parity
from ppo_repro.analysis.pairs.run_evidence import run_evidence
from ppo_repro.analysis.report import curves, run_figures, run_verdicts
from ppo_repro.analysis.report.curve_metrics import Metric
from ppo_repro.analysis.report.curves import Curve
from ppo_repro.analysis.report.held_out import samples_section
from ppo_repro.analysis.report.run_facts import Facts, repeating
from ppo_repro.analysis.report.run_kinds import KINDS
from ppo_repro.analysis.report.run_scan import DELTA_EDGES, Scan, scan_run, summary_tables
from ppo_repro.analysis.terms import terms
from ppo_repro.config.algorithm import FunctionObjective
from ppo_repro.config.run import RunConfig
from ppo_repro.records.notes import by_phase, phases_of
from ppo_repro.testing.diagnosis import diagnose_sums
from ppo_repro.testing.evidence import MismatchSums, mismatch_sums


def run_page(facts: Facts, responses: int) -> str:
    """Return the page of one run of PPO, which shows `responses` responses token by token."""
    iterations, steps = summary_tables(facts)
    scan = scan_run(facts, iterations, steps)
    counted, own = scan.parity, facts.own(iterations)
    cause, by_bucket = _cause(facts) if counted.unequal_old_rollout_logprobs and not facts.is_control else ([], [])
    cards = (
        Card(
            "Did it learn?",
            [*run_verdicts.origin(facts), *run_verdicts.learning(facts, iterations)],
            chart=curves.run_chart(facts, scan.curves),
        ),
        Card("Is it on-policy?", [*run_verdicts.on_policy(facts, counted, scan.draws), *cause]),
        Card("What went wrong?", run_verdicts.troubles(facts, own, scan.nonfinite_ratios, scan.nonfinite_deltas)),
        Card("How to repeat it", blocks=[facts_html(repeating(facts))]),
    )
    named, forked = [Curve("this run", scan.curves)], facts.forked_at
    kind = KINDS[facts.manifest.kind]
    distributions = run_figures.change_figures(scan.values, kind.main[-1].unit, kind.samples)
    learning, optimisation, agreement = (
        curves.metric_figures(wanted, named, forked_at=forked)
        for wanted in (kind.learning, kind.optimisation, kind.agreement)
    )
    sections = [
        Section("learning", "Learning", figures=[*learning, *distributions]),
        Section("optimisation", "Optimisation", figures=optimisation),
        _mismatch(scan, counted, by_bucket, agreement),
        _clipping(facts, own, facts.own(steps), scan),
    ]
    data = None
    if not facts.is_control:
        sections += samples_section(facts)
    sections.append(_numbers(facts, iterations, steps, scan.curves))
    if responses and not facts.is_control:
        selected = select(scan.responses, responses)
        data = token_data(facts.run_dir, selected)
        sections.append(token_section(data, len(scan.responses)))
    return page(facts.name, cards, sections, data)


def _cause(facts: Facts) -> tuple[list[Verdict], list[Figure]]:
    """Diagnose why sampler and trainer differ, and draw the mismatch by probability, position, lag, turn and route."""
    measured, sums = list[Measured](), list[MismatchSums]()
    for pairs in run_evidence(facts.run_dir, allow_incomplete=True):
        measured += measure([pairs])
        sums.append(mismatch_sums(pairs))
    update, buckets = tables(measured).update, bucket_table([part.buckets for part in measured])
    divergences = update[update["metric"].isin(["k1", "k3"]) & (update["reduction"] == "token_mean")]
    cause = diagnose_sums(sums)
    untested = f"; not tested: {', '.join(cause.untested)}" if cause.untested else ""
    text = f"Cause of the difference: {cause.verdict}{untested} (tier {cause.tier}).".replace("_", " ")
    text = f"{text} {cause.advice}"
    kinds = [kind for kind in run_figures.BUCKETS if (buckets["kind"] == kind).any()]
    drawn = [run_figures.bucket_figure(buckets, kind) for kind in kinds]
    divergence = run_figures.divergence_figure(divergences[["iteration", "metric", "value", "se"]])
    return [Verdict("fact", text)], [*drawn, divergence]


def _mismatch(scan: Scan, counted: Parity, by_bucket: list[Figure], draws: list[Figure]) -> Section:
    """Return the section about mismatch and draws; if no difference can be drawn, a sentence replaces its figures."""
    unequal, title = int(scan.deltas.sum()), "Sampler and trainer"
    equal = counted.tokens - unequal - scan.nonfinite_deltas
    if not unequal:
        which = f"All {equal:,} finite" if scan.nonfinite_deltas else f"All {equal:,}"
        note = f"{which} differences are exactly 0, so there is no distribution of them to draw."
        return Section("mismatch", title, [note], draws)
    delta = run_figures.delta_figure(scan.deltas, DELTA_EDGES, equal)
    return Section("mismatch", title, figures=[delta, *by_bucket, *draws])


def _clipping(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame, scan: Scan) -> Section:
    """Return the section about ratios and clipping; if no step had ratios, a sentence replaces the figures."""
    title = "Ratios and clipping"
    if not len(scan.ratios):
        return Section("clipping", title, ("The policy took no step, so there are no ratios.",))
    bounds = run_figures.clip_bounds(facts.ppo, iterations, steps)
    drawn = run_figures.ratio_figures(scan.ratios, bounds)
    if scan.flags[list(run_figures.FLAG_WORDS)].to_numpy().any():
        drawn.append(run_figures.flag_figure(scan.flags))
    notes: tuple[str, ...] = ()
    if isinstance(facts.config, RunConfig) and isinstance(facts.config.ppo.objective, FunctionObjective):
        name = Path(facts.config.ppo.objective.path).name
        says = "says" if steps["clip_fraction"].notna().any() else "does not say"
        notes = (f"{name}, the objective of this run, {says} which tokens it cut.",)
    elif isinstance(facts.config, RunConfig) and bounds is None:
        notes = (f"The objective {facts.config.ppo.objective.kind} does not clip by a token's ratio.",)
    return Section("clipping", title, notes, drawn)


def first_and_last(metrics: Sequence[Metric], found_curves: pd.DataFrame) -> pd.DataFrame:
    """Return the first and last value of the metrics' curves: quantity, first, last, unit."""
    ends = found_curves.sort_values("iteration").groupby("metric")["value"].agg(["first", "last"])
    rows = [(m.title, *map(float, ends.loc[m.key]), m.unit) for m in metrics if m.key in ends.index]
    return pd.DataFrame(rows, columns=["quantity", "first", "last", "unit"])


def _numbers(facts: Facts, iterations: pd.DataFrame, steps: pd.DataFrame, run_curves: pd.DataFrame) -> Section:
    """Return the section of key numbers, with folded times, configuration and terms."""
    parts = {"environment steps": "tokens", "episodes that ended": "episodes"}
    if not facts.is_control:
        parts = {"responses": "sequences", "response tokens": "tokens"}
    rows = [
        ("iterations", f"{len(iterations):,} of {facts.config.iterations:,}"),
        *((name, int(iterations[column].sum())) for name, column in parts.items()),
        ("optimizer steps", len(steps)),
        (f"unequal old and rollout log-probs, {facts.unit}", int(iterations["unequal_old_rollout_logprobs"].sum())),
        ("largest |old - rollout|, nats", float(iterations["max_abs_old_rollout"].max(skipna=False))),
    ]
    numbers = [("Whole run", pd.DataFrame(rows, columns=["quantity", "value"]))]
    kind = KINDS[facts.manifest.kind]
    metrics = curves.informative(kind.metrics, [Curve("this run", run_curves)])
    numbers.append(("First and last value", first_and_last(metrics, run_curves)))
    measured = facts.accuracy
    if measured is not None:
        both = (("deterministic", measured.deterministic_rms, measured.deterministic_max),
                (f"stock {measured.stock}", measured.stock_rms, measured.stock_max))  # fmt: skip
        title = f"Log-probs of {measured.tokens:,} tokens at the start, distance from float64"
        numbers.append((title, pd.DataFrame(both, columns=["numerics", "rms, nats", "largest, nats"])))
    spent = by_phase(facts.run_dir, facts.manifest, phases_of(iterations))
    seconds = pd.DataFrame([(phase, round(value, 1)) for phase, value in spent.items()], columns=["phase", "seconds"])
    folded = (
        folded_table("Where the time went", seconds),
        folded_text("Configuration", facts.config_text),
        *(folded_text(f"Code of the reward: {name}", text) for name, text in facts.code.items()),
        folded_table("Terms in words", terms()),
    )
    side_by_side = element("div", "".join(scrolled(table(frame, name)) for name, frame in numbers), class_="tables")
    return Section("numbers", "Numbers and configuration", blocks=[side_by_side, *folded])
