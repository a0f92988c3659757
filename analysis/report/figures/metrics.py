"""The curves of a run: what each one is called, its unit, how to read it, and the table it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A curve over the iterations; `key` is its name in the frames of curves."""

    key: str
    title: str
    unit: str
    caption: str


_STEPS = "mean over the steps, band: smallest to largest step"
LEARNING: tuple[Metric, ...] = (
    Metric("score", "Score", "", "Mean score of the sampled responses; band: ± one standard error over the responses."),
    Metric("accuracy", "Accuracy, sampled", "", "Share of correct sampled responses; band: ± one standard error."),
    Metric(
        "eval_accuracy", "Accuracy, held out", "",
        "Greedy accuracy on held-out prompts, before the update; the last point is after the last update.",
    ),
    Metric(
        "eval_score", "Score, held out", "",
        "Mean score of the greedy responses to held-out prompts; the last point is after the last update.",
    ),
    Metric(
        "ref_kl_per_sequence", "KL to the reference", "nats per response",
        "KL(policy || reference), exact over the vocabulary, summed over the tokens of a response, mean over the "
        "responses; band: ± one standard error.",
    ),
    Metric(
        "entropy", "Entropy", "nats per token",
        "Entropy of the policy before the update, mean over all tokens; band: ± one standard error, clustered by "
        "response.",
    ),
    Metric(
        "response_length", "Response length", "tokens", "Mean over the responses; band: ± one standard error."
    ),
    Metric(
        "explained_variance", "Explained variance", "",
        "1 - Var(returns - values) / Var(returns) before the update: 1 where the value model predicts every return, 0 "
        "where it does no better than their mean.",
    ),
)  # fmt: skip
OPTIMISATION: tuple[Metric, ...] = (
    Metric(
        "policy_loss", "Loss of the policy", "",
        f"What the optimizer lowers, all terms; {_STEPS}. It is near 0 by construction and is no measure of progress.",
    ),
    Metric("value_loss", "Loss of the value model", "", f"Half the squared error of the values; {_STEPS}."),
    Metric(
        "approx_kl", "Step size, KL(anchor || new)", "nats per token",
        f"How far the policy has moved from the one that sampled, by k3; {_STEPS}.",
    ),
    Metric(
        "clip_fraction", "Clip fraction", "share of tokens", f"Tokens whose policy gradient the clip removed; {_STEPS}."
    ),
    Metric("grad_norm", "Gradient norm", "", f"Global norm of the policy's gradient before clipping; {_STEPS}."),
    Metric("value_grad_norm", "Gradient norm, value model", "", f"Its global norm before clipping; {_STEPS}."),
    Metric("learning_rate", "Learning rate", "", "Learning rate of the policy."),
    Metric("value_learning_rate", "Learning rate, value model", "", "Learning rate of the value model."),
)  # fmt: skip
CONTROL_LEARNING: tuple[Metric, ...] = (
    Metric(
        "episode_return", "Return of training episodes", "",
        "Mean undiscounted return of the episodes that ended in the iteration; band: ± one standard error over them.",
    ),
    Metric(
        "eval_return", "Return, likeliest actions", "",
        "Mean return of whole episodes with the likeliest action, before the update; the last point is after the last "
        "update.",
    ),
    Metric("entropy", "Entropy", "nats per step", "Entropy of the policy before the update, mean over the steps."),
    Metric(
        "explained_variance", "Explained variance", "",
        "1 - Var(returns - values) / Var(returns) before the update: 1 where the critic predicts every return, 0 where "
        "it does no better than their mean.",
    ),
)  # fmt: skip
CONTROL_OPTIMISATION: tuple[Metric, ...] = (
    Metric("policy_loss", "Loss of the policy", "", f"Clipped surrogate minus the entropy bonus; {_STEPS}."),
    Metric("value_loss", "Loss of the critic", "", f"Half the squared error of the values; {_STEPS}."),
    Metric(
        "approx_kl", "Step size, KL(rollout || new)", "nats per step",
        f"How far the policy has moved from the one that sampled, by k3; {_STEPS}.",
    ),
    Metric(
        "clip_fraction", "Clip fraction", "share of steps", f"Steps whose policy gradient the clip removed; {_STEPS}."
    ),
    Metric(
        "joint_grad_norm", "Gradient norm", "", f"Global norm over actor and critic before clipping; {_STEPS}."
    ),
    Metric("learning_rate", "Learning rate", "", "Learning rate of actor and critic."),
    Metric("clip_range", "Clip range", "", "Clip range of the ratio."),
)  # fmt: skip
# metrics that are columns of `iterations` and of `steps`
OF_ITERATIONS = ("eval_accuracy", "eval_score", "explained_variance")
OF_STEPS = tuple(metric.key for metric in OPTIMISATION)
CONTROL_OF_ITERATIONS = ("eval_return", "entropy", "explained_variance")
CONTROL_OF_STEPS = tuple(metric.key for metric in CONTROL_OPTIMISATION)
