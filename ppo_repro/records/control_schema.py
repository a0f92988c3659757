"""The five tables of a control run: those of a language run, with the same columns where they mean the same.

A sequence is a fragment: the part of one episode that lies in one iteration. A token is an environment step.
"""

from __future__ import annotations

from ppo_repro.records.schema import EPOCH, ITERATION, MINIBATCH, Column, Table, full

_SEQUENCE = Column("sequence", "int32", "index", "Fragment within the iteration, from 0, by environment and time.")
_POSITION = Column("position", "int32", "index", "Step within the fragment, from 0.")

SEQUENCES = Table(
    "sequences",
    "one row per fragment of an episode",
    ("iteration", "sequence"),
    (
        ITERATION,
        _SEQUENCE,
        Column("environment", "int32", "index", "Which copy of the environment."),
        Column("episode", "int32", "index", "Which episode of that copy, from 0."),
        Column("seed", "int64", "", "What that episode was reset with."),
        Column("first_step", "int32", "steps", "Step of the episode at which the fragment begins."),
        Column("last_step", "int32", "steps", "Step of the iteration with which it ends."),
        Column("fragment_length", "int32", "steps", "Steps of the fragment."),
        Column("end_reason", "string", "", "`terminated` by the environment, `truncated` by its time limit, `cut` by the end of the iteration."),
        Column("final_observations", "list<float32>", "", "Observation after the last action."),
        Column("final_values", "float32", "reward", "What the return goes on with after the fragment; 0 where nothing follows."),
        Column("reward_sum", "float64", "reward", "Sum of rewards over the fragment."),
        Column("episode_return", "float64", "reward", "Sum of rewards over the episode; null where it has not ended.", nullable=True),
    ),
)

TOKENS = Table(
    "tokens",
    "one row per environment step",
    ("iteration", "sequence", "position"),
    (
        ITERATION,
        _SEQUENCE,
        _POSITION,
        Column("observations", "list<float32>", "", "What the policy saw."),
        Column("actions", "list<float32>", "", "What it drew: the index of a discrete action, or a real one before it is clipped to its space."),
        Column("rollout_logprobs", "float32", "nats", "Log-prob (log-density of a real action) while sampling."),
        Column("old_logprobs", "float32", "nats", "The same in the training forward before any update."),
        Column("entropies", "float32", "nats", "Entropy of the policy in this state; differential for real actions."),
        Column("values", "float32", "reward", "Critic before the action."),
        Column("rewards", "float32", "reward", "What the environment returned."),
        Column("raw_advantages", "float32", "reward", "Generalized advantage estimate."),
        Column("returns", "float32", "reward", "Value target, raw_advantages + values."),
    ),
)

UPDATES = Table(
    "updates",
    "one row per step, epoch and minibatch",
    ("iteration", "epoch", "minibatch", "sequence", "position"),
    (
        ITERATION,
        EPOCH,
        MINIBATCH,
        _SEQUENCE,
        _POSITION,
        Column("advantages", "float32", "", "Advantage used in the loss; whitening by minibatch gives each epoch its own."),
        Column("new_logprobs", "float32", "nats", "Log-prob under the policy before this optimizer step."),
        Column("ratios", "float32", "", "exp(new_logprobs - rollout_logprobs)."),
        Column("clip_flag", "string", "", "none, clip_high, clip_low (gradient zero), wrong_high or wrong_low (outside the band, gradient kept)."),
        Column("new_values", "float32", "reward", "Critic before this optimizer step."),
        Column("value_clipped", "bool", "", "The clipped branch decided the value loss."),
        Column("new_entropies", "float32", "nats", "Entropy of the policy before this optimizer step."),
        full("policy_losses", "float32", "", "Policy loss of the step: surrogates minus entropy_coef times new_entropies."),
        full("surrogates", "float32", "", "The clipped surrogate."),
        full("value_losses", "float32", "", "Value loss of the step, before value_coef."),
    ),
)

STEPS = Table(
    "steps",
    "one row per optimizer step",
    ("iteration", "epoch", "minibatch"),
    (
        ITERATION,
        EPOCH,
        MINIBATCH,
        Column("tokens", "int32", "steps", "Environment steps in the minibatch."),
        Column("policy_loss", "float64", "", "Clipped surrogate minus the entropy bonus, mean."),
        Column("value_loss", "float64", "", "Squared error times one half, clipped if configured, before value_coef, mean."),
        Column("entropy", "float64", "nats", "Entropy before the step, mean."),
        Column("approx_kl", "float64", "nats", "KL(rollout policy || new) by k3, mean."),
        Column("clip_fraction", "float64", "", "Share of steps whose policy gradient the clip removed."),
        Column("value_clip_fraction", "float64", "", "Share of steps whose value loss the clip decided."),
        Column("joint_grad_norm", "float64", "", "Gradient norm over policy and critic together before clipping."),
        Column("learning_rate", "float64", "", "Learning rate of this step, of both networks."),
        Column("clip_range", "float64", "", "Clip range of the ratio in this step."),
        Column("policy_digest", "string", "", "Digest of the policy weights after the step."),
        Column("value_digest", "string", "", "Digest of the critic weights after the step."),
        full("surrogate_loss", "float64", "", "Mean of surrogates."),
        full("entropy_loss", "float64", "", "Minus entropy_coef times the mean of new_entropies."),
    ),
)

ITERATIONS = Table(
    "iterations",
    "one row per iteration",
    ("iteration",),
    (
        ITERATION,
        Column("sequences", "int32", "count", "Fragments."),
        Column("tokens", "int32", "steps", "Environment steps."),
        Column("episodes", "int32", "count", "Episodes that ended."),
        Column("episode_return_mean", "float64", "reward", "Mean return of these episodes; null where none ended.", nullable=True),
        Column("entropy", "float64", "nats", "Entropy before the update, mean."),
        Column("explained_variance", "float64", "", "1 - Var(returns - values) / Var(returns); null where the returns do not vary.", nullable=True),
        Column("unequal_old_rollout_logprobs", "int64", "steps", "Steps whose old and rollout log-prob differ in any bit."),
        Column("max_abs_old_rollout", "float64", "nats", "Largest |old - rollout| log-prob difference."),
        Column("first_minibatch_tokens", "int64", "steps", "Steps of the first minibatch of the update."),
        Column("unequal_first_ratios", "int64", "steps", "Steps of the first minibatch whose ratio is not exactly 1."),
        Column("unequal_values", "int64", "steps", "Steps of the first minibatch whose recomputed value differs in any bit."),
        Column("eval_return", "float64", "reward", "Mean return of whole episodes with the likeliest action before this update; null where not evaluated.", nullable=True),
        Column("seconds_rollout", "float64", "s", "Wall time of stepping and sampling.", in_fingerprint=False),
        Column("seconds_forward", "float64", "s", "Wall time of the forward pass over the rollout.", in_fingerprint=False),
        Column("seconds_update", "float64", "s", "Wall time of the update.", in_fingerprint=False),
        Column("seconds_evaluation", "float64", "s", "Wall time of the evaluation.", in_fingerprint=False),
        Column("seconds_other", "float64", "s", "The rest of the iteration's wall time, so that the seconds add up to it.", nullable=True, in_fingerprint=False),
        Column("ended_at", "float64", "s", "When the iteration ended, in seconds since 1970, UTC.", nullable=True, in_fingerprint=False),
    ),
)

TABLES = (SEQUENCES, TOKENS, UPDATES, STEPS, ITERATIONS)
