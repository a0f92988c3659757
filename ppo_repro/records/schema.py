"""The tables: their columns, types, units and meaning. Tables are ragged, with one row per real token.

This module imports neither Arrow nor pandas: the writer makes Arrow schemas of it, the reader makes pandas dtypes.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Literal

from ppo_repro.config.layout import RecordLevel

SCHEMA_VERSION = 2

# features of a run that add columns: several turns, a sampler with older weights, responses that were encoded again
Feature = Literal["turns", "lag", "retokenized"]
Stage = Literal["rewards", "advantages", "losses", "coefficients", "summary"]
# The object that has the values of a column in a field: an object of `buffers.py` or `control/buffers.py`, an optimizer
# step, or a preference pair. For `computed` the code that makes the table computes the values.
Source = Literal[
    "prompts", "rollout", "spans", "forward", "rewards", "advantages", "step", "policy", "value", "digests",
    "evaluation", "pair", "computed",
]
LEVELS: tuple[RecordLevel, ...] = ("lean", "full", "deep")  # each level has what the levels before it have


def includes(level: RecordLevel, lowest: RecordLevel) -> bool:
    """Return whether a run at `level` records a table or column whose lowest level is `lowest`."""
    return LEVELS.index(lowest) <= LEVELS.index(level)


@dataclass(frozen=True)
class Column:
    """One column: int32, int64, float32, float64, bool, string or a list<> of int32, float32 or float64.

    The fingerprint covers the results of level `lean`, which every level records, so it is the same at every level.
    `diff` and `rerun` compare all results that both runs have.
    """

    name: str
    kind: str
    unit: str
    source: Source
    _: KW_ONLY
    about: str
    field: str = ""  # of the source; empty: the field with the column's name
    nullable: bool = False
    is_result: bool = True  # False: a time or a place, which may differ between runs of equal results
    level: RecordLevel = "lean"  # the lowest that records it
    only_with: Feature | None = None  # only runs with this feature record the column; None: all runs do
    stage: Stage | None = None  # the stage of `verify` that computes the column again; None: no stage does

    @property
    def in_fingerprint(self) -> bool:
        """Return whether the fingerprint covers this column."""
        return self.is_result and self.level == "lean"

    @property
    def may_be_missing(self) -> bool:
        """Return whether a file may lack this column, whose values are then null."""
        return self.nullable and (self.only_with is not None or not self.in_fingerprint)


# columns that `full` and `deep` record, and columns that only `deep` records
full = partial(Column, nullable=True, level="full")
deep = partial(Column, nullable=True, level="deep")


@dataclass(frozen=True)
class Table:
    """A table. `key` names the columns that identify a row."""

    name: str
    grain: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    level: RecordLevel = "lean"  # the lowest that records it

    def named(self, *names: str, source: Source | None = None) -> tuple[Column, ...]:
        """Return the columns with these names, in the order of this table, for use in another table.

        `source`: where the other table has them from, in fields of their names; None: from where this table has them.
        """
        found = tuple(column for column in self.columns if column.name in names)
        return found if source is None else tuple(replace(column, source=source, field="") for column in found)

    def always(self, *names: str, source: Source | None = None) -> tuple[Column, ...]:
        """Return the columns of `named` as columns that are never null."""
        return tuple(replace(column, nullable=False) for column in self.named(*names, source=source))


ITERATION = Column("iteration", "int32", "count", "computed", about="Rollout-update cycle, from 0.")
_SEQUENCE = Column("sequence", "int32", "index", "computed", about="Response within the iteration, from 0.")
_POSITION = Column("position", "int32", "index", "computed", about="Token within the response, from 0.")
EPOCH = Column("epoch", "int32", "index", "step", about="Pass over the rollout, from 0.")
MINIBATCH = Column("minibatch", "int32", "index", "step", about="Minibatch within the epoch, from 0.")
_SCHEDULED = tuple(replace(column, stage="losses") for column in (EPOCH, MINIBATCH, _SEQUENCE, _POSITION))

# A row has name, type, unit and source of a column, its differences from a usual column, and its meaning.
SEQUENCES = Table("sequences", "one row per response", ("iteration", "sequence"), (
    ITERATION, _SEQUENCE,
    Column("prompt_key", "string", "", "prompts", about="Stable name of the prompt in its task."),
    Column("sample_index", "int32", "index", "prompts", about="Which sample of that prompt."),
    Column("seed", "int64", "", "prompts", about="Sampler seed of this response."),
    Column("prompt", "string", "", "prompts", about="Prompt text."),
    Column("response", "string", "", "rollout", about="Response text without special tokens."),
    Column("answer", "string", "", "prompts", about="What the verifier expects."),
    Column("prompt_ids", "list<int32>", "token id", "prompts", about="Prompt tokens."),
    Column("response_ids", "list<int32>", "token id", "computed", about="Response tokens, end token included."),
    Column("prompt_length", "int32", "tokens", "computed", about="Length of prompt_ids."),
    Column("response_length", "int32", "tokens", "computed", about="Length of response_ids."),
    Column("finish_reason", "string", "", "rollout", about="`stop` after an end token, `length` at the limit."),
    Column("scores", "float64", "", "rewards", stage="rewards",
        about="Weighted sum of the reward terms, after the rule for a missing end token."),
    Column("score_parts", "list<float64>", "", "rewards",
        about="Unweighted value of each reward term, in the order of the configuration."),
    Column("is_correct", "bool", "", "rewards",
        about="Right by the verifier, or equal to the answer; and ended by itself."),
    Column("kl_penalty_sum", "float64", "reward", "computed", stage="rewards",
        about="Sum of kl_penalties over the response."),
    Column("reward_sum", "float64", "", "computed", stage="rewards", about="Sum of rewards over the response."),
    Column("episode_ids", "list<int32>", "token id", "computed", nullable=True, only_with="turns",
        about="All tokens after the prompt, those that the environment put in included; only where task.max_turns is "
              "greater than 1."),
    Column("is_forced", "list<int32>", "", "computed", nullable=True, only_with="turns",
        about="For each of episode_ids 1 where the environment put it in, 0 where it was sampled; only where "
              "task.max_turns is greater than 1."),
    Column("rollout_policy_versions", "list<int32>", "iterations", "rollout", nullable=True, only_with="lag",
        about="Version of the policy that sampled each token: how many iterations it was trained for; only with "
              "mismatch.sampler.lag."),
    Column("sampled_ids", "list<int32>", "token id", "rollout", nullable=True, only_with="retokenized",
        about="The tokens as they were sampled, of which response_ids were encoded again; only with "
              "mismatch.trainer.retokenize."),
    Column("is_as_sampled", "list<int32>", "", "computed", nullable=True, only_with="retokenized",
        about="For each of response_ids 1 where the token was sampled as it is, with the same text; only with "
              "mismatch.trainer.retokenize."),
    Column("server", "string", "", "rollout", nullable=True, is_result=False, level="full",
        about="SGLang server that sampled the response; null for the built-in engine."),
    Column("latency", "float64", "s", "rollout", nullable=True, is_result=False, level="full",
        about="From the server's receipt of the request to its last token; null for the built-in engine."),
))

TOKENS = Table("tokens", "one row per response token", ("iteration", "sequence", "position"), (
    ITERATION, _SEQUENCE, _POSITION,
    Column("token_id", "int32", "token id", "computed", about="The sampled token."),
    Column("char_start", "int32", "characters", "spans", about="Where the token's text starts in the response."),
    Column("char_end", "int32", "characters", "spans", about="Where it ends; equal to the start for a special token."),
    Column("byte_start", "int32", "bytes", "spans", about="Start in the UTF-8 encoded response."),
    Column("byte_end", "int32", "bytes", "spans", about="End in the UTF-8 encoded response."),
    Column("word_id", "int32", "index", "spans",
        about="Whitespace-separated word the token belongs to; a special token is a word of its own."),
    Column("sub_idx", "int32", "index", "spans", about="Token within its word, from 0."),
    Column("rollout_logprobs", "float32", "nats", "rollout", about="Log-prob under the sampler, while sampling."),
    Column("old_logprobs", "float32", "nats", "forward", about="Log-prob in the training forward before any update."),
    Column("ref_logprobs", "float32", "nats", "forward", about="Log-prob under the frozen reference."),
    Column("log_kept_mass", "float32", "nats", "rollout", about="Log of the mass kept by top-k/top-p."),
    Column("entropies", "float32", "nats", "forward", about="Entropy of the policy at this position."),
    Column("prob_sq_sums", "float32", "", "forward", about="Sum of squared probabilities of the policy."),
    Column("ref_kl", "float32", "nats", "forward", about="KL(policy || reference) over the whole distribution."),
    Column("values", "float32", "reward", "forward", nullable=True,
        about="Value model before the token; null without one."),
    Column("kl_penalties", "float32", "reward", "rewards", stage="rewards",
        about="kl_coef times the KL estimate; 0 where no reward charges it."),
    Column("rewards", "float32", "reward", "rewards", stage="rewards",
        about="placed_scores minus kl_penalties, whitened if configured; the input of GAE."),
    Column("raw_advantages", "float32", "reward", "advantages", stage="advantages",
        about="Generalized advantage estimate, or the group-relative score."),
    Column("advantages", "float32", "", "advantages", stage="advantages", about="Advantage used in the loss."),
    Column("returns", "float32", "reward", "advantages", nullable=True, stage="advantages",
        about="Value target, raw_advantages + values; null without a value model."),
    full("kept_tokens", "list<int32>", "token id", "computed",
        about="Tokens that top-k/top-p keep, by id, over which every log-prob of this token is normalised; null "
              "without them."),
    full("cumulative_probs", "float32", "", "forward",
        about="Probability under the policy of this token and of all that are more likely; of equally likely tokens "
              "the lower ids count as more likely."),
    full("reverse_ref_kl", "float32", "nats", "forward",
        about="KL(reference || policy) over the whole distribution; null unless the reward charges it."),
    full("placed_scores", "float64", "reward", "rewards", stage="rewards",
        about="The score where its placement puts it."),
    full("raw_rewards", "float32", "reward", "rewards", stage="rewards",
        about="placed_scores minus kl_penalties, before whitening."),
    deep("rollout_routes", "list<int32>", "index", "computed",
        about="Experts that computed the token's distribution in the sampler: for each layer with experts, in order, "
              "the chosen ones by rising index; null for dense models, your own sampler, and tokens encoded again."),
    deep("policy_routes", "list<int32>", "index", "computed",
        about="Experts that computed the token's distribution in the training forward before any update, as in "
              "rollout_routes; null for dense models."),
))

_UPDATE = ("iteration", "epoch", "minibatch", "sequence", "position")

UPDATES = Table("updates", "one row per token, epoch and minibatch", _UPDATE, (
    ITERATION, *_SCHEDULED,
    Column("new_logprobs", "float32", "nats", "policy", nullable=True,
        about="Log-prob under the policy before this step; null where it takes none."),
    Column("ratios", "float32", "", "policy", nullable=True, stage="losses",
        about="exp(new_logprobs - anchor); ppo.ratio_anchor names the anchor. With sequence_clip exp of the mean "
              "difference of the response. Null where the policy takes no step."),
    Column("clip_flag", "string", "", "policy", field="clip_flags", nullable=True, stage="losses",
        about="none; clip_high, clip_low, clip_dual (gradient zero); wrong_high, wrong_low (outside the band, gradient "
              "kept); bound_high, bound_low (CISPO's weight is its bound, gradient kept); unknown (your objective does "
              "not say); null where the policy takes no step."),
    Column("new_values", "float32", "reward", "value", nullable=True,
        about="Value model before this step; null where it takes none."),
    Column("value_clipped", "bool", "", "computed", stage="losses", about="The clipped branch decided the value loss."),
    Column("new_entropies", "float32", "nats", "policy", nullable=True,
        about="Entropy of the policy before this step; null where it takes none."),
    full("loss_weights", "float32", "", "step", stage="losses",
        about="Weight of the token in the losses of the step, from ppo.aggregation; 0 for tokens that rejected_tokens "
              "= left_out leaves out."),
    full("importance_weights", "float32", "", "policy", stage="losses",
        about="Factor on surrogates and penalty_terms, from old_logprobs - rollout_logprobs, 0 for rejected tokens; "
              "null unless configured."),
    full("correction", "string", "", "policy", field="corrections", stage="losses",
        about="What importance weights and rejection did to the token: none; truncated_high, truncated_low (the weight "
              "is a bound); masked_high, masked_low, rejected (the weight is 0); null unless configured."),
    full("policy_losses", "float32", "", "policy", field="losses", stage="losses",
        about="Policy loss of the token, all terms: surrogates plus penalty_terms, times importance_weights, minus "
              "entropy_coef times new_entropies, plus kl_terms; null where the policy takes no step."),
    full("surrogates", "float32", "", "policy", stage="losses",
        about="The objective's term in ratio and advantage; null where the policy takes no step."),
    full("penalty_terms", "float32", "", "policy", stage="losses",
        about="penalty_coef times KL(anchor || new), k3; null for other objectives."),
    full("kl_terms", "float32", "", "policy", stage="losses",
        about="kl_coef times the KL estimate to the reference; null unless the loss has it."),
    full("value_losses", "float32", "", "value", field="losses", stage="losses",
        about="Value loss of the token, before value_coef; null where the value model takes no step."),
))

STEPS = Table("steps", "one row per optimizer step", ("iteration", "epoch", "minibatch"), (
    ITERATION, EPOCH, MINIBATCH,
    Column("tokens", "int32", "tokens", "computed", stage="losses", about="Response tokens in the minibatch."),
    Column("policy_loss", "float64", "", "policy", field="loss", nullable=True, stage="losses",
        about="All terms of the policy's loss, aggregated as configured; null where the policy takes no step."),
    Column("value_loss", "float64", "", "value", field="loss", nullable=True, stage="losses",
        about="Half the squared error, clipped if configured, aggregated as configured; null where the value model "
              "takes no step."),
    Column("entropy", "float64", "nats", "policy", nullable=True, stage="losses",
        about="Entropy before the step, token mean; null without a step."),
    Column("approx_kl", "float64", "nats", "policy", nullable=True, stage="losses",
        about="KL(anchor || new) by k3, token mean; null without a step."),
    Column("clip_fraction", "float64", "", "policy", nullable=True, stage="losses",
        about="Share of tokens whose policy gradient the clip removed; null without a step, and where that is "
              "unknown."),
    Column("value_clip_fraction", "float64", "", "value", field="clip_fraction", nullable=True, stage="losses",
        about="Share of tokens whose value loss the clip decided; null without a step."),
    Column("grad_norm", "float64", "", "policy", nullable=True,
        about="Global gradient norm of the policy (and of a value head on its trunk) before clipping; null without a "
              "step."),
    Column("value_grad_norm", "float64", "", "value", field="grad_norm", nullable=True,
        about="Global gradient norm of a separate value model before clipping; null without a step."),
    Column("learning_rate", "float64", "", "computed", stage="coefficients",
        about="Policy learning rate of this iteration."),
    Column("value_learning_rate", "float64", "", "computed", nullable=True, stage="coefficients",
        about="Value learning rate of this iteration; null without a separate value model."),
    Column("policy_digest", "string", "", "digests", about="Digest of the policy weights after the step."),
    Column("value_digest", "string", "", "digests", nullable=True,
        about="Digest of the weights of value model or value head after the step; null without a value model."),
    full("surrogate_loss", "float64", "", "policy", stage="losses",
        about="Sum of surrogates times importance_weights times loss_weights; null without a step."),
    full("penalty_loss", "float64", "", "policy", stage="losses",
        about="Sum of penalty_terms times importance_weights times loss_weights; null for other objectives than "
              "PPO-Penalty."),
    full("entropy_loss", "float64", "", "policy", stage="losses",
        about="Minus entropy_coef times new_entropies, aggregated as configured; null without a step."),
    full("kl_loss", "float64", "", "policy", stage="losses",
        about="kl_terms, aggregated as configured; null unless the loss has them."),
))

ITERATIONS = Table("iterations", "one row per iteration", ("iteration",), (
    ITERATION,
    Column("sequences", "int32", "count", "computed", stage="summary", about="Responses sampled."),
    Column("tokens", "int32", "tokens", "computed", stage="summary", about="Response tokens sampled."),
    Column("score_mean", "float64", "", "computed", stage="summary", about="Mean score."),
    Column("accuracy", "float64", "", "computed", stage="summary", about="Share of correct responses, sampled."),
    Column("reward_mean", "float64", "reward", "computed", stage="summary",
        about="Mean over responses of the summed rewards."),
    Column("response_length_mean", "float64", "tokens", "computed", stage="summary", about="Mean response length."),
    Column("truncated_fraction", "float64", "", "computed", stage="summary",
        about="Share of responses cut at the length limit."),
    Column("entropy", "float64", "nats", "computed", stage="summary", about="Entropy before the update, token mean."),
    Column("kl_coef", "float64", "", "computed", stage="coefficients",
        about="Weight of the KL penalty or term; 0 without one."),
    Column("clip_range", "float64", "", "computed", nullable=True, stage="coefficients",
        about="Adaptive clip range in force; null where it is fixed or there is none."),
    Column("penalty_coef", "float64", "", "computed", nullable=True, stage="coefficients",
        about="Weight of KL(anchor || new) in PPO-Penalty; null for other objectives."),
    Column("return_mean", "float64", "reward", "computed", nullable=True, stage="coefficients",
        about="Number added to predicted values; null unless returns are normalised."),
    Column("return_scale", "float64", "reward", "computed", nullable=True, stage="coefficients",
        about="Factor of predicted values; null unless returns are normalised."),
    Column("policy_steps", "int32", "count", "computed", stage="coefficients",
        about="Optimizer steps the policy took; fewer than planned after an early stop."),
    Column("ref_kl_per_token", "float64", "nats", "computed", stage="summary",
        about="KL(policy || reference), exact, token mean."),
    Column("ref_kl_per_sequence", "float64", "nats", "computed", stage="summary",
        about="KL(policy || reference), exact, summed over each response, mean over responses."),
    Column("explained_variance", "float64", "", "computed", nullable=True, stage="summary",
        about="1 - Var(returns - values) / Var(returns); null where the returns do not vary."),
    Column("unequal_old_rollout_logprobs", "int64", "tokens", "computed", stage="summary",
        about="Tokens whose old and rollout log-prob differ in any bit."),
    Column("max_abs_old_rollout", "float64", "nats", "computed", stage="summary",
        about="Largest |old - rollout| log-prob difference."),
    Column("first_minibatch_tokens", "int64", "tokens", "computed", stage="summary",
        about="Tokens of the first minibatch of the update."),
    Column("unequal_first_ratios", "int64", "tokens", "computed", stage="summary",
        about="Tokens of the first minibatch whose ratio is not exactly 1."),
    Column("unequal_values", "int64", "tokens", "computed", stage="summary",
        about="Tokens of the first minibatch whose recomputed value differs in any bit; 0 without a value model."),
    Column("eval_accuracy", "float64", "", "computed", nullable=True, stage="summary",
        about="Greedy accuracy on held-out prompts before this update; null where not evaluated."),
    Column("eval_score", "float64", "", "computed", nullable=True, stage="summary",
        about="Mean score of the greedy responses to held-out prompts; null where not evaluated."),
    Column("seconds_rollout", "float64", "s", "computed", is_result=False, about="Wall time of sampling."),
    Column("seconds_forward", "float64", "s", "computed", is_result=False,
        about="Wall time of the scoring forwards."),
    Column("seconds_update", "float64", "s", "computed", is_result=False,
        about="Wall time of the optimizer steps."),
    Column("seconds_evaluation", "float64", "s", "computed", is_result=False,
        about="Wall time of the evaluation."),
    Column("seconds_digests", "float64", "s", "computed", nullable=True, is_result=False,
        about="Wall time of the digests of weights after the steps."),
    Column("seconds_other", "float64", "s", "computed", nullable=True, is_result=False,
        about="The rest of the iteration's wall time, so that the seconds add up to it."),
    Column("ended_at", "float64", "s", "computed", nullable=True, is_result=False,
        about="When the iteration ended, in seconds since 1970, UTC."),
))

# in the order of computation, which is also the order in which differences are reported
TABLES = (SEQUENCES, TOKENS, UPDATES, STEPS, ITERATIONS)

# Side tables record what happens outside the iterations. Their digests are recorded, but are not in the fingerprint.
_STEP = Column("step", "int32", "index", "computed", about="Optimizer step, from 0.")
_PAIR_EPOCH = Column("epoch", "int32", "index", "step", about="Pass over the pairs, from 0.")
_PAIR = Column("pair", "int32", "index", "computed", about="Row of the table `pairs`.")

EVALUATIONS = Table("evaluations", "one row per held-out prompt and evaluation", ("iteration", "sequence"), (
    Column("iteration", "int32", "count", "computed",
        about="Iterations before the evaluation; the last evaluation has the number of all iterations."),
    Column("sequence", "int32", "index", "computed", about="Held-out prompt, from 0, in the order of the task."),
    *SEQUENCES.named("prompt_key", "prompt", "response", "answer", "prompt_ids", "response_ids", source="evaluation"),
    *SEQUENCES.named("response_length"),
    *SEQUENCES.named("finish_reason", "scores", "score_parts", "is_correct", source="evaluation"),
    *SEQUENCES.named("episode_ids", "is_forced"),
), level="full")

WARM_START_STEPS = Table("warm_start_steps", "one row per supervised step before PPO", ("step",), (
    _STEP,
    Column("epoch", "int32", "index", "step", about="Pass over the training prompts, from 0."),
    Column("examples", "int32", "count", "step", about="Prompts with their answers in the minibatch."),
    Column("tokens", "int32", "tokens", "step", about="Answer tokens in the minibatch, end tokens included."),
    Column("loss", "float64", "nats", "step", about="Cross-entropy before the step, token mean."),
    Column("learning_rate", "float64", "", "step", about="Learning rate of the step."),
    Column("grad_norm", "float64", "", "step", about="Global gradient norm before clipping."),
    Column("accuracy", "float64", "", "step", nullable=True,
        about="Greedy accuracy on training prompts after the step; null where not measured."),
), level="full")

PAIRS = Table("pairs", "one row per preference pair of the reward model's training", ("pair",), (
    Column("pair", "int32", "index", "computed", about="Training pairs first, then held-out ones."),
    Column("held_out", "bool", "", "computed", about="Not trained on."),
    Column("prompt_key", "string", "", "pair", about="Stable name of the prompt in its task."),
    Column("chosen", "string", "", "computed", about="Text of the preferred response."),
    Column("rejected", "string", "", "computed", about="Text of the other response."),
    Column("prompt_ids", "list<int32>", "token id", "pair", about="Prompt tokens."),
    Column("chosen_ids", "list<int32>", "token id", "pair", about="Preferred response, end token included."),
    Column("rejected_ids", "list<int32>", "token id", "pair", about="The other response."),
    Column("margin_before", "float32", "reward", "computed", nullable=True,
        about="Score of the preferred response minus that of the other, before training; null for training pairs."),
    Column("margin_after", "float32", "reward", "computed", nullable=True,
        about="Score of the preferred response minus that of the other, after training; null for training pairs."),
), level="full")

PAIR_UPDATES = Table("pair_updates", "one row per training pair and epoch", ("epoch", "minibatch", "pair"), (
    _PAIR_EPOCH, MINIBATCH, _PAIR,
    Column("margins", "float32", "reward", "computed",
        about="Score of the preferred response minus that of the other, before the step."),
    Column("losses", "float32", "nats", "computed", about="Bradley-Terry loss before the step."),
), level="full")

PAIR_STEPS = Table("pair_steps", "one row per optimizer step of the reward model", ("epoch", "minibatch"), (
    _PAIR_EPOCH, MINIBATCH,
    Column("pairs", "int32", "count", "step", about="Pairs in the minibatch."),
    Column("loss", "float64", "nats", "step", about="Loss before the step, Bradley-Terry or DPO, mean over pairs."),
    Column("margin", "float64", "reward", "step",
        about="Score or implicit reward of the preferred response minus that of the other, before the step, mean over "
              "pairs."),
    Column("accuracy", "float64", "", "step",
        about="Share of pairs with a positive margin; one half for a margin of 0."),
    Column("grad_norm", "float64", "", "step", about="Global gradient norm before clipping."),
    Column("reward_digest", "string", "", "step", field="digest",
        about="Digest of the reward model's weights after the step."),
), level="full")

# in the order of computation: PREPARATION once before the first iteration, then EVALUATIONS at every evaluation
PREPARATION = (WARM_START_STEPS, PAIRS, PAIR_UPDATES, PAIR_STEPS)
SIDE_TABLES = (*PREPARATION, EVALUATIONS)

# In a control run a sequence is a fragment, the part of one episode in one iteration. A token is a step of the
# environment. Columns with names of a language run mean the same. The anchor is the rollout. No step is missing.
_FRAGMENT = Column("sequence", "int32", "index", "computed",
    about="Fragment within the iteration, from 0, by environment and time.")
_STEP_OF_FRAGMENT = Column("position", "int32", "index", "computed", about="Step within the fragment, from 0.")

CONTROL_SEQUENCES = replace(SEQUENCES, grain="one row per fragment of an episode", columns=(
    ITERATION, _FRAGMENT,
    Column("environment", "int32", "index", "rollout", about="Copy of the environment, from 0."),
    Column("episode", "int32", "index", "rollout", about="Episode of the copy, from 0."),
    Column("seed", "int64", "", "rollout", about="Seed with which the episode was reset."),
    Column("first_step", "int32", "steps", "rollout", about="Step of the episode at which the fragment begins."),
    Column("last_step", "int32", "steps", "rollout", about="Step of the iteration with which it ends."),
    Column("fragment_length", "int32", "steps", "computed", about="Steps of the fragment."),
    Column("end_reason", "string", "", "rollout",
        about="`terminated` by the environment, `truncated` by its time limit, `cut` by the end of the iteration."),
    Column("final_observations", "list<float32>", "", "rollout", about="Observation after the last action."),
    Column("final_values", "float32", "reward", "forward",
        about="Value with which the return goes on after the fragment; 0 where nothing follows."),
    Column("reward_sum", "float64", "reward", "computed", about="Sum of rewards over the fragment."),
    Column("episode_return", "float64", "reward", "computed", nullable=True,
        about="Sum of rewards over the episode; null where it has not ended."),
))

CONTROL_TOKENS = replace(TOKENS, grain="one row per environment step", columns=(
    ITERATION, _FRAGMENT, _STEP_OF_FRAGMENT,
    Column("observations", "list<float32>", "", "rollout", about="Observation that the policy saw."),
    Column("actions", "list<float32>", "", "rollout",
        about="Action that the policy drew: the index of a discrete action, or a real action before it is clipped to "
              "its space."),
    *TOKENS.named("rollout_logprobs", "old_logprobs", "entropies"),
    *TOKENS.always("values"),
    Column("rewards", "float32", "reward", "rollout", about="Reward that the environment returned."),
    *TOKENS.named("raw_advantages"),
    *TOKENS.always("returns"),
))

CONTROL_UPDATES = replace(UPDATES, grain="one row per step, epoch and minibatch", columns=(
    ITERATION, EPOCH, MINIBATCH, _FRAGMENT, _STEP_OF_FRAGMENT,
    Column("advantages", "float32", "", "step",
        about="Advantage used in the loss; whitening by minibatch gives each epoch its own."),
    *UPDATES.always("new_logprobs", "ratios", source="step"),
    *UPDATES.always("clip_flag", source="computed"),
    *UPDATES.always("new_values", "value_clipped", "new_entropies", source="step"),
    *UPDATES.named("policy_losses", "surrogates", "value_losses", source="step"),
))

CONTROL_STEPS = replace(STEPS, columns=(
    *STEPS.named("iteration", "epoch", "minibatch", "tokens"),
    *STEPS.always("policy_loss", "value_loss", source="step"),
    *STEPS.always("entropy", source="computed"),
    *STEPS.always("approx_kl", source="step"),
    *STEPS.always("clip_fraction", "value_clip_fraction", source="computed"),
    Column("joint_grad_norm", "float64", "", "step",
        about="Gradient norm over policy and critic together before clipping."),
    *STEPS.named("learning_rate", source="step"),
    Column("clip_range", "float64", "", "step", about="Clip range of the ratio in this step."),
    *STEPS.always("policy_digest", "value_digest", source="step"),
    *STEPS.named("surrogate_loss", "entropy_loss", source="step"),
))

CONTROL_ITERATIONS = replace(ITERATIONS, columns=(
    *ITERATIONS.named("iteration", "sequences", "tokens"),
    Column("episodes", "int32", "count", "computed", about="Episodes that ended."),
    Column("episode_return_mean", "float64", "reward", "computed", nullable=True,
        about="Mean return of these episodes; null where none ended."),
    *ITERATIONS.named("entropy", "explained_variance", "unequal_old_rollout_logprobs", "max_abs_old_rollout"),
    *ITERATIONS.named("first_minibatch_tokens", "unequal_first_ratios", "unequal_values"),
    Column("eval_return", "float64", "reward", "computed", nullable=True,
        about="Mean return of whole episodes with the likeliest action before this update; null where not evaluated."),
    *ITERATIONS.named("seconds_rollout", "seconds_forward", "seconds_update", "seconds_evaluation"),
    *ITERATIONS.named("seconds_other", "ended_at"),
))

CONTROL_TABLES = (CONTROL_SEQUENCES, CONTROL_TOKENS, CONTROL_UPDATES, CONTROL_STEPS, CONTROL_ITERATIONS)

# in a DPO run an iteration is an epoch over the training pairs
DPO_PAIRS = Table("pairs", "one row per preference pair", ("pair",), (
    *PAIRS.named("pair", "held_out", "prompt_key", "chosen", "rejected", "prompt_ids", "chosen_ids", "rejected_ids"),
    Column("ref_chosen_logprobs", "float64", "nats", "computed",
        about="Log-prob of the preferred response under the reference."),
    Column("ref_rejected_logprobs", "float64", "nats", "computed",
        about="Log-prob of the other response under the reference."),
))

DPO_MARGINS = Table("margins", "one row per pair and epoch", ("iteration", "pair"), (
    ITERATION,
    *PAIRS.named("pair", "held_out"),
    Column("chosen_logprobs", "float64", "nats", "computed",
        about="Log-prob of the preferred response after the epoch."),
    Column("rejected_logprobs", "float64", "nats", "computed", about="Log-prob of the other response after the epoch."),
    Column("margins", "float64", "reward", "computed",
        about="Implicit reward of the preferred response minus that of the other, after the epoch."),
))

DPO_STEPS = Table("steps", "one row per optimizer step", ("iteration", "minibatch"), (
    ITERATION, MINIBATCH,
    *PAIR_STEPS.named("pairs", "loss", "margin", "accuracy", "grad_norm"),
    replace(*STEPS.named("policy_digest"), source="step", field="digest"),
))

DPO_ITERATIONS = Table("iterations", "one row per epoch", ("iteration",), (
    ITERATION,
    Column("pairs", "int32", "count", "computed", about="Training pairs."),
    Column("loss", "float64", "nats", "computed", about="DPO loss of the epoch's steps, mean over pairs."),
    Column("margin", "float64", "reward", "computed", about="Margin of the training pairs after the epoch, mean."),
    Column("eval_margin", "float64", "reward", "computed", about="Margin of the held-out pairs after the epoch, mean."),
    Column("eval_pair_accuracy", "float64", "", "computed",
        about="Share of held-out pairs in the right order after the epoch."),
    Column("eval_accuracy", "float64", "", "computed", nullable=True,
        about="Greedy accuracy on held-out prompts before the epoch; null where not evaluated."),
    *ITERATIONS.named("seconds_evaluation", "seconds_forward", "seconds_update", "ended_at"),
))

DPO_TABLES = (DPO_MARGINS, DPO_STEPS, DPO_ITERATIONS)
DPO_SIDE_TABLES = (DPO_PAIRS,)
