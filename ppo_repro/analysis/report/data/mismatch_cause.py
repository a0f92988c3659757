"""Read why and where sampler and trainer of a run differ."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from ppo_repro.analysis.mismatch import IterationMismatch, mismatch_by_iteration, mismatch_table
from ppo_repro.analysis.mismatch_buckets import bucket_table
from ppo_repro.analysis.report.data.run_facts import Facts
from ppo_repro.records.logprob_pairs import run_evidence
from ppo_repro.statistics.mismatch_metrics import with_mismatch
from ppo_repro.testing.diagnosis import Diagnosis, diagnose_sums
from ppo_repro.testing.evidence import PatternSums, pattern_sums


@dataclass(frozen=True)
class RunMismatch:
    """The mismatch of a run: its cause, by bucket and by iteration."""

    cause: Diagnosis
    buckets: pd.DataFrame  # a row per BucketRow
    metrics: pd.DataFrame  # of `mismatch_table`


def read_mismatch(facts: Facts) -> RunMismatch | None:
    """Read the mismatch of a run; None if no token has two finite log-probs.

    This reads the run once more, because only a run with unequal log-probs needs the other columns.
    """
    measured, patterns = list[IterationMismatch](), list[PatternSums]()
    for pairs in run_evidence(facts.run_dir, facts.manifest):
        measured += mismatch_by_iteration([pairs])
        patterns.append(pattern_sums(with_mismatch(pairs)))
    if not any(pattern.tokens for pattern in patterns):
        return None
    cause = diagnose_sums([part.sums for part in measured], patterns)
    return RunMismatch(cause, bucket_table([part.buckets for part in measured]), mismatch_table(measured))
