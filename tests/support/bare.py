"""A rollout and its forward pass with nothing in them but the numbers of a test."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_repro.buffers import Advantages, Coefficients, ForwardPass, Prompts, ReturnStatistics, Rollout

NO_COEFFICIENTS = Coefficients(0.0, 0.0, 0.0, ReturnStatistics())


def bare_rollout(lengths: Tensor, logprobs: Tensor | None = None, reasons: Sequence[str] | None = None) -> Rollout:
    count, tokens = len(lengths), int(lengths.sum())
    nothing = torch.zeros(tokens)
    return Rollout(
        prompts=Prompts(("",) * count, (), (), (), (), ((5, 6),) * count),
        response_ids=torch.zeros(tokens, dtype=torch.int64),
        lengths=lengths,
        temperature=0.5,
        rollout_logprobs=nothing if logprobs is None else logprobs,
        log_kept_mass=nothing,
        kept_tokens=torch.ones(tokens, 3, dtype=torch.uint8),
        finish_reason=tuple(reasons or ("stop",) * count),
        server=(None,) * count,
        latency=(None,) * count,
        response=("",) * count,
        spans=(),
    )


def bare_forward(logprobs: Tensor) -> ForwardPass:
    x, ids = torch.zeros_like(logprobs), torch.empty(len(logprobs), 0)
    return ForwardPass(logprobs, logprobs, x, None, x, x, None, ids, None)


def bare_advantages(advantages: Tensor) -> Advantages:
    return Advantages(advantages, advantages, None)
