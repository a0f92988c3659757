"""Stage `ForwardPass`: policy, reference and value model on a whole rollout, before any update.

`policy_pass` is the policy's pass in an update. Logits are computed chunk by chunk, so that the logits of a large
vocabulary are never completely in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ppo_repro.base.mode import Mode
from ppo_repro.base.ranks import Ranks
from ppo_repro.buffers import ForwardPass, ReturnStatistics, Rollout
from ppo_repro.config.algorithm import KLConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import MicroBatch, micro_batches
from ppo_repro.models.networks import ValueModel, hidden_states, seen_states, values_of
from ppo_repro.models.state import Stream, TrainState
from ppo_repro.numerics.divergence import kl_divergence
from ppo_repro.numerics.families import routers, trunk_of
from ppo_repro.numerics.network import forget_packed, logits
from ppo_repro.numerics.sequences import Rows
from ppo_repro.numerics.token_sampling import expand_kept
from ppo_repro.numerics.token_statistics import scoring_statistics, token_statistics
from ppo_repro.stages.training_batch import TrainingBatch

LOGITS_AT_ONCE = 1 << 24  # elements of the logits that are in memory at once

# hidden states [r, H], and which rows they are -> tensors [r, ...]
OfRows = Callable[[Tensor, slice, Rows], tuple[Tensor, ...]]


class Distributions(NamedTuple):
    """Results of policy and reference for n response tokens, float32 [n] each; KLs and entropies in nats."""

    logprobs: Tensor  # of the policy
    ref_logprobs: Tensor
    ref_kl: Tensor  # KL(policy || reference) over the whole distribution
    entropies: Tensor  # of the policy
    prob_sq_sums: Tensor  # sum over the vocabulary of the policy's squared probabilities
    cumulative_probs: Tensor  # policy's probability of the tokens at least as likely, the token included
    reverse_ref_kl: Tensor  # KL(reference || policy); empty unless the reward charges it


class TokenResults(NamedTuple):
    """Results of the networks for n response tokens before an update."""

    of_tokens: Distributions
    routes: Tensor  # [n, M k] int32, of the policy; [n, 0] below level deep
    values: Tensor  # [n] float32; empty without a head on the policy's trunk


class PolicyPass(NamedTuple):
    """Results of the policy for n response tokens in an update."""

    hidden: Tensor  # [n, H]
    logprobs: Tensor  # [n] float32, nats
    entropies: Tensor  # [n] float32, nats
    exact_kl: Tensor | None  # [n] float32, KL(policy || reference) over the whole distribution; None unless in the loss


@torch.no_grad()
def score_rollout(state: TrainState, rollout: Rollout, config: RunConfig, ranks: Ranks) -> ForwardPass:
    """Score every response token by policy, reference and value model, before any update.

    Each rank scores its own sequences and gets all scores. The packed weights of the reference are freed before the
    packed weights of a separate value model are made, which limits the memory peak.
    """
    mine = torch.tensor(ranks.mine(len(rollout.lengths)), dtype=torch.int64)
    layout = config.layout
    work = micro_batches(rollout, mine, layout.forward_micro_batch, layout.padding, config.ppo.replay_routes)
    scored = ranks.gather([_score(state, m, rollout, config) for m in work])
    of_tokens = Distributions(*map(torch.cat, zip(*(score.of_tokens for score in scored), strict=True)))
    values = torch.cat([score.values for score in scored])
    forget_packed(state.reference)
    if state.separate_value is not None:
        model, returns = state.separate_value[0], state.coefficients.returns
        own = [values_in_reward_units(model, returns, hidden_states(model.trunk, m.batch), m) for m in work]
        values = torch.cat(ranks.gather(own))
    return ForwardPass(
        old_logprobs=of_tokens.logprobs,
        ref_logprobs=of_tokens.ref_logprobs,
        ref_kl=of_tokens.ref_kl,
        reverse_ref_kl=of_tokens.reverse_ref_kl if config.kl.rewards_have_exact_reverse_kl else None,
        entropies=of_tokens.entropies,
        prob_sq_sums=of_tokens.prob_sq_sums,
        cumulative_probs=of_tokens.cumulative_probs,
        routes=torch.cat([score.routes for score in scored]),
        values=None if state.value_model is None else values,
    )


def values_in_reward_units(model: ValueModel, returns: ReturnStatistics, hidden: Tensor, m: MicroBatch) -> Tensor:
    """Return V [n] float32 before each token from the hidden states [n, H] of the value model's trunk.

    V = mean + scale x prediction, or the prediction itself if returns are not normalised.
    """
    predictions = values_of(model, hidden, m.batch)
    return predictions * returns.scale + returns.mean if returns.count else predictions


def _score(state: TrainState, m: MicroBatch, rollout: Rollout, config: RunConfig) -> TokenResults:
    """Score the tokens of a micro-batch by policy, reference, and any value head on the policy's trunk."""
    trunk = trunk_of(state.policy)
    with_routes = config.records.level == "deep" and bool(routers(trunk))
    hidden, seen = seen_states(trunk, m.batch, replay=True, seen=with_routes)
    routes = torch.empty(len(m.tokens), 0, dtype=torch.int32)
    if seen is not None:
        routes = torch.from_numpy(seen[m.batch.predictors])
    scored_hidden = state.hidden_hook(hidden, m.tokens, ("scoring", state.iteration))
    of_tokens = _distributions(state, config.kl, config.numerics.mode, m, scored_hidden, rollout)
    head, returns = state.value_head, state.coefficients.returns
    values = torch.empty(0) if head is None else values_in_reward_units(head, returns, hidden, m)
    return TokenResults(of_tokens=of_tokens, routes=routes, values=values)


