"""Add deliberate faults to the sampler: older weights, one flipped bit, another first token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ppo_repro.base.ranks import Ranks
from ppo_repro.config.mismatch import MismatchConfig
from ppo_repro.models.state import TrainState
from ppo_repro.sampler import Completion, Request, Sampler, Sampling
from ppo_repro.sampling.faults.retokenizing import RetokenizingSampler
from ppo_repro.tasks.tokenizer import special_ids


def with_faults(
    mismatch: MismatchConfig,
    sampler: Sampler,
    state: TrainState,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
    ranks: Ranks,
) -> Sampler:
    """Return the run's sampler with the faults of the section `mismatch`, or `sampler` itself without faults.

    A flipped bit changes the policy of `state` at once. No token is flipped to a special one, or to one of `end_ids`.
    """
    lag, share = mismatch.sampler.lag, mismatch.trainer.retokenize
    if mismatch.flip == "bit" and state.iteration == 0:
        flip_bit(state.policy)
    if mismatch.flip == "token":
        known = {i for i in tokenizer.get_vocab().values() if i < state.policy.config.vocab_size}
        sampler = FlippingSampler(sampler, state, ranks, known.difference(special_ids(tokenizer), end_ids))
    if lag:
        sampler = LaggingSampler(sampler, state, lag)
    # not in `received`, which would leave the sampler's tokens in the records, where the loop compares log-probs
    return RetokenizingSampler(sampler, tokenizer, share) if share else sampler


def flip_bit(policy: nn.Module) -> None:
    """Change the last bit of the first number of the first weight matrix after the embeddings."""
    embeddings = {id(module.weight) for module in policy.modules() if isinstance(module, nn.Embedding)}
    matrix = next(p for p in policy.parameters() if p.dim() == 2 and id(p) not in embeddings)
    with torch.no_grad():
        matrix.view(torch.int32)[0, 0].bitwise_xor_(1)


@dataclass(frozen=True)
class FlippingSampler:
    """A sampler that changes the run's first token, whichever process samples it, but reports the sampled log-prob.

    The new token is the next lower one of `text_ids`, or the next higher one if there is no lower one.
    """

    sampler: Sampler
    state: TrainState
    ranks: Ranks
    text_ids: Collection[int]  # neither special nor end tokens, and known to tokenizer and model

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        completions = self.sampler.generate(requests, sampling)
        if sampling.greedy or self.state.iteration:
            return completions
        counts = self.ranks.everyone(len(requests))
        if not requests or any(counts[: self.ranks.rank]):
            return completions
        first, *others = completions
        token = first.response_ids[0]
        lower = [i for i in self.text_ids if i < token]
        other = max(lower) if lower else min(i for i in self.text_ids if i > token)
        return [replace(first, response_ids=(other, *first.response_ids[1:])), *others]


@dataclass(frozen=True)
class LaggingSampler:
    """A sampler that samples with the policy of `lag` iterations ago. Greedy evaluation uses the newest weights."""

    sampler: Sampler
    state: TrainState  # has the policy with which the sampler samples
    lag: int

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Sample with the weights of `lag` iterations ago, or the first weights; then restore the newest weights."""
        if sampling.greedy:
            return self.sampler.generate(requests, sampling)
        versions, newest = self.state.versions, self.state.iteration
        assert versions is not None
        versions.keep(newest)
        version = max(0, newest - self.lag)
        with versions.at(version):
            completions = self.sampler.generate(requests, sampling)
        versions.forget(newest + 1)
        return [replace(c, policy_versions=(version,) * len(c.response_ids)) for c in completions]
