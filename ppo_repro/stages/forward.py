"""Stage `ForwardPass`: policy, reference and value model on a whole rollout, before any update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ppo_repro.buffers import ForwardPass, ReturnStatistics, Rollout
from ppo_repro.config.algorithm import GaeAdvantages, KLInReward
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import MicroBatch, TokenBatch, lay_out, micro_batches
from ppo_repro.models.networks import ValueModel, hidden_states
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.layers.families import head_of, trunk_of
from ppo_repro.numerics.layers.routes import routers, seen_routes
from ppo_repro.numerics.logprobs import kl_divergence, score, top_logits
from ppo_repro.ranks import Ranks
from ppo_repro.stages.faults import dropped, training_eligible, training_temperature

LOGITS_AT_ONCE = 1 << 24  # elements of the logits that are in memory at once


@torch.no_grad()
def score_rollout(state: TrainState, rollout: Rollout, config: RunConfig, ranks: Ranks) -> ForwardPass:
    """Policy, reference and value model on every response token, `forward_micro_batch` sequences at a time.

    Each rank scores its own sequences and gets all scores. A value model of its own comes after the reference, and
    operands are freed in between and at the end: those of all three together would be the most that a run needs.
    """
    mine = torch.tensor(ranks.mine(len(rollout.lengths)), dtype=torch.int64)
    layout = config.layout
    work = micro_batches(rollout, mine, layout.forward_micro_batch, layout.padding, config.ppo.replay_routes)
    scored = ranks.gather([_score(state, m, rollout, config) for m in work])
    old, ref, ref_kl, entropies, prob_sq_sums, reverse, *top, routes, values = (
        torch.cat(column) for column in zip(*scored, strict=True)
    )
    top_ids, largest, ref_top_ids, ref_largest = top
    state.forget(state.reference)
    if state.value_optimizer is not None:
        values = torch.cat(ranks.gather([_separate_values(state, m) for m in work]))
    final_values = _final_values(state, rollout, mine, config, ranks)
    if state.value_optimizer is not None:
        state.forget(state.value_model)
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
        final_values=final_values,
    )


def _charges_reverse(config: RunConfig) -> bool:
    kl = config.kl
    return isinstance(kl, KLInReward) and kl.estimator == "exact" and kl.direction == "reference_policy"


def in_reward_units(predictions: Tensor, returns: ReturnStatistics) -> Tensor:
    """V = mean + scale times the value model's prediction, float32; the prediction itself without statistics."""
    return predictions * returns.scale + returns.mean if returns.count else predictions


def _values(value_model: ValueModel, hidden: Tensor, state: TrainState) -> Tensor:
    return in_reward_units(value_model.head(hidden)[:, 0].cpu(), state.coefficients.returns)


def _score(state: TrainState, m: MicroBatch, rollout: Rollout, config: RunConfig) -> tuple[Tensor, ...]:
    """The results of `_distributions`, routes, and the values of a head on the policy's trunk; empty without one."""
    hidden, routes = _seen(state, m.batch, config)
    seen = dropped(config, hidden, m.tokens, ("scoring", state.iteration))
    statistics = _distributions(state, m.batch, seen, rollout.kept_tokens[m.tokens], config)
    if state.value_model is None or state.value_optimizer is not None:
        return *statistics, routes, torch.empty(0)
    return *statistics, routes, _values(state.value_model, hidden, state)


def _seen(state: TrainState, batch: TokenBatch, config: RunConfig) -> tuple[Tensor, Tensor]:
    """The policy's hidden states [n, H], and at level deep the routes that gave them, [n, M k] int32, else [n, 0]."""
    trunk = trunk_of(state.policy)
    if config.records.level != "deep" or not routers(trunk):
        return hidden_states(trunk, batch, replay=True), torch.empty(len(batch.targets), 0, dtype=torch.int32)
    with seen_routes(trunk) as seen:
        hidden = hidden_states(trunk, batch, replay=True)
    return hidden, seen.take()[batch.predictors]


def _separate_values(state: TrainState, m: MicroBatch) -> Tensor:
    assert state.value_model is not None
    return _values(state.value_model, hidden_states(state.value_model.trunk, m.batch), state)


def _final_values(state: TrainState, rollout: Rollout, mine: Tensor, config: RunConfig, ranks: Ranks) -> Tensor:
    """[B] float32: V after the last token of responses cut at the length limit, if they are bootstrapped; else 0."""
    final_values = torch.zeros(len(rollout.lengths))
    advantages = config.advantages
    if state.value_model is None or not isinstance(advantages, GaeAdvantages) or advantages.truncation == "terminal":
        return final_values
    cut = [i for i in mine.tolist() if rollout.finish_reasons[i] == "length"]
    values: list[float] = []
    size = config.layout.forward_micro_batch or max(1, len(cut))
    for start in range(0, len(cut), size):
        chunk = cut[start : start + size]
        sequences = [(*rollout.prompts.prompt_ids[i], *rollout.whole(i)) for i in chunk]
        # an additional token after each sequence: it is not an input, and its predictor is the last real token
        batch = lay_out(sequences, [(0,)] * len(sequences), config.layout.padding)
        values += _values(state.value_model, hidden_states(state.value_model.trunk, batch), state).tolist()
    for index, value in ranks.gather(list(zip(cut, values, strict=True))):
        final_values[index] = value
    return final_values


def in_pieces(compute: Callable[[slice], tuple[Tensor, ...]], rows: int, vocab_size: int) -> tuple[Tensor, ...]:
    """`compute` of rows that have logits, LOGITS_AT_ONCE elements at a time, its tensors joined.

    Of several pieces a backward pass computes each again, so that the logits of one are there at a time.
    """
    at_once = max(1, LOGITS_AT_ONCE // vocab_size)
    if rows <= at_once:
        return compute(slice(0, rows))
    # no random number is drawn, so there is no generator state to restore
    again = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    pieces = [again(slice(start, start + at_once)) for start in range(0, rows, at_once)]
    return tuple(torch.cat(column) for column in zip(*pieces, strict=True))


def _distributions(
    state: TrainState, batch: TokenBatch, hidden: Tensor, kept_tokens: Tensor, config: RunConfig
) -> tuple[Tensor, ...]:
    """Old log-probs, ref log-probs, KL(policy || ref), entropies, sums of squares, KL(ref || policy), [n] each.

    The last one is empty unless the reward charges it. Then `top_logits` of the policy and of the reference. Logits
    are computed for LOGITS_AT_ONCE elements at a time, on the device of the models; the results are on the CPU.
    """
    mode, temperature = config.numerics.mode, training_temperature(config)
    policy, reference = state.policy, state.reference
    ref_hidden = hidden_states(trunk_of(reference), batch)
    head, ref_head = head_of(policy), head_of(reference)

    def of_rows(rows: slice) -> tuple[Tensor, ...]:
        logits = head(hidden[rows])
        ref_logits = ref_head(ref_hidden[rows])
        targets = batch.targets[rows]
        eligible = training_eligible(config, kept_tokens[rows], logits.shape[-1], logits.device)
        s = score(logits, ref_logits, targets, temperature, eligible, mode)
        reverse = torch.empty(0)
        if _charges_reverse(config):
            reverse = kl_divergence(ref_logits, logits, temperature, eligible)
        top = [top_logits(x, temperature, config.records.logits_per_token) for x in (logits, ref_logits)]
        found = s.logprobs, s.ref_logprobs, s.ref_kl, s.entropies, s.prob_sq_sums, reverse, *top[0], *top[1]
        return tuple(x.cpu() for x in found)

    return in_pieces(of_rows, len(hidden), policy.config.vocab_size)
