"""List what pages show of each kind of run, and the metrics that they draw: a row has all that a page says of one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from ppo_repro.config.run import RunConfig

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)
SHARE: Range = (0.0, 1.0)
POSITIVE: Range = (0.0, math.inf)


@dataclass(frozen=True)
class Metric:
    """One metric of the curves.

    `source` is the recorded table with the column `key`; the rows of a metric of `samples` are computed.
    """

    key: str  # its name in the frames of curves
    source: Literal["samples", "iterations", "steps"]
    title: str
    unit: str
    caption: str
    _: KW_ONLY
    band: str = ""  # what lines and bands are on the page of one run
    possible: Range | None = ANY  # None: the range of scores
    twin: str = ""  # another metric; if the two are equal, this one has no figure
    is_setting: bool = False  # without a figure if it never changes


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
    counts: tuple[tuple[str, str], ...] = ()  # key numbers of a whole run: title, column of `iterations`
    unit: str = "tokens"  # of the rows of the table `tokens`
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


_STEPS = "mean over the steps, band: smallest to largest step"
_ERROR = "band: ± one standard error"
_AT_THE_END = "the last point is at the end"
_EXPLAINED_VARIANCE = Metric(
    "explained_variance", "iterations", "Explained variance", "share",
    "1 - Var(returns - values) / Var(returns) before the update: 1 where values predict every return, 0 where they do "
    "no better than their mean", possible=(-math.inf, 1.0),
)  # fmt: skip
_LOSSES = (
    Metric(
        "policy_loss", "steps", "Loss of the policy", "loss",
        "All terms. It is near 0: no measure of progress", band=_STEPS,
    ),
    Metric(
        "value_loss", "steps", "Loss of the value model", "loss", "Half the squared error of the values", band=_STEPS,
        possible=POSITIVE,
    ),
    Metric(
        "approx_kl", "steps", "Step size, KL(anchor || new)", "nats",
        "How far the policy has moved from the one that sampled, by k3", band=_STEPS, possible=POSITIVE,
    ),
    Metric(
        "clip_fraction", "steps", "Clip fraction", "share", "Tokens whose policy gradient the clip removed",
        band=_STEPS,
        possible=SHARE,
    ),
)  # fmt: skip
_LEARNING_RATE = Metric(
    "learning_rate", "steps", "Learning rate", "per step", "Learning rate of the policy", possible=POSITIVE,
    is_setting=True,
)  # fmt: skip
DRAWS = Metric(
    "excess", "samples", "Draws", "nats",
    "Mean of log p(token) + entropy: 0 for tokens drawn from p, above 0 if likely tokens are preferred", band=_ERROR,
)  # fmt: skip
# a metric that a run does not have is left out
LEARNING = (
    Metric("score", "samples", "Score", "score", "Mean score of the sampled responses", band=_ERROR, possible=None),
    Metric(
        "accuracy", "samples", "Accuracy, sampled", "share", "Share of correct sampled responses",
        band=_ERROR, possible=SHARE,
        twin="score",
    ),
    Metric(
        "eval_accuracy", "iterations", "Accuracy, held out", "share", "Greedy, before the update",
        band=_AT_THE_END, possible=SHARE,
        twin="eval_score",
    ),
    Metric(
        "eval_score", "iterations", "Score, held out", "score", "Greedy, before the update",
        band=_AT_THE_END, possible=None,
    ),
    Metric(
        "ref_kl_per_sequence", "samples", "KL to the reference", "nats per response",
        "KL(policy || reference), exact over the vocabulary, mean over the responses", band=_ERROR, possible=POSITIVE,
    ),
    Metric(
        "entropy", "samples", "Entropy", "nats", "Entropy of the policy before the update, mean over all tokens",
        possible=POSITIVE,
    ),
    Metric(
        "response_length", "samples", "Response length", "tokens", "Mean over the responses",
        band=_ERROR, possible=POSITIVE,
    ),
    _EXPLAINED_VARIANCE,
)  # fmt: skip
OPTIMISATION = (
    *_LOSSES,
    Metric(
        "grad_norm", "steps", "Gradient norm", "norm", "Global norm of the policy's gradient before clipping",
        band=_STEPS,
        possible=POSITIVE,
    ),
    Metric(
        "value_grad_norm", "steps", "Gradient norm, value model", "norm", "Its global norm before clipping",
        band=_STEPS,
        possible=POSITIVE,
    ),
    _LEARNING_RATE,
    Metric(
        "clip_range", "iterations", "Clip range", "ratio", "Adaptive clip range of the ratio", possible=POSITIVE,
        is_setting=True,
    ),
    Metric(
        "kl_coef", "iterations", "KL coefficient", "coefficient", "Weight of the KL to the reference",
        possible=POSITIVE, is_setting=True,
    ),
    Metric(
        "penalty_coef", "iterations", "Penalty coefficient", "coefficient", "Weight of KL(anchor || new)",
        possible=POSITIVE, is_setting=True,
    ),
)  # fmt: skip
CONTROL_LEARNING = (
    Metric(
        "episode_return", "samples", "Return of training episodes", "return",
        "Mean return of the episodes that ended in the iteration", band=_ERROR,
    ),
    Metric(
        "eval_return", "iterations", "Return, likeliest actions", "return",
        "Mean return of whole episodes before the update", band=_AT_THE_END,
    ),
    Metric(
        "entropy", "iterations", "Entropy", "nats", "Entropy of the policy before the update, mean over all steps",
        possible=POSITIVE,
    ),
    _EXPLAINED_VARIANCE,
)  # fmt: skip
CONTROL_OPTIMISATION = (
    *_LOSSES,
    Metric(
        "joint_grad_norm", "steps", "Gradient norm", "norm", "Global norm over actor and critic before clipping",
        band=_STEPS, possible=POSITIVE,
    ),
    _LEARNING_RATE,
    Metric(
        "clip_range", "steps", "Clip range", "ratio", "Clip range of the ratio", possible=POSITIVE, is_setting=True,
    ),
)  # fmt: skip
DPO_LEARNING = (
    Metric(
        "eval_pair_accuracy", "iterations", "Held-out pairs in the right order", "share", "After each epoch",
        possible=SHARE,
    ),
    Metric("eval_margin", "iterations", "Margin of held-out pairs", "reward", "Mean after each epoch"),
    Metric("margin", "iterations", "Margin of training pairs", "reward", "Mean after each epoch"),
    Metric(
        "eval_accuracy", "iterations", "Accuracy, held out", "share",
        "Greedy accuracy on held-out prompts, before and after", possible=SHARE,
    ),
)  # fmt: skip
DPO_OPTIMISATION = (
    Metric("loss", "steps", "Loss", "nats", "DPO loss of a minibatch's pairs", band=_STEPS, possible=POSITIVE),
    Metric(
        "grad_norm", "steps", "Gradient norm", "norm", "Global norm before clipping", band=_STEPS, possible=POSITIVE
    ),
)
DPO_STEPS = (
    Metric(
        "loss", "steps", "Loss", "nats",
        "DPO loss before each step, mean over the pairs of a minibatch; log 2 = 0.693 at first", possible=POSITIVE,
    ),
    Metric(
        "margin", "steps", "Margin", "reward",
        "Difference of the implicit rewards of preferred and other response, mean",
    ),
    Metric(
        "accuracy", "steps", "Pairs in the right order", "share",
        "Share of a minibatch's pairs with a positive margin; 0 counts half", possible=SHARE,
    ),
    Metric("grad_norm", "steps", "Gradient norm", "norm", "Global norm before clipping", possible=POSITIVE),
)  # fmt: skip
KINDS = {
    "language": Kind(
        learning=LEARNING,
        optimisation=OPTIMISATION,
        main=(
            Main("eval_score", "score, held out", "held out, greedy"),
            Main("score", "score", "sampled ± standard error"),
        ),
        samples="responses",
        measures={"held-out accuracy": "eval_accuracy", "held-out score": "eval_score"},
        last=("last score", "score_mean"),
        counts=(("responses", "sequences"), ("response tokens", "tokens")),
        agreement=(DRAWS,),
    ),
    "control": Kind(
        learning=CONTROL_LEARNING,
        optimisation=CONTROL_OPTIMISATION,
        main=(
            Main("eval_return", "return", "likeliest actions"),
            Main("episode_return", "return", "training episodes ± standard error"),
        ),
        samples="episodes",
        measures={"return, likeliest actions": "eval_return", "return, last 100 episodes": "last_100_return"},
        last=("last return", "episode_return_mean"),
        counts=(("environment steps", "tokens"), ("episodes that ended", "episodes")),
        unit="environment steps",
    ),
    "dpo": Kind(
        learning=DPO_LEARNING,
        optimisation=DPO_OPTIMISATION,
        main=(Main("eval_pair_accuracy", "pairs in order", "held-out pairs"),),
        samples="pairs",
        measures={"held-out accuracy": "eval_accuracy"},
        last=("held-out pairs in order", "eval_pair_accuracy"),
        by_step=DPO_STEPS,
    ),
}
LARGEST = {"exact_match": 1.0, "steps": 1.0, "format": 2.0}  # score of a reward term whose smallest score is 0


def score_range(config: RunConfig) -> Range:
    """Return the smallest and largest score that the reward terms can give; infinite if a term has no limit."""
    low, high = -config.reward.missing_eos_penalty, 0.0
    for term in config.reward.terms:
        largest = LARGEST.get(term.kind, math.inf)
        smallest = 0.0 if term.kind in LARGEST else -math.inf
        ends = sorted((term.weight * smallest, term.weight * largest)) if term.weight else (0.0, 0.0)
        low, high = low + ends[0], high + ends[1]
    return low, high
