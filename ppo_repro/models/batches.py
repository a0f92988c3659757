"""Laying out ragged sequences as rectangles for a forward pass. In exact numerics the layout changes no result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.buffers import Rollout


@dataclass(frozen=True)
class TokenBatch:
    """R rows of L positions that hold some sequences, with n response tokens to score, in sequence order."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64, from 0 in each sequence
    first_key: Tensor  # [R, L] int64, query i of a row sees keys first_key[i]..i of that row
    predictors: Tensor  # [n] int64, flat index of the position whose logits predict the token
    targets: Tensor  # [n] int64, the response tokens
    real_tokens: int  # inputs that are not padding
    routes: Tensor | None = None  # [R, L, M k] int32, experts that computed the inputs elsewhere; None: not known


def lay_out(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    padding: str,
    is_forced: Sequence[Sequence[bool]] | None = None,
    routes: Sequence[Tensor] | None = None,
) -> TokenBatch:
    """Place sequences (prompt + response) in rows, padded `right` or `left`, or packed in one row with `none`.

    The last response token is not an input: nothing is predicted from it. Padding is token 0 and sees only itself,
    so that no query is without a key; no other token sees padding. Response tokens that are forced are inputs like
    those of the prompt, and are not scored; None: none is. `routes` are those of each sequence's inputs, [.., M k].
    """
    lengths = [len(p) + len(r) - 1 for p, r in zip(prompts, responses, strict=True)]
    if padding == "none":
        rows, width = 1, sum(lengths)
        starts = [(0, sum(lengths[:i])) for i in range(len(lengths))]
    else:
        rows, width = len(lengths), max(lengths)
        starts = [(row, 0 if padding == "right" else width - n) for row, n in enumerate(lengths)]
    input_ids = torch.zeros(rows, width, dtype=torch.int64)
    position_ids = torch.zeros(rows, width, dtype=torch.int64)
    first_key = torch.arange(width).repeat(rows, 1)
    predictors: list[Tensor] = []
    for prompt, response, length, (row, start) in zip(prompts, responses, lengths, starts, strict=True):
        end = start + length
        input_ids[row, start:end] = torch.tensor([*prompt, *response[:-1]])
        position_ids[row, start:end] = torch.arange(length)
        first_key[row, start:end] = start
        predictors.append(row * width + start + torch.arange(len(prompt) - 1, length))
    targets = torch.tensor([token for response in responses for token in response], dtype=torch.int64)
    scored = torch.cat(predictors)
    if is_forced is not None:
        sampled = ~torch.tensor([forced for response in is_forced for forced in response], dtype=torch.bool)
        scored, targets = scored[sampled], targets[sampled]
    laid_out = None
    if routes is not None:
        laid_out = routes[0][0].repeat(rows, width, 1)  # padding takes any route
        for route, length, (row, start) in zip(routes, lengths, starts, strict=True):
            laid_out[row, start : start + length] = route
    return TokenBatch(input_ids, position_ids, first_key, scored, targets, sum(lengths), laid_out)


def input_tokens(rollout: Rollout, sequences: Tensor) -> int:
    """Number of input tokens of the sequences in a forward pass, prompts included: the sum of `real_tokens`."""

    def after_prompt(i: int) -> int:
        return int(rollout.lengths[i]) if rollout.episodes is None else len(rollout.episodes[i].ids)

    return sum(len(rollout.prompts.prompt_ids[i]) + after_prompt(i) - 1 for i in sequences.tolist())


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a rollout, laid out; `tokens` indexes the rollout's [N] fields."""

    batch: TokenBatch
    tokens: Tensor


def micro_batches(
    rollout: Rollout, sequences: Tensor, size: int, padding: str, replay: bool = False
) -> list[MicroBatch]:
    """The given sequences of a rollout, `size` at a time, or all at once with 0; empty without sequences.

    `replay`: with the sampler's routes.
    """
    micro: list[MicroBatch] = []
    if not len(sequences):
        return micro
    for chunk in sequences.split(size or len(sequences)):
        tokens = rollout.tokens_of(chunk)
        prompts = [rollout.prompts.prompt_ids[i] for i in chunk.tolist()]
        routes = None if not replay or rollout.routes is None else [rollout.routes[i] for i in chunk.tolist()]
        if rollout.episodes is None:
            responses = torch.split(rollout.response_ids[tokens], rollout.lengths[chunk].tolist())
            batch = lay_out(prompts, [r.tolist() for r in responses], padding, routes=routes)
        else:
            episodes = [rollout.episodes[i] for i in chunk.tolist()]
            batch = lay_out(prompts, [e.ids for e in episodes], padding, [e.is_forced for e in episodes], routes)
        micro.append(MicroBatch(batch, tokens))
    return micro
