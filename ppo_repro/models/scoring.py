"""The training-side forward over a whole rollout, before any update."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.buffers import ForwardPass, Rollout
from ppo_repro.config import RunConfig
from ppo_repro.models.layout import lay_out
from ppo_repro.models.networks import expand_kept, policy_logits, value_predictions
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.logprobs import kl_divergence, prob_sq_sum, token_statistics


@torch.no_grad()
def score_rollout(state: TrainState, rollout: Rollout, config: RunConfig) -> ForwardPass:
    """Policy, reference and value model on every response token, `forward_micro_batch` sequences at a time."""
    mode, temperature = config.numerics.mode, config.rollout.temperature
    everything = torch.arange(len(rollout.lengths))
    parts: list[tuple[Tensor, ...]] = []
    for chunk in everything.split(config.layout.forward_micro_batch or len(everything)):
        tokens = rollout.tokens_of(chunk)
        responses = torch.split(rollout.response_ids[tokens], rollout.lengths[chunk].tolist())
        prompts = [rollout.prompts.prompt_ids[i] for i in chunk.tolist()]
        batch = lay_out(prompts, [r.tolist() for r in responses], config.layout.padding)
        logits, ref_logits = policy_logits(state.policy, batch), policy_logits(state.reference, batch)
        eligible = expand_kept(rollout.kept_tokens[tokens], logits.shape[-1])
        old_logprobs, entropies = token_statistics(logits, batch.targets, temperature, eligible, mode)
        ref_logprobs, _ = token_statistics(ref_logits, batch.targets, temperature, eligible, mode)
        parts.append(
            (
                old_logprobs,
                ref_logprobs,
                kl_divergence(logits, ref_logits, temperature, eligible),
                value_predictions(state.value_model, batch),
                entropies,
                prob_sq_sum(logits, temperature, eligible),
            )
        )
    return ForwardPass(*(torch.cat(column) for column in zip(*parts, strict=True)))
