"""Batches of a forward pass: the tokens of each sequence, and the positions that predict response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ppo_repro.buffers import Rollout
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.interface import Ints, ints
from ppo_repro.numerics.sequences import Ragged, Rows, ragged


@dataclass(frozen=True)
class TokenBatch:
    """Some sequences with n response tokens to score, in sequence order."""

    sequences: Ragged  # all tokens of each but the last, which predicts nothing
    predictors: Ints  # [n] rows whose logits predict the tokens
    targets: Tensor  # [n] int64, the response tokens

    @property
    def rows(self) -> Rows:
        """Return the sequence and the position of each of the n predicting inputs."""
        return self.sequences.rows.select(self.predictors)

    def with_sums(self, sums: GradientSums | None) -> TokenBatch:
        """Return the same batch. A backward pass adds the gradients of weights to `sums`."""
        return replace(self, sequences=self.sequences.with_sums(sums))


def lay_out(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    padding: str = "right",
    is_forced: Sequence[Sequence[bool]] | None = None,
    routes: Sequence[Tensor] | None = None,
    slots: Ints | None = None,
) -> TokenBatch:
    """Lay out a batch of S sequences, each a prompt and a response.

    The last response token is no input, because no later token is predicted.

    Args:
        prompts: [S] token ids, ragged.
        responses: [S] token ids, ragged, at least one each.
        padding: right, left or none; for native numerics.
        is_forced: [S] ragged, response tokens that are inputs but are not scored, like the prompt's; None: none.
        routes: [S] int32 [inputs, M k], experts of each sequence's inputs; None: the routers choose.
        slots: [S + 1] as in `Rows`, for a pass with gradients.
    """
    inputs = [(*p, *r[:-1]) for p, r in zip(prompts, responses, strict=True)]
    experts = None if routes is None else torch.cat(list(routes))
    sequences = ragged(inputs, slots=slots, routes=experts, padding=padding)
    spans = zip(prompts, sequences.start[:-1], sequences.start[1:], strict=True)
    scored = np.concatenate([np.arange(start + len(prompt) - 1, end) for prompt, start, end in spans])
    targets = torch.tensor([token for response in responses for token in response], dtype=torch.int64)
    if is_forced is not None:
        sampled = ~np.array([forced for response in is_forced for forced in response], bool)
        scored, targets = scored[sampled], targets[torch.from_numpy(sampled)]
    return TokenBatch(sequences, ints(scored), targets)


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a rollout as a batch; `tokens` indexes the rollout's [N] fields."""

    batch: TokenBatch
    tokens: Tensor

    def with_sums(self, sums: GradientSums | None) -> MicroBatch:
        """Return the same micro-batch. A backward pass adds the gradients of weights to `sums`."""
        return replace(self, batch=self.batch.with_sums(sums))


def micro_batches(
    rollout: Rollout,
    sequences: Tensor,
    size: int,
    padding: str,
    replay: bool = False,
    slots: Ints | None = None,
) -> list[MicroBatch]:
    """Lay out some sequences of a rollout in micro-batches. The list is empty without sequences.

    Args:
        rollout: N response tokens.
        sequences: [S] int64, index of the sequences in the rollout.
        size: sequences of a micro-batch; 0: all in one.
        padding: right, left or none; for native numerics.
        replay: whether tokens take the sampler's routes.
        slots: [S + 1] as in `Rows`, for passes with gradients.
    """
    micro: list[MicroBatch] = []
    if not len(sequences):
        return micro
    start = 0
    for chunk in sequences.split(size or len(sequences)):
        chunk_slots = None if slots is None else slots[start : start + len(chunk) + 1]
        start += len(chunk)
        tokens = rollout.tokens_of(chunk)
        chosen = chunk.tolist()
        prompts, responses = [rollout.prompts.prompt_ids[i] for i in chosen], [rollout.whole(i) for i in chosen]
        routes = None if not replay or rollout.routes is None else [rollout.routes[i] for i in chosen]
        forced = None if rollout.episodes is None else [rollout.episodes[i].is_forced for i in chosen]
        micro.append(MicroBatch(lay_out(prompts, responses, padding, forced, routes, chunk_slots), tokens))
    return micro
