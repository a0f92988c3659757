"""The sections about mismatch, clipping and text of a language run's page."""

from __future__ import annotations

import pandas as pd

from analysis.mismatch.parity import Parity
from analysis.report.drawing.figure import Section
from analysis.report.figures import clipping, counts, mismatch, units
from analysis.report.reading import analyses
from analysis.report.reading.analyses import Findings
from analysis.report.reading.facts import RunFacts, clip_bounds
from analysis.report.tokens.scan import Scan


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
        if scan.flags[list(counts.FLAGS)].to_numpy().any():
            figures.insert(1, clipping.flag_figure(scan.flags))
        said = f"The objective {facts.config.ppo.objective.kind} does not clip by a token's ratio."
        return Section("clipping", title, (said,), tuple(figures))
    figures.insert(1, clipping.flag_figure(scan.flags))
    figures += analyses.clipping(facts.run_dir, facts.config, facts.iterations).figures
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


def _positive(text: pd.DataFrame, quantity: str) -> bool:
    return bool((text[[f"{quantity}_{share}" for share in units.PARTS]].to_numpy() > 0).any())
