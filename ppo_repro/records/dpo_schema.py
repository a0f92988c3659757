"""The tables of a DPO run; an iteration is an epoch over the training pairs."""

from __future__ import annotations

from ppo_repro.records import schema
from ppo_repro.records.schema import ITERATION, MINIBATCH, Column, Table

_PAIR = Column("pair", "int32", "index", "Training pairs first, then held-out ones.")

PAIRS = Table(
    "pairs",
    "one row per preference pair",
    ("pair",),
    (
        _PAIR,
        Column("held_out", "bool", "", "Not trained on."),
        *schema.PAIRS.named("prompt_key", "chosen", "rejected", "prompt_ids", "chosen_ids", "rejected_ids"),
        Column("ref_chosen_logprobs", "float64", "nats", "Log-prob of the preferred response under the reference."),
        Column("ref_rejected_logprobs", "float64", "nats", "The same of the other response."),
    ),
)

MARGINS = Table(
    "margins",
    "one row per pair and epoch",
    ("iteration", "pair"),
    (
        ITERATION,
        _PAIR,
        Column("held_out", "bool", "", "Not trained on."),
        Column("chosen_logprobs", "float64", "nats", "Log-prob of the preferred response after the epoch."),
        Column("rejected_logprobs", "float64", "nats", "The same of the other response."),
        Column("margins", "float64", "reward", "Difference of the implicit rewards after the epoch."),
    ),
)

STEPS = Table(
    "steps",
    "one row per optimizer step",
    ("iteration", "minibatch"),
    (
        ITERATION,
        MINIBATCH,
        Column("pairs", "int32", "count", "Pairs in the minibatch."),
        Column("loss", "float64", "nats", "DPO loss before the step, mean over pairs."),
        Column("margin", "float64", "reward", "Difference of the implicit rewards before the step, mean over pairs."),
        Column("accuracy", "float64", "", "Share of pairs with a positive margin; one half for a margin of 0."),
        Column("grad_norm", "float64", "", "Global gradient norm before clipping."),
        Column("policy_digest", "string", "", "Digest of the policy weights after the step."),
    ),
)

ITERATIONS = Table(
    "iterations",
    "one row per epoch",
    ("iteration",),
    (
        ITERATION,
        Column("pairs", "int32", "count", "Training pairs."),
        Column("loss", "float64", "nats", "DPO loss of the epoch's steps, mean over pairs."),
        Column("margin", "float64", "reward", "Margin of the training pairs after the epoch, mean."),
        Column("eval_margin", "float64", "reward", "Margin of the held-out pairs after the epoch, mean."),
        Column("eval_pair_accuracy", "float64", "", "Share of held-out pairs in the right order after the epoch."),
        Column("eval_accuracy", "float64", "", "Greedy accuracy on held-out prompts before the epoch; null where not evaluated.", nullable=True),
        Column("seconds_evaluation", "float64", "s", "Wall time of the evaluation.", in_fingerprint=False),
        Column("seconds_forward", "float64", "s", "Wall time of the log-probs of all pairs.", in_fingerprint=False),
        Column("seconds_update", "float64", "s", "Wall time of the optimizer steps.", in_fingerprint=False),
        Column("ended_at", "float64", "s", "When the epoch ended, in seconds since 1970, UTC.", in_fingerprint=False),
    ),
)

TABLES = (MARGINS, STEPS, ITERATIONS)
SIDE_TABLES = (PAIRS,)
