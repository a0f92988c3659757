"""Explain the terms of the pages in plain words."""

from __future__ import annotations

import pandas as pd

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


def terms() -> pd.DataFrame:
    """Return all terms as a frame with the columns `term` and `in words`."""
    return pd.DataFrame(list(TERMS.items()), columns=["term", "in words"])
