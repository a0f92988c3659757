"""The training-side forward over a whole rollout, before any update."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.buffers import ForwardPass, Rollout
from ppo_repro.config import RunConfig
from ppo_repro.models.layout import TokenBatch, micro_batches
from ppo_repro.models.networks import expand_kept, hidden_states, value_predictions
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.families import head_of, trunk_of
from ppo_repro.numerics.logprobs import score
from ppo_repro.ranks import Ranks

LOGITS_AT_ONCE = 1 << 24


@torch.no_grad()
def score_rollout(state: TrainState, rollout: Rollout, config: RunConfig, ranks: Ranks) -> ForwardPass:
    """Policy, reference and value model on every response token, `forward_micro_batch` sequences at a time.

    Each rank scores its own sequences and gets all scores.
    """
    mine = torch.tensor(ranks.mine(len(rollout.lengths), config.layout.rank_shares), dtype=torch.int64)
    parts: list[tuple[Tensor, ...]] = []
    for m in micro_batches(rollout, mine, config.layout.forward_micro_batch, config.layout.padding):
        statistics = _distributions(state, m.batch, rollout.kept_tokens[m.tokens], config)
        parts.append((*statistics, value_predictions(state.value_model, m.batch)))
    old, ref, ref_kl, entropies, prob_sq_sums, values = (
        torch.cat(column) for column in zip(*ranks.gather(parts), strict=True)
    )
    return ForwardPass(
        old_logprobs=old,
        ref_logprobs=ref,
        ref_kl=ref_kl,
        values=values,
        entropies=entropies,
        prob_sq_sums=prob_sq_sums,
    )


def _distributions(state: TrainState, batch: TokenBatch, kept: Tensor, config: RunConfig) -> tuple[Tensor, ...]:
    """(old log-probs, ref log-probs, KL(policy || reference), entropies, sums of squares), [n] each.

    Only so many rows of the vocabulary are held at once that they stay a moderate size.
    """
    mode, temperature = config.numerics.mode, config.rollout.temperature
    policy, reference = state.policy, state.reference
    hidden, ref_hidden = hidden_states(trunk_of(policy), batch), hidden_states(trunk_of(reference), batch)
    head, ref_head = head_of(policy), head_of(reference)
    vocab_size = policy.config.vocab_size
    parts: list[tuple[Tensor, ...]] = []
    for rows in torch.arange(len(hidden)).split(max(1, LOGITS_AT_ONCE // vocab_size)):
        logits, ref_logits = head(hidden[rows]), ref_head(ref_hidden[rows])
        targets, eligible = batch.targets[rows], expand_kept(kept[rows], vocab_size)
        s = score(logits, ref_logits, targets, temperature, eligible, mode)
        parts.append((s.logprobs, s.ref_logprobs, s.ref_kl, s.entropies, s.prob_sq_sums))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
