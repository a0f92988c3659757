"""Stage `ForwardPass`: policy, reference and value model on a whole rollout, before any update."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.buffers import ForwardPass, ReturnStatistics, Rollout
from ppo_repro.config.algorithm import KLInReward
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import MicroBatch, TokenBatch, micro_batches
from ppo_repro.models.networks import hidden_states, seen_states, value_predictions, values_of
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.families import routers, trunk_of
from ppo_repro.numerics.network import forget_packed, logits
from ppo_repro.numerics.rows import Rows
from ppo_repro.numerics.token_statistics import kl_divergence, score, top_logits
from ppo_repro.ranks import Ranks
from ppo_repro.stages.faults import dropped, training_eligible, training_temperature
from ppo_repro.stages.pieces import in_pieces


@torch.no_grad()
def score_rollout(state: TrainState, rollout: Rollout, config: RunConfig, ranks: Ranks) -> ForwardPass:
    """Policy, reference and value model on every response token, `forward_micro_batch` sequences at a time.

    Each rank scores its own sequences and gets all scores. The packed weights of the reference are freed before a value
    model of its own is packed: those of all three together would be the most that a run needs.
    """
    mine = torch.tensor(ranks.mine(len(rollout.lengths)), dtype=torch.int64)
    layout = config.layout
    work = micro_batches(rollout, mine, layout.forward_micro_batch, layout.padding, config.ppo.replay_routes)
    scored = ranks.gather([_score(state, m, rollout, config) for m in work])
    old, ref, ref_kl, entropies, prob_sq_sums, reverse, *top, routes, values = (
        torch.cat(column) for column in zip(*scored, strict=True)
    )
    top_ids, largest, ref_top_ids, ref_largest = top
    forget_packed(state.reference)
    if state.value_optimizer is not None:
        values = torch.cat(ranks.gather([_separate_values(state, m) for m in work]))
    return ForwardPass(
        old_logprobs=old,
        ref_logprobs=ref,
        ref_kl=ref_kl,
        reverse_ref_kl=reverse if _charges_reverse(config) else None,
        entropies=entropies,
        prob_sq_sums=prob_sq_sums,
        top_ids=top_ids,
        top_logits=largest,
        ref_top_ids=ref_top_ids,
        ref_top_logits=ref_largest,
        routes=routes,
        values=None if state.value_model is None else values,
    )


def _charges_reverse(config: RunConfig) -> bool:
    kl = config.kl
    return isinstance(kl, KLInReward) and kl.estimator == "exact" and kl.direction == "reference_policy"


def in_reward_units(predictions: Tensor, returns: ReturnStatistics) -> Tensor:
    """V = mean + scale times the value model's prediction, float32; the prediction itself without statistics."""
    return predictions * returns.scale + returns.mean if returns.count else predictions


def _score(state: TrainState, m: MicroBatch, rollout: Rollout, config: RunConfig) -> tuple[Tensor, ...]:
    """The results of `_distributions`, routes, and the values of a head on the policy's trunk; empty without one."""
    hidden, routes = _seen(state, m.batch, config)
    seen = dropped(config, hidden, m.tokens, ("scoring", state.iteration))
    statistics = _distributions(state, m.batch, seen, rollout.kept_tokens[m.tokens], config)
    if state.value_model is None or state.value_optimizer is not None:
        return *statistics, routes, torch.empty(0)
    values = values_of(state.value_model, hidden, m.batch).cpu()
    return *statistics, routes, in_reward_units(values, state.coefficients.returns)


def _seen(state: TrainState, batch: TokenBatch, config: RunConfig) -> tuple[Tensor, Tensor]:
    """The policy's hidden states [n, H], and at level deep the routes that gave them, [n, M k] int32, else [n, 0]."""
    trunk = trunk_of(state.policy)
    hidden, routes = seen_states(trunk, batch, True, config.records.level == "deep" and bool(routers(trunk)))
    if routes is None:
        return hidden, torch.empty(len(batch.targets), 0, dtype=torch.int32)
    return hidden, torch.from_numpy(routes[batch.predictors])


def _separate_values(state: TrainState, m: MicroBatch) -> Tensor:
    assert state.value_model is not None
    return in_reward_units(value_predictions(state.value_model, m.batch).cpu(), state.coefficients.returns)


def _distributions(
    state: TrainState, batch: TokenBatch, hidden: Tensor, kept_tokens: Tensor, config: RunConfig
) -> tuple[Tensor, ...]:
    """Old log-probs, ref log-probs, KL(policy || ref), entropies, sums of squares, KL(ref || policy), [n] each.

    The last one is empty unless the reward charges it. Then `top_logits` of the policy and of the reference.
    """
    mode, temperature = config.numerics.mode, training_temperature(config)
    policy, reference = state.policy, state.reference
    ref_hidden = hidden_states(trunk_of(reference), batch)

    def of_rows(hidden: Tensor, rows: slice, _: Rows) -> tuple[Tensor, ...]:
        own = logits(policy, hidden).cpu()
        other = logits(reference, ref_hidden[rows]).cpu()
        eligible = training_eligible(config, kept_tokens[rows], own.shape[-1])
        s = score(own, other, batch.targets[rows], temperature, eligible, mode)
        reverse = torch.empty(0)
        if _charges_reverse(config):
            reverse = kl_divergence(other, own, temperature, eligible)
        top = [top_logits(x, temperature, config.records.top_logits) for x in (own, other)]
        return s.logprobs, s.ref_logprobs, s.ref_kl, s.entropies, s.prob_sq_sums, reverse, *top[0], *top[1]

    return in_pieces(of_rows, hidden, batch.rows, policy.config.vocab_size)