def _distributions(
    state: TrainState, charged: KLConfig, mode: Mode, m: MicroBatch, hidden: Tensor, rollout: Rollout
) -> Distributions:
    """Compare the distributions of policy and reference at n tokens, from the policy's hidden states [n, H].

    The C kernels compute KLs, sums of squares and cumulative probabilities in both numerics.
    """
    temperature, policy, reference = rollout.temperature, state.policy, state.reference
    ref_hidden = hidden_states(trunk_of(reference), m.batch)

    def of_rows(hidden: Tensor, rows: slice, _: Rows) -> tuple[Tensor, ...]:
        own = logits(policy, hidden)
        other = logits(reference, ref_hidden[rows])
        eligible = expand_kept(rollout.kept_tokens[m.tokens[rows]], own.shape[-1])
        of_policy = scoring_statistics(own, m.batch.targets[rows], temperature, eligible, mode)
        ref_logprobs = token_statistics(other, m.batch.targets[rows], temperature, eligible, mode)[0]
        ref_kl = kl_divergence(own, other, temperature, eligible)
        reverse = torch.empty(0)
        if charged.rewards_have_exact_reverse_kl:
            reverse = kl_divergence(other, own, temperature, eligible)
        return Distributions(
            **of_policy._asdict(),
            ref_logprobs=ref_logprobs,
            ref_kl=ref_kl,
            reverse_ref_kl=reverse,
        )

    return Distributions(*in_chunks(of_rows, hidden, m.batch.rows, policy.config.vocab_size))


