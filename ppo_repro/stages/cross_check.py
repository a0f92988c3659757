"""The CPU's check of a run on a GPU: it recomputes log-probs of some tokens of each iteration, drawn by seed."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.base.ranks import Ranks
from ppo_repro.base.seeding import permutation
from ppo_repro.buffers import ForwardPass, Rollout
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import hidden_states
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.network import logits
from ppo_repro.numerics.token_sampling import expand_kept
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.stages.equal_bits import NamedValues, require_same_bits


@torch.no_grad()
def cross_check(config: RunConfig, state: TrainState, rollout: Rollout, forward: ForwardPass, ranks: Ranks) -> None:
    """Recompute the old log-probs of `numerics.cross_check` tokens on the CPU, and compare them.

    Args:
        state: its `cpu_policy` takes the policy's weights; its `cross_checked` counts tokens. Without a `cpu_policy`
            nothing is computed.
        ranks: the first process computes.

    Raises:
        UnequalBits: a log-prob differs.
    """
    if state.cpu_policy is None or not ranks.is_first:
        return
    batch, tokens = _drawn(config, state.iteration, rollout)
    for own, live in zip(state.cpu_policy.parameters(), state.policy.parameters(), strict=True):
        own.copy_(live)
    hidden = hidden_states(trunk_of(state.cpu_policy), batch, replay=True)
    changed = state.hidden_hook(hidden, tokens, ("scoring", state.iteration))
    of_tokens = logits(state.cpu_policy, changed)
    eligible = expand_kept(rollout.kept_tokens[tokens], of_tokens.shape[-1])
    computed, _ = token_statistics(of_tokens, batch.targets, rollout.temperature, eligible, "deterministic")
    of_card, of_cpu = NamedValues("old_logprobs", forward.old_logprobs[tokens]), NamedValues("cpu_logprobs", computed)
    require_same_bits(state.iteration, rollout.lengths, of_card, of_cpu, tokens)
    state.cross_checked += len(tokens)


def _drawn(config: RunConfig, iteration: int, rollout: Rollout) -> tuple[TokenBatch, Tensor]:
    """Draw responses until there are enough tokens. Only the first tokens of the last response are computed.

    Returns:
        The responses as a batch, and the index [n] int64 of their tokens into the rollout's tokens.
    """
    left, starts = config.numerics.cross_check, rollout.starts()
    prompts, responses, forced, routes, tokens = [], [], [], [], []
    for i in permutation(len(rollout.lengths), "cross check", config.seed, iteration).tolist():
        if not left:
            break
        count, whole = min(left, int(rollout.lengths[i])), rollout.whole(i)
        is_forced = (False,) * len(whole) if rollout.episodes is None else rollout.episodes[i].is_forced
        sampled = [place for place, is_put_in in enumerate(is_forced) if not is_put_in]
        end = sampled[count - 1] + 1
        prompts.append(rollout.prompts.prompt_ids[i])
        responses.append(whole[:end])
        forced.append(is_forced[:end])
        if config.ppo.replay_routes and rollout.routes is not None:
            routes.append(rollout.routes[i][: len(prompts[-1]) + end - 1])
        tokens.append(torch.arange(count) + starts[i])
        left -= count
    batch = lay_out(prompts, responses, is_forced=forced, routes=routes or None)
    return batch, torch.cat(tokens)
