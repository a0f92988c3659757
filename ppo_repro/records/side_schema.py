"""Tables outside the fingerprint: the held-out responses of every evaluation, and what was trained before PPO.

Their digests are in the manifest, so `verify`, `diff` and `rerun` cover them; the chain of digests does not.
"""

from __future__ import annotations

from dataclasses import replace

from ppo_repro.records.schema import REDOS, Column, Table


def _from_full_on(table: Table) -> Table:
    """The table whose columns are all recorded at level full and above; its digest covers every one of them."""
    return replace(table, columns=tuple(replace(column, level="full") for column in table.columns))


_STEP = Column("step", "int32", "index", "Optimizer step, from 0.")
_EPOCH = Column("epoch", "int32", "index", "Pass over the pairs, from 0.")
_MINIBATCH = Column("minibatch", "int32", "index", "Minibatch within the epoch, from 0.")
_PAIR = Column("pair", "int32", "index", "Row of the table `pairs`.")

_EVALUATIONS = Table(
    "evaluations",
    "one row per held-out prompt and evaluation",
    ("iteration", "sequence"),
    (
        Column("iteration", "int32", "count", "Before the update of this iteration; of the last one, the number of iterations."),
        Column("sequence", "int32", "index", "Held-out prompt, from 0, in the order of the task."),
        Column("prompt_key", "string", "", "Stable name of the prompt in its task."),
        Column("prompt", "string", "", "Prompt text."),
        Column("response", "string", "", "Greedy response without special tokens."),
        Column("answer", "string", "", "What the verifier expects."),
        Column("prompt_ids", "list<int32>", "token id", "Prompt tokens."),
        Column("response_ids", "list<int32>", "token id", "Response tokens, end token included."),
        Column("response_length", "int32", "tokens", "Length of response_ids."),
        Column("finish_reason", "string", "", "`stop` after an end token, `length` at the limit."),
        Column("scores", "float64", "", "Weighted sum of the reward terms, after the rule for a missing end token."),
        Column("score_parts", "list<float64>", "", "Unweighted value of each reward term, in the order of the configuration."),
        Column("is_correct", "bool", "", "Response equals the answer and ended by itself."),
        Column("episode_ids", "list<int32>", "token id", "All tokens after the prompt, as in `sequences`.", nullable=True, only_with="turns"),
        Column("is_forced", "list<int32>", "", "Which of them the environment put in, as in `sequences`.", nullable=True, only_with="turns"),
    ),
)

_WARM_START_STEPS = Table(
    "warm_start_steps",
    "one row per supervised step before PPO",
    ("step",),
    (
        _STEP,
        Column("epoch", "int32", "index", "Pass over the training prompts, from 0."),
        Column("examples", "int32", "count", "Prompts with their answers in the minibatch."),
        Column("tokens", "int32", "tokens", "Answer tokens in the minibatch, end tokens included."),
        Column("loss", "float64", "nats", "Cross-entropy before the step, token mean."),
        Column("learning_rate", "float64", "", "Learning rate of the step."),
        Column("grad_norm", "float64", "", "Global gradient norm before clipping."),
        Column("accuracy", "float64", "", "Greedy accuracy on training prompts after the step; null where not measured.", nullable=True),
    ),
    retired=(REDOS,),
)

_PAIRS = Table(
    "pairs",
    "one row per preference pair of the reward model's training",
    ("pair",),
    (
        Column("pair", "int32", "index", "Training pairs first, then held-out ones."),
        Column("held_out", "bool", "", "Not trained on."),
        Column("prompt_key", "string", "", "Stable name of the prompt in its task."),
        Column("chosen", "string", "", "Text of the preferred response."),
        Column("rejected", "string", "", "Text of the other response."),
        Column("prompt_ids", "list<int32>", "token id", "Prompt tokens."),
        Column("chosen_ids", "list<int32>", "token id", "Preferred response, end token included."),
        Column("rejected_ids", "list<int32>", "token id", "The other response."),
        Column("margin_before", "float32", "reward", "Score of the preferred response minus that of the other, before training; null for training pairs.", nullable=True),
        Column("margin_after", "float32", "reward", "The same after training.", nullable=True),
    ),
)

_PAIR_UPDATES = Table(
    "pair_updates",
    "one row per training pair and epoch",
    ("epoch", "minibatch", "pair"),
    (
        _EPOCH,
        _MINIBATCH,
        _PAIR,
        Column("margins", "float32", "reward", "Score of the preferred response minus that of the other, before the step."),
        Column("losses", "float32", "nats", "Bradley-Terry loss before the step."),
    ),
)

_PAIR_STEPS = Table(
    "pair_steps",
    "one row per optimizer step of the reward model",
    ("epoch", "minibatch"),
    (
        _EPOCH,
        _MINIBATCH,
        Column("pairs", "int32", "count", "Pairs in the minibatch."),
        Column("loss", "float64", "nats", "Bradley-Terry loss before the step, mean over pairs."),
        Column("margin", "float64", "reward", "Margin before the step, mean over pairs."),
        Column("accuracy", "float64", "", "Share of pairs with a positive margin; one half for a margin of 0."),
        Column("grad_norm", "float64", "", "Global gradient norm before clipping."),
        Column("reward_digest", "string", "", "Digest of the reward model's weights after the step."),
    ),
    retired=(REDOS,),
)

EVALUATIONS = _from_full_on(_EVALUATIONS)
WARM_START_STEPS = _from_full_on(_WARM_START_STEPS)
PAIRS = _from_full_on(_PAIRS)
PAIR_UPDATES = _from_full_on(_PAIR_UPDATES)
PAIR_STEPS = _from_full_on(_PAIR_STEPS)

# in the order in which the data is computed
PREPARATION = (WARM_START_STEPS, PAIRS, PAIR_UPDATES, PAIR_STEPS)  # once, before the first iteration
BESIDE = (EVALUATIONS,)  # beside the tables of an iteration that has one, and once more after the last iteration
SIDE_TABLES = (*PREPARATION, *BESIDE)