def policy_pass(
    state: TrainState, charged: KLConfig, mode: Mode, m: MicroBatch, rollout: Rollout, stream: Stream
) -> PolicyPass:
    """Run the policy over a micro-batch of n tokens, with gradients.

    Args:
        state: has policy, reference and the hook that may change hidden states.
        charged: says whether the loss has a KL over the whole vocabulary.
        rollout: gives the temperature and the tokens that top-k and top-p keep.
        stream: names the pass for the hook.
    """
    hidden, ref_hidden = hidden_states(trunk_of(state.policy), m.batch, replay=True), None
    if charged.loss_has_exact_kl:
        with torch.no_grad():
            ref_hidden = hidden_states(trunk_of(state.reference), m.batch)
    temperature = rollout.temperature

    def of_rows(hidden: Tensor, rows: slice, where: Rows) -> tuple[Tensor, ...]:
        own = logits(state.policy, hidden, where)
        eligible = expand_kept(rollout.kept_tokens[m.tokens[rows]], own.shape[-1])
        statistics = token_statistics(own, m.batch.targets[rows], temperature, eligible, mode)
        if ref_hidden is None:
            return statistics
        with torch.no_grad():
            other = logits(state.reference, ref_hidden[rows])
        return *statistics, kl_divergence(own, other, temperature, eligible, mode)

    changed = state.hidden_hook(hidden, m.tokens, stream)
    logprobs, entropies, *exact_kl = in_chunks(of_rows, changed, m.batch.rows, state.policy.config.vocab_size)
    return PolicyPass(hidden=hidden, logprobs=logprobs, entropies=entropies, exact_kl=exact_kl[0] if exact_kl else None)


def kl_terms_of(batch: TrainingBatch, tokens: Tensor, new_logprobs: Tensor, exact_kl: Tensor | None) -> Tensor | None:
    """Return kl_coef KL(policy || reference) of n tokens, [n] float32; None unless the loss has a KL term.

    Args:
        batch: has kl_coef, the estimator and the reference's log-probs.
        tokens: [n] int64, index into the iteration's tokens.
        new_logprobs: [n] float32, of the present policy.
        exact_kl: [n] in nats, where the KL is over the whole vocabulary.
    """
    if batch.kl_estimator is not None:
        return batch.kl_estimator(new_logprobs, batch.ref_logprobs[tokens]) * batch.kl_coef
    return None if exact_kl is None else exact_kl * batch.kl_coef


def in_chunks(compute: OfRows, hidden: Tensor, rows: Rows, vocab_size: int) -> tuple[Tensor, ...]:
    """Apply a function to chunks of hidden states with at most LOGITS_AT_ONCE logits each, and join its tensors.

    If there are several chunks, a backward pass computes each chunk again, in order, and holds the logits of only one.

    Args:
        compute: takes hidden states [r, H], the slice of the n rows, and their places; returns tensors [r, ...].
        hidden: [n, H].
        rows: sequence and position of each row.
        vocab_size: V, which decides the rows of a chunk.

    Returns:
        Tensors [n, ...].
    """
    chunks = rows.chunks(max(1, LOGITS_AT_ONCE // vocab_size))
    if len(chunks) == 1:
        return compute(hidden, chunks[0], rows)
    if torch.is_grad_enabled() and hidden.requires_grad:
        return _Chunks.apply(hidden, compute, rows, chunks)
    return _joined(compute, hidden, rows, chunks)


def _joined(compute: OfRows, hidden: Tensor, rows: Rows, chunks: list[slice]) -> tuple[Tensor, ...]:
    """Apply `compute` chunk by chunk, and return its joined tensors [n, ...]."""
    computed = [compute(hidden[chunk], chunk, rows.chunk(chunk)) for chunk in chunks]
    return tuple(torch.cat(column) for column in zip(*computed, strict=True))


class _Chunks(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, compute: OfRows, rows: Rows, chunks: list[slice]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden)
        ctx.compute, ctx.rows, ctx.chunks = compute, rows, chunks
        return _joined(compute, hidden, rows, chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        gradient = torch.empty_like(hidden)
        for chunk in ctx.chunks:
            with torch.enable_grad():
                part = hidden[chunk].detach().requires_grad_()
                computed = ctx.compute(part, chunk, ctx.rows.chunk(chunk))
            trained = [(out, grad[chunk]) for out, grad in zip(computed, grads, strict=True) if out.requires_grad]
            torch.autograd.backward([out for out, _ in trained], [grad for _, grad in trained])
            gradient[chunk] = part.grad
        return gradient, None, None, None
