"""Make the section "Numbers and configuration" of a page, which ends with the terms of the pages in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from ppo_repro.analysis.html.markup import element, table
from ppo_repro.analysis.html.page import Section, folded_table, scrolled

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
