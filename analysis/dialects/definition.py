"""The description of each published key: where it is defined, its formula, and how it differs from ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A file of a public repository at a commit."""

    repository: str
    path: str
    commit: str


@dataclass(frozen=True)
class Definition:
    """One published key. In formulas p = old, g = rollout, n = new log-probs, r = exp(n - anchor), A = advantage."""

    key: str
    source: Source
    formula: str
    anchor: str  # the denominator of its ratio, or the two log-probs that it compares
    reduction: str  # over tokens, and over the steps of an iteration
    difference: str  # from ours
    is_derived: bool = True  # False: the records lack what it needs
