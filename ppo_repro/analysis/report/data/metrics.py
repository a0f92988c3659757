"""List what pages show of each kind of run, and the metrics that they draw: a row has all that a page says of one.

A new metric is a row here: run_curves.py computes its curve, and sections/curve_figures.py draws it. The value of a
metric of samples comes from `response_means`.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)
SHARE: Range = (0.0, 1.0)
POSITIVE: Range = (0.0, math.inf)


@dataclass(frozen=True)
class Metric:
    """A number of a run that pages name; a metric with a curve also has a unit and the caption of its figure.

    `source` is the recorded table from which the curve of `key` is read; a number without a curve may be a final
    result. A metric of `samples` is computed from responses, for its error band. It has the name of its column in
    `iterations`, if there is one.
    """

    key: str  # the recorded column or result, or its name on the page of columns
    source: Literal["samples", "iterations", "steps", "final"]
    title: str
    unit: str = ""
    _: KW_ONLY
    caption: str = ""
    band: str = ""  # what lines and bands are on the page of one run
    label: str = ""  # in the legend of the first chart, on the page of one run
    possible: Range | None = ANY  # None: the range of scores
    accuracy_of: str = ""  # key of a score: this metric is its accuracy, without a figure if the two are equal
    is_setting: bool = False  # a setting has no figure if it never changes


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """What the pages of one kind of run show."""

    learning: tuple[Metric, ...]  # figures of the section Learning
    optimisation: tuple[Metric, ...]  # figures of the section Optimisation
    beside_mismatch: tuple[Metric, ...] = ()  # figures of the section Sampler and trainer, on the page of one run
    first_chart: tuple[Metric, ...]  # all on the page of one run; on other pages the first one that was recorded
    results: tuple[Metric, ...]  # final results; the first one that all runs have compares settings
    last_value: Metric  # column of `iterations`; its last value compares settings if the runs share no result
    by_step: tuple[Metric, ...] = ()  # figures of the section Steps, on the page of one run, in place of `optimisation`
    totals: tuple[Metric, ...] = ()  # columns of `iterations`; their sums are key numbers of a run
    samples: str  # word for the things that have a score, a return or a margin
    token_unit: str = "tokens"  # word for the rows of the table `tokens`

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Return all metrics with curves."""
        return self.learning + self.optimisation + self.beside_mismatch


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
_SCORE = Metric("score_mean", "samples", "Score", "score", band=_ERROR, possible=None,
    caption="Mean score of the sampled responses")
_EVAL_ACCURACY = Metric("eval_accuracy", "iterations", "Accuracy, held out", "share", band=_AT_THE_END, possible=SHARE,
    accuracy_of="eval_score",
    caption="Greedy, before the update")
_EVAL_SCORE = Metric("eval_score", "iterations", "Score, held out", "score", band=_AT_THE_END, possible=None,
    caption="Greedy, before the update")
_RETURN = Metric("episode_return_mean", "samples", "Return of training episodes", "return", band=_ERROR,
    caption="Mean return of the episodes that ended in the iteration")
_EVAL_RETURN = Metric("eval_return", "iterations", "Return, likeliest actions", "return", band=_AT_THE_END,
    caption="Mean return of whole episodes before the update")
_PAIRS_IN_ORDER = Metric("eval_pair_accuracy", "iterations", "Held-out pairs in the right order", "share",
    possible=SHARE, caption="After each epoch")
_DPO_EVAL_ACCURACY = Metric("eval_accuracy", "iterations", "Accuracy, held out", "share", possible=SHARE,
    caption="Greedy accuracy on held-out prompts, before and after")
_DPO_GRAD_NORM = Metric("grad_norm", "steps", "Gradient norm", "norm", band=_STEPS, possible=POSITIVE,
    caption="Global norm before clipping")
