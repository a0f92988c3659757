"""List what pages show of each kind of run, and the metrics that they draw: a row has all that a page says of one."""

from __future__ import annotations

import math
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
    _: KW_ONLY
    caption: str
    band: str = ""  # what lines and bands are on the page of one run
    possible: Range | None = ANY  # None: the range of scores
    accuracy_of: str = ""  # key of a score: this metric is its accuracy, without a figure if the two are equal
    is_setting: bool = False  # a setting has no figure if it never changes


@dataclass(frozen=True)
class ChartLine:
    """A line of the first chart of a page."""

    metric: str  # key
    unit: str  # on a page of several runs
    name: str  # on the page of one run


@dataclass(frozen=True)
class Titled:
    """A recorded column or final result, and its title on pages."""

    name: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What the pages of one kind of run show."""

    learning: tuple[Metric, ...]  # figures of the section Learning
    optimisation: tuple[Metric, ...]  # figures of the section Optimisation
    beside_mismatch: tuple[Metric, ...] = ()  # figures of the section Sampler and trainer, on the page of one run
    figures_by_step: tuple[Metric, ...] = ()  # in place of `optimisation` on the page of one run, if there are any
    first_chart: tuple[ChartLine, ...]  # all on the page of one run; on other pages the first one that was recorded
    results: tuple[Titled, ...]  # final results; the first one that all runs have compares settings
    last_value: Titled  # column of `iterations`; its last value compares settings if the runs share no result
    totals: tuple[Titled, ...] = ()  # columns of `iterations`; their sums are key numbers of a run
    samples: str  # word for the things that have a score, a return or a margin
    token_unit: str = "tokens"  # word for the rows of the table `tokens`

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Return all metrics."""
        return self.learning + self.optimisation + self.beside_mismatch

    @property
    def accuracies(self) -> set[str]:
        """Return the metrics that mean something only if responses are right or wrong."""
        return {metric.key for metric in self.metrics if metric.accuracy_of}


_STEPS = "mean over the steps, band: smallest to largest step"
_ERROR = "band: ± one standard error"
_AT_THE_END = "the last point is at the end"
# fmt: off
# a row: key, table, title and unit, how it is drawn, and what it is
_EXPLAINED_VARIANCE = Metric("explained_variance", "iterations", "Explained variance", "share",
    possible=(-math.inf, 1.0),
    caption="1 - Var(returns - values) / Var(returns) before the update: 1 where values predict every return, 0 where"
            " they do no better than their mean")
_LOSSES = (
    Metric("policy_loss", "steps", "Loss of the policy", "loss", band=_STEPS,
        caption="All terms. It is near 0: no measure of progress"),
    Metric("value_loss", "steps", "Loss of the value model", "loss", band=_STEPS, possible=POSITIVE,
        caption="Half the squared error of the values"),
    Metric("approx_kl", "steps", "Step size, KL(anchor || new)", "nats", band=_STEPS, possible=POSITIVE,
        caption="How far the policy has moved from the one that sampled, by k3"),
    Metric("clip_fraction", "steps", "Clip fraction", "share", band=_STEPS, possible=SHARE,
        caption="Tokens whose policy gradient the clip removed"),
)
_LEARNING_RATE = Metric("learning_rate", "steps", "Learning rate", "per step", possible=POSITIVE, is_setting=True,
    caption="Learning rate of the policy")
DRAWS = Metric("excess", "samples", "Draws", "nats", band=_ERROR,
    caption="Mean of log p(token) + entropy: 0 for tokens drawn from p, above 0 if likely tokens are preferred")
