"""List what pages show of each kind of run, and the metrics that they draw: a row has all that a page says of one."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)
SHARE: Range = (0.0, 1.0)
POSITIVE: Range = (0.0, math.inf)


@dataclass(frozen=True)
class Plotted:
    """A metric with a figure of its own, whose curves are over iterations or steps.

    `source` is the recorded table from which `key` is read; a metric of `samples` is computed from responses, for its
    error band. It has the name of its column in `iterations`, if there is one.
    """

    key: str  # the recorded column, or its name on the page of columns
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
class Quantity:
    """A column, a final result or a metric that pages name, with its names there."""

    key: str
    title: str
    label: str = ""  # in the legend of the first chart, on the page of one run


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """What the pages of one kind of run show."""

    learning: tuple[Plotted, ...]  # figures of the section Learning
    optimisation: tuple[Plotted, ...]  # figures of the section Optimisation
    beside_mismatch: tuple[Plotted, ...] = ()  # figures of the section Sampler and trainer, on the page of one run
    first_chart: tuple[Quantity, ...]  # all on the page of one run; on other pages the first one that was recorded
    results: tuple[Quantity, ...]  # final results; the first one that all runs have compares settings
    last_value: Quantity  # column of `iterations`; its last value compares settings if the runs share no result
    totals: tuple[Quantity, ...] = ()  # columns of `iterations`; their sums are key numbers of a run
    samples: str  # word for the things that have a score, a return or a margin
    token_unit: str = "tokens"  # word for the rows of the table `tokens`

    @property
    def metrics(self) -> tuple[Plotted, ...]:
        """Return all metrics."""
        return self.learning + self.optimisation + self.beside_mismatch

    def possible_of(self, quantity: Quantity) -> Range | None:
        """Return the range of the metric with the key of a quantity, as `Plotted.possible`; ANY without a metric."""
        return next((metric.possible for metric in self.metrics if metric.key == quantity.key), ANY)

    @property
    def accuracies(self) -> set[str]:
        """Return the metrics that mean something only if responses are right or wrong."""
        return {metric.key for metric in self.metrics if metric.accuracy_of}


_STEPS = "mean over the steps, band: smallest to largest step"
_ERROR = "band: ± one standard error"
_AT_THE_END = "the last point is at the end"
# fmt: off
# a row: key, table, title and unit, how it is drawn, and what it is
_EXPLAINED_VARIANCE = Plotted("explained_variance", "iterations", "Explained variance", "share",
    possible=(-math.inf, 1.0),
    caption="1 - Var(returns - values) / Var(returns) before the update: 1 where values predict every return, 0 where"
            " they do no better than their mean")
_LOSSES = (
    Plotted("policy_loss", "steps", "Loss of the policy", "loss", band=_STEPS,
        caption="All terms. It is near 0: no measure of progress"),
    Plotted("value_loss", "steps", "Loss of the value model", "loss", band=_STEPS, possible=POSITIVE,
        caption="Half the squared error of the values"),
    Plotted("approx_kl", "steps", "Step size, KL(anchor || new)", "nats", band=_STEPS, possible=POSITIVE,
        caption="How far the policy has moved from the one that sampled, by k3"),
    Plotted("clip_fraction", "steps", "Clip fraction", "share", band=_STEPS, possible=SHARE,
        caption="Tokens whose policy gradient the clip removed"),
)
_LEARNING_RATE = Plotted("learning_rate", "steps", "Learning rate", "per step", possible=POSITIVE, is_setting=True,
    caption="Learning rate of the policy")
_EXCESS_OF_DRAWS = Plotted("excess", "samples", "Draws", "nats", band=_ERROR,
    caption="Mean of log p(token) + entropy: 0 for tokens drawn from p, above 0 if likely tokens are preferred")
# a metric that a run does not have is left out
LEARNING = (
    Plotted("score_mean", "samples", "Score", "score", band=_ERROR, possible=None,
        caption="Mean score of the sampled responses"),
    Plotted("accuracy", "samples", "Accuracy, sampled", "share", band=_ERROR, possible=SHARE,
        accuracy_of="score_mean",
        caption="Share of correct sampled responses"),
    Plotted("eval_accuracy", "iterations", "Accuracy, held out", "share", band=_AT_THE_END, possible=SHARE,
        accuracy_of="eval_score",
        caption="Greedy, before the update"),
    Plotted("eval_score", "iterations", "Score, held out", "score", band=_AT_THE_END, possible=None,
        caption="Greedy, before the update"),
    Plotted("ref_kl_per_sequence", "samples", "KL to the reference", "nats per response", band=_ERROR,
        possible=POSITIVE,
        caption="KL(policy || reference), exact over the vocabulary, mean over the responses"),
    Plotted("entropy", "samples", "Entropy", "nats", possible=POSITIVE,
        caption="Entropy of the policy before the update, mean over all tokens"),
    Plotted("response_length_mean", "samples", "Response length", "tokens", band=_ERROR, possible=POSITIVE,
        caption="Mean over the responses"),
    _EXPLAINED_VARIANCE,
)
OPTIMISATION = (
    *_LOSSES,
    Plotted("grad_norm", "steps", "Gradient norm", "norm", band=_STEPS, possible=POSITIVE,
        caption="Global norm of the policy's gradient before clipping"),
    Plotted("value_grad_norm", "steps", "Gradient norm, value model", "norm", band=_STEPS, possible=POSITIVE,
        caption="Its global norm before clipping"),
    _LEARNING_RATE,
    Plotted("clip_range", "iterations", "Clip range", "ratio", possible=POSITIVE, is_setting=True,
        caption="Adaptive clip range of the ratio"),
    Plotted("kl_coef", "iterations", "KL coefficient", "coefficient", possible=POSITIVE, is_setting=True,
        caption="Weight of the KL to the reference"),
    Plotted("penalty_coef", "iterations", "Penalty coefficient", "coefficient", possible=POSITIVE, is_setting=True,
        caption="Weight of KL(anchor || new)"),
)
CONTROL_LEARNING = (
    Plotted("episode_return_mean", "samples", "Return of training episodes", "return", band=_ERROR,
        caption="Mean return of the episodes that ended in the iteration"),
    Plotted("eval_return", "iterations", "Return, likeliest actions", "return", band=_AT_THE_END,
        caption="Mean return of whole episodes before the update"),
    Plotted("entropy", "iterations", "Entropy", "nats", possible=POSITIVE,
        caption="Entropy of the policy before the update, mean over all steps"),
    _EXPLAINED_VARIANCE,
)
CONTROL_OPTIMISATION = (
    *_LOSSES,
    Plotted("joint_grad_norm", "steps", "Gradient norm", "norm", band=_STEPS, possible=POSITIVE,
        caption="Global norm over actor and critic before clipping"),
    _LEARNING_RATE,
    Plotted("clip_range", "steps", "Clip range", "ratio", possible=POSITIVE, is_setting=True,
        caption="Clip range of the ratio"),
)
DPO_LEARNING = (
    Plotted("eval_pair_accuracy", "iterations", "Held-out pairs in the right order", "share", possible=SHARE,
        caption="After each epoch"),
    Plotted("eval_margin", "iterations", "Margin of held-out pairs", "reward",
        caption="Mean after each epoch"),
    Plotted("margin", "iterations", "Margin of training pairs", "reward",
        caption="Mean after each epoch"),
    Plotted("eval_accuracy", "iterations", "Accuracy, held out", "share", possible=SHARE,
        caption="Greedy accuracy on held-out prompts, before and after"),
)
DPO_OPTIMISATION = (
    Plotted("loss", "steps", "Loss", "nats", band=_STEPS, possible=POSITIVE,
        caption="DPO loss of a minibatch's pairs"),
    Plotted("grad_norm", "steps", "Gradient norm", "norm", band=_STEPS, possible=POSITIVE,
        caption="Global norm before clipping"),
)
DPO_STEPS = (  # by step, on the page of one DPO run in place of `optimisation`
    Plotted("loss", "steps", "Loss", "nats", possible=POSITIVE,
        caption="DPO loss before each step, mean over the pairs of a minibatch; log 2 = 0.693 at first"),
    Plotted("margin", "steps", "Margin", "reward",
        caption="Difference of the implicit rewards of preferred and other response, mean"),
    Plotted("accuracy", "steps", "Pairs in the right order", "share", possible=SHARE,
        caption="Share of a minibatch's pairs with a positive margin; 0 counts half"),
    Plotted("grad_norm", "steps", "Gradient norm", "norm", possible=POSITIVE,
        caption="Global norm before clipping"),
)
# fmt: on
CONTENT = {
    "language": PageContent(
        learning=LEARNING,
        optimisation=OPTIMISATION,
        first_chart=(
            Quantity("eval_score", "score, held out", "held out, greedy"),
            Quantity("score_mean", "score", "sampled ± standard error"),
        ),
        samples="responses",
        results=(
            Quantity("eval_accuracy", "held-out accuracy"),
            Quantity("eval_score", "held-out score"),
        ),
        last_value=Quantity("score_mean", "last score"),
        totals=(Quantity("sequences", "responses"), Quantity("tokens", "response tokens")),
        beside_mismatch=(_EXCESS_OF_DRAWS,),
    ),
    "control": PageContent(
        learning=CONTROL_LEARNING,
        optimisation=CONTROL_OPTIMISATION,
        first_chart=(
            Quantity("eval_return", "return", "likeliest actions"),
            Quantity("episode_return_mean", "return", "training episodes ± standard error"),
        ),
        samples="episodes",
        results=(
            Quantity("eval_return", "return, likeliest actions"),
            Quantity("last_100_return", "return, last 100 episodes"),
        ),
        last_value=Quantity("episode_return_mean", "last return"),
        totals=(Quantity("tokens", "environment steps"), Quantity("episodes", "episodes that ended")),
        token_unit="environment steps",
    ),
    "dpo": PageContent(
        learning=DPO_LEARNING,
        optimisation=DPO_OPTIMISATION,
        first_chart=(Quantity("eval_pair_accuracy", "pairs in order", "held-out pairs"),),
        samples="pairs",
        results=(Quantity("eval_accuracy", "held-out accuracy"),),
        last_value=Quantity("eval_pair_accuracy", "held-out pairs in order"),
    ),
}