# the figures of a kind of run, in their order; a metric that a run does not have is left out
CONTENT = {
    "language": PageContent(
        learning=(
            _SCORE,
            Metric("accuracy", "samples", "Accuracy, sampled", "share", band=_ERROR, possible=SHARE,
                accuracy_of="score_mean",
                caption="Share of correct sampled responses"),
            _EVAL_ACCURACY,
            _EVAL_SCORE,
            Metric("ref_kl_per_sequence", "samples", "KL to the reference", "nats per response", band=_ERROR,
                possible=POSITIVE,
                caption="KL(policy || reference), exact over the vocabulary, mean over the responses"),
            Metric("entropy", "samples", "Entropy", "nats", possible=POSITIVE,
                caption="Entropy of the policy before the update, mean over all tokens"),
            Metric("response_length_mean", "samples", "Response length", "tokens", band=_ERROR, possible=POSITIVE,
                caption="Mean over the responses"),
            _EXPLAINED_VARIANCE,
        ),
        optimisation=(
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
            Metric("penalty_coef", "iterations", "Penalty coefficient", "coefficient", possible=POSITIVE,
                is_setting=True,
                caption="Weight of KL(anchor || new)"),
        ),
        first_chart=(
            replace(_EVAL_SCORE, title="score, held out", label="held out, greedy"),
            replace(_SCORE, title="score", label="sampled ± standard error"),
        ),
        samples="responses",
        results=(replace(_EVAL_ACCURACY, title="held-out accuracy"), replace(_EVAL_SCORE, title="held-out score")),
        last_value=replace(_SCORE, title="last score"),
        totals=(Metric("sequences", "iterations", "responses"), Metric("tokens", "iterations", "response tokens")),
        beside_mismatch=(
            Metric("excess", "samples", "Draws", "nats", band=_ERROR,
                caption="Mean of log p(token) + entropy: 0 for tokens drawn from p, above 0 if likely tokens are"
                        " preferred"),
        ),
    ),
    "control": PageContent(
        learning=(
            _RETURN,
            _EVAL_RETURN,
            Metric("entropy", "iterations", "Entropy", "nats", possible=POSITIVE,
                caption="Entropy of the policy before the update, mean over all steps"),
            _EXPLAINED_VARIANCE,
        ),
        optimisation=(
            *_LOSSES,
            Metric("joint_grad_norm", "steps", "Gradient norm", "norm", band=_STEPS, possible=POSITIVE,
                caption="Global norm over actor and critic before clipping"),
            _LEARNING_RATE,
            Metric("clip_range", "steps", "Clip range", "ratio", possible=POSITIVE, is_setting=True,
                caption="Clip range of the ratio"),
        ),
        first_chart=(
            replace(_EVAL_RETURN, title="return", label="likeliest actions"),
            replace(_RETURN, title="return", label="training episodes ± standard error"),
        ),
        samples="episodes",
        results=(
            replace(_EVAL_RETURN, title="return, likeliest actions"),
            Metric("last_100_return", "final", "return, last 100 episodes"),
        ),
        last_value=replace(_RETURN, title="last return"),
        totals=(
            Metric("tokens", "iterations", "environment steps"),
            Metric("episodes", "iterations", "episodes that ended"),
        ),
        token_unit="environment steps",
    ),
    "dpo": PageContent(
        learning=(
            _PAIRS_IN_ORDER,
            Metric("eval_margin", "iterations", "Margin of held-out pairs", "reward",
                caption="Mean after each epoch"),
            Metric("margin", "iterations", "Margin of training pairs", "reward",
                caption="Mean after each epoch"),
            _DPO_EVAL_ACCURACY,
        ),
        optimisation=(
            Metric("loss", "steps", "Loss", "nats", band=_STEPS, possible=POSITIVE,
                caption="DPO loss of a minibatch's pairs"),
            _DPO_GRAD_NORM,
        ),
        by_step=(
            Metric("loss", "steps", "Loss", "nats", possible=POSITIVE,
                caption="DPO loss before each step, mean over the pairs of a minibatch; log 2 = 0.693 at first"),
            Metric("margin", "steps", "Margin", "reward",
                caption="Difference of the implicit rewards of preferred and other response, mean"),
            Metric("accuracy", "steps", "Pairs in the right order", "share", possible=SHARE,
                caption="Share of a minibatch's pairs with a positive margin; 0 counts half"),
            _DPO_GRAD_NORM,
        ),
        first_chart=(replace(_PAIRS_IN_ORDER, title="pairs in order", label="held-out pairs"),),
        samples="pairs",
        results=(replace(_DPO_EVAL_ACCURACY, title="held-out accuracy"),),
        last_value=replace(_PAIRS_IN_ORDER, title="held-out pairs in order"),
    ),
}
# fmt: on
