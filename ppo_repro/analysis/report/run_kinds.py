"""Describe what pages show of each kind of run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppo_repro.analysis.report.curve_metrics import (
    CONTROL_LEARNING,
    CONTROL_OPTIMISATION,
    DPO_LEARNING,
    DPO_OPTIMISATION,
    DPO_STEPS,
    DRAWS,
    LEARNING,
    OPTIMISATION,
    Metric,
)


@dataclass(frozen=True)
class Main:
    """A line of the first chart: its metric, the unit on a page of several runs, and its name on a page of one."""

    metric: str
    unit: str
    name: str


@dataclass(frozen=True)
class Kind:
    """What the pages of one kind of run show."""

    learning: tuple[Metric, ...]
    optimisation: tuple[Metric, ...]
    main: tuple[Main, ...]  # a page of several runs has the first one that was recorded
    samples: str
    measures: Mapping[str, str]  # final results that compare settings: title, name of the result
    last: tuple[str, str]  # if a run has none of `measures`: title, column of the last iteration
    agreement: tuple[Metric, ...] = ()  # beside the mismatch on the page of one run
    by_step: tuple[Metric, ...] = ()  # which the page of one run draws by step, in place of `optimisation`

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Return all metrics."""
        return self.learning + self.optimisation + self.agreement

    @property
    def accuracies(self) -> set[str]:
        """Return the metrics that mean something only if responses are right or wrong."""
        return {metric.key for metric in self.metrics if metric.twin}


KINDS = {
    "language": Kind(
        LEARNING,
        OPTIMISATION,
        (
            Main("eval_score", "score, held out", "held out, greedy"),
            Main("score", "score", "sampled ± standard error"),
        ),
        "responses",
        {"held-out accuracy": "eval_accuracy", "held-out score": "eval_score"},
        ("last score", "score_mean"),
        agreement=(DRAWS,),
    ),
    "control": Kind(
        CONTROL_LEARNING,
        CONTROL_OPTIMISATION,
        (
            Main("eval_return", "return", "likeliest actions"),
            Main("episode_return", "return", "training episodes ± standard error"),
        ),
        "episodes",
        {"return, likeliest actions": "eval_return", "return, last 100 episodes": "last_100_return"},
        ("last return", "episode_return_mean"),
    ),
    "dpo": Kind(
        DPO_LEARNING,
        DPO_OPTIMISATION,
        (Main("eval_pair_accuracy", "pairs in order", "held-out pairs"),),
        "pairs",
        {"held-out accuracy": "eval_accuracy"},
        ("held-out pairs in order", "eval_pair_accuracy"),
        by_step=DPO_STEPS,
    ),
}
