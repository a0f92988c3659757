"""K epochs of minibatches over one rollout; the only caller of `optimizer.step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.buffers import Advantages, ForwardPass, MinibatchUpdate, Rollout
from ppo_repro.config import RunConfig
from ppo_repro.models.layout import MicroBatch, input_tokens, micro_batches
from ppo_repro.models.networks import expand_kept, policy_logits, value_predictions
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.grid import exact_mean
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optimizer import StepReport, weights_digest
from ppo_repro.ppo import kl, losses
from ppo_repro.ranks import Ranks
from ppo_repro.seeding import permutation


def minibatches(sequences: int, size: int, seed: int, iteration: int, epoch: int) -> list[Tensor]:
    """A shuffle of 0..sequences-1 cut into minibatches, each sorted; its own shuffle for every epoch."""
    order = torch.from_numpy(permutation(sequences, "minibatches", seed, iteration, epoch))
    return [chunk.sort().values for chunk in order.split(size)]


@dataclass(frozen=True)
class _Work:
    """One minibatch: the part of this rank laid out, and the size of the whole."""

    mine: list[MicroBatch]
    tokens: Tensor  # [M] int64, of all ranks
    input_tokens: int  # of all ranks, prompts included
    ranks: Ranks


def _share_out(rollout: Rollout, sequences: Tensor, config: RunConfig, ranks: Ranks) -> _Work:
    layout = config.layout
    mine = sequences[torch.tensor(ranks.mine(len(sequences), layout.rank_shares), dtype=torch.int64)]
    work = micro_batches(rollout, mine, layout.update_micro_batch, layout.padding)
    return _Work(work, rollout.tokens_of(sequences), input_tokens(rollout, sequences), ranks)


def _collector(
    work: _Work,
    losses_of: Callable[[MicroBatch], tuple[Tensor, tuple[Tensor, ...]]],
) -> tuple[Callable[[], None], list[tuple[Tensor, ...]]]:
    """A backward pass that may be repeated, and what its last run saw: (loss, *columns) per micro-batch.

    Losses are not reduced in autograd: each token is seeded with 1/M, M the tokens of the minibatch on all ranks.
    """
    total = len(work.tokens)
    seen: list[tuple[Tensor, ...]] = []

    def backward() -> None:
        seen.clear()
        for m in work.mine:
            loss, columns = losses_of(m)
            torch.autograd.backward(loss, torch.full_like(loss, 1.0 / total))
            seen.append((loss.detach(), *(c.detach() for c in columns)))

    return backward, seen


def _columns(seen: list[tuple[Tensor, ...]], ranks: Ranks) -> list[Tensor]:
    """The columns over the whole minibatch, [M] each."""
    return [torch.cat(parts) for parts in zip(*ranks.gather(seen), strict=True)]


def update(
    state: TrainState,
    rollout: Rollout,
    forward: ForwardPass,
    advantages: Advantages,
    config: RunConfig,
    ranks: Ranks,
) -> Iterator[MinibatchUpdate]:
    """All optimizer steps of one iteration, in order; changes the weights in `state`, on every rank alike."""
    ppo = config.ppo
    for epoch in range(ppo.epochs):
        parts = minibatches(len(rollout.lengths), ppo.minibatch_size, config.seed, state.iteration, epoch)
        for index, sequences in enumerate(parts):
            work = _share_out(rollout, sequences, config, ranks)
            yield _step(state, rollout, forward, advantages, config, epoch, index, work)


@dataclass(frozen=True)
class _PolicyStep:
    """A step of the policy and its per-token view before it, [M] each."""

    report: StepReport
    losses: Tensor
    new_logprobs: Tensor
    ratios: Tensor
    entropies: Tensor


@dataclass(frozen=True)
class _ValueStep:
    """A step of the value model and its per-token view before it, [M] each."""

    report: StepReport
    losses: Tensor
    new_values: Tensor


def _policy_step(
    state: TrainState, work: _Work, rollout: Rollout, anchor: Tensor, advantages: Tensor, config: RunConfig
) -> _PolicyStep:
    """Clipped surrogate minus the entropy bonus on one minibatch."""
    ppo, temperature, mode = config.ppo, config.rollout.temperature, config.numerics.mode

    def losses_of(m: MicroBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        logits = policy_logits(state.policy, m.batch)
        eligible = expand_kept(rollout.kept_tokens[m.tokens], logits.shape[-1])
        logprobs, entropies = token_statistics(logits, m.batch.targets, temperature, eligible, mode)
        ratios = losses.probability_ratios(logprobs, anchor[m.tokens])
        surrogate = losses.clipped_surrogate(ratios, advantages[m.tokens], losses.Band(ppo.clip_range, ppo.clip_range))
        return surrogate - entropies * ppo.entropy_coef, (logprobs, ratios, entropies)

    backward, seen = _collector(work, losses_of)
    report = state.policy_optimizer.step(backward, work.input_tokens, work.ranks)
    return _PolicyStep(report, *_columns(seen, work.ranks))


def _value_step(state: TrainState, work: _Work, old_values: Tensor, returns: Tensor, config: RunConfig) -> _ValueStep:
    """Clipped squared error on one minibatch."""

    def losses_of(m: MicroBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        values = value_predictions(state.value_model, m.batch)
        clip_range = config.ppo.value_clip_range
        return losses.clipped_value_loss(values, old_values[m.tokens], returns[m.tokens], clip_range), (values,)

    backward, seen = _collector(work, losses_of)
    report = state.value_optimizer.step(backward, work.input_tokens, work.ranks)
    return _ValueStep(report, *_columns(seen, work.ranks))


def _step(
    state: TrainState,
    rollout: Rollout,
    forward: ForwardPass,
    advantages: Advantages,
    config: RunConfig,
    epoch: int,
    minibatch: int,
    work: _Work,
) -> MinibatchUpdate:
    ppo = config.ppo
    anchor = rollout.rollout_logprobs if ppo.ratio_anchor == "rollout" else forward.old_logprobs
    policy = _policy_step(state, work, rollout, anchor, advantages.advantages, config)
    value = _value_step(state, work, forward.values, advantages.returns, config)

    tokens = work.tokens
    flags = losses.clip_flags(policy.ratios, advantages.advantages[tokens], losses.Band(ppo.clip_range, ppo.clip_range))
    value_clipped = losses.value_clip_binds(
        value.new_values, forward.values[tokens], advantages.returns[tokens], ppo.value_clip_range
    )
    binding = (flags == losses.CLIP_FLAGS.index("clip_high")) | (flags == losses.CLIP_FLAGS.index("clip_low"))
    return MinibatchUpdate(
        epoch=epoch,
        minibatch=minibatch,
        tokens=tokens,
        new_logprobs=policy.new_logprobs,
        ratios=policy.ratios,
        clip_flags=flags,
        new_values=value.new_values,
        value_clipped=value_clipped,
        new_entropies=policy.entropies,
        policy_loss=exact_mean(policy.losses),
        value_loss=exact_mean(value.losses),
        entropy=exact_mean(policy.entropies),
        approx_kl=exact_mean(kl.k3(anchor[tokens] - policy.new_logprobs)),
        clip_fraction=exact_mean(binding),
        value_clip_fraction=exact_mean(value_clipped),
        grad_norm=policy.report.grad_norm,
        value_grad_norm=value.report.grad_norm,
        gradient_redos=policy.report.redos,
        value_gradient_redos=value.report.redos,
        policy_digest=weights_digest(state.policy.named_parameters()),
        value_digest=weights_digest(state.value_model.named_parameters()),
    )