# a metric that a run does not have is left out
LEARNING = (
    Metric("score", "samples", "Score", "score", band=_ERROR, possible=None,
        caption="Mean score of the sampled responses"),
    Metric("accuracy", "samples", "Accuracy, sampled", "share", band=_ERROR, possible=SHARE,
        accuracy_of="score",
        caption="Share of correct sampled responses"),
    Metric("eval_accuracy", "iterations", "Accuracy, held out", "share", band=_AT_THE_END, possible=SHARE,
        accuracy_of="eval_score",
        caption="Greedy, before the update"),
    Metric("eval_score", "iterations", "Score, held out", "score", band=_AT_THE_END, possible=None,
        caption="Greedy, before the update"),
    Metric("ref_kl_per_sequence", "samples", "KL to the reference", "nats per response", band=_ERROR, possible=POSITIVE,
        caption="KL(policy || reference), exact over the vocabulary, mean over the responses"),
    Metric("entropy", "samples", "Entropy", "nats", possible=POSITIVE,
        caption="Entropy of the policy before the update, mean over all tokens"),
    Metric("response_length", "samples", "Response length", "tokens", band=_ERROR, possible=POSITIVE,
        caption="Mean over the responses"),
    _EXPLAINED_VARIANCE,
)
OPTIMISATION = (
    *_LOSSES,
    Metric("grad_norm", "steps", "Gradient norm", "norm", band=_STEPS, possible=POSITIVE,
        caption="Global norm of the policy's gradient before clipping"),
    Metric("value_grad_norm", "steps", "Gradient norm, value model", "norm", band=_STEPS, possible=POSITIVE,
        caption="Its global norm before clipping"),
    _LEARNING_RATE,
    Metric("clip_range", "iterations", "Clip range", "ratio", possible=POSITIVE, is_setting=True,
        caption="Adaptive clip range of the ratio"),
    Metric("kl_coef", "iterations", "KL coefficient", "coefficient", possible=POSITIVE, is_setting=True,
        caption="Weight of the KL to the reference"),
    Metric("penalty_coef", "iterations", "Penalty coefficient", "coefficient", possible=POSITIVE, is_setting=True,
        caption="Weight of KL(anchor || new)"),
)
CONTROL_LEARNING = (
    Metric("episode_return", "samples", "Return of training episodes", "return", band=_ERROR,
        caption="Mean return of the episodes that ended in the iteration"),
    Metric("eval_return", "iterations", "Return, likeliest actions", "return", band=_AT_THE_END,
        caption="Mean return of whole episodes before the update"),
    Metric("entropy", "iterations", "Entropy", "nats", possible=POSITIVE,
        caption="Entropy of the policy before the update, mean over all steps"),
    _EXPLAINED_VARIANCE,
)
CONTROL_OPTIMISATION = (
    *_LOSSES,
    Metric("joint_grad_norm", "steps", "Gradient norm", "norm", band=_STEPS, possible=POSITIVE,
        caption="Global norm over actor and critic before clipping"),
    _LEARNING_RATE,
    Metric("clip_range", "steps", "Clip range", "ratio", possible=POSITIVE, is_setting=True,
        caption="Clip range of the ratio"),
)
DPO_LEARNING = (
    Metric("eval_pair_accuracy", "iterations", "Held-out pairs in the right order", "share", possible=SHARE,
        caption="After each epoch"),
    Metric("eval_margin", "iterations", "Margin of held-out pairs", "reward",
        caption="Mean after each epoch"),
    Metric("margin", "iterations", "Margin of training pairs", "reward",
        caption="Mean after each epoch"),
    Metric("eval_accuracy", "iterations", "Accuracy, held out", "share", possible=SHARE,
        caption="Greedy accuracy on held-out prompts, before and after"),
)
DPO_OPTIMISATION = (
    Metric("loss", "steps", "Loss", "nats", band=_STEPS, possible=POSITIVE,
        caption="DPO loss of a minibatch's pairs"),
    Metric("grad_norm", "steps", "Gradient norm", "norm", band=_STEPS, possible=POSITIVE,
        caption="Global norm before clipping"),
)
DPO_STEPS = (
    Metric("loss", "steps", "Loss", "nats", possible=POSITIVE,
        caption="DPO loss before each step, mean over the pairs of a minibatch; log 2 = 0.693 at first"),
    Metric("margin", "steps", "Margin", "reward",
        caption="Difference of the implicit rewards of preferred and other response, mean"),
    Metric("accuracy", "steps", "Pairs in the right order", "share", possible=SHARE,
        caption="Share of a minibatch's pairs with a positive margin; 0 counts half"),
    Metric("grad_norm", "steps", "Gradient norm", "norm", possible=POSITIVE,
        caption="Global norm before clipping"),
)
# fmt: on
KINDS = {
    "language": Kind(
        learning=LEARNING,
        optimisation=OPTIMISATION,
        first_chart=(
            ChartLine("eval_score", "score, held out", "held out, greedy"),
            ChartLine("score", "score", "sampled ± standard error"),
        ),
        samples="responses",
        results=(
            Titled("eval_accuracy", "held-out accuracy"),
            Titled("eval_score", "held-out score"),
        ),
        last_value=Titled("score_mean", "last score"),
        totals=(Titled("sequences", "responses"), Titled("tokens", "response tokens")),
        beside_mismatch=(DRAWS,),
    ),
    "control": Kind(
        learning=CONTROL_LEARNING,
        optimisation=CONTROL_OPTIMISATION,
        first_chart=(
            ChartLine("eval_return", "return", "likeliest actions"),
            ChartLine("episode_return", "return", "training episodes ± standard error"),
        ),
        samples="episodes",
        results=(
            Titled("eval_return", "return, likeliest actions"),
            Titled("last_100_return", "return, last 100 episodes"),
        ),
        last_value=Titled("episode_return_mean", "last return"),
        totals=(Titled("tokens", "environment steps"), Titled("episodes", "episodes that ended")),
        token_unit="environment steps",
    ),
    "dpo": Kind(
        learning=DPO_LEARNING,
        optimisation=DPO_OPTIMISATION,
        first_chart=(ChartLine("eval_pair_accuracy", "pairs in order", "held-out pairs"),),
        samples="pairs",
        results=(Titled("eval_accuracy", "held-out accuracy"),),
        last_value=Titled("eval_pair_accuracy", "held-out pairs in order"),
        figures_by_step=DPO_STEPS,
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
