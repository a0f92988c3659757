"""The smallest differences that two runs can begin with: one bit of one weight, or one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ppo_repro.models.state import TrainState
from ppo_repro.rollout.engine import Completion, Dialogue, Engine, Request, Sampling

FIRST_TEXT_ID = 2  # of the tokenizers made here: the tokens before it are <pad> and <eos>


def flip_bit(policy: nn.Module) -> None:
    """Change the last bit of the first number of the first weight matrix after the embeddings."""
    matrix = next(p for name, p in policy.named_parameters() if p.dim() == 2 and "embed" not in name)
    with torch.no_grad():
        matrix.view(torch.int32)[0, 0].bitwise_xor_(1)


@dataclass(frozen=True)
class FlippingEngine:
    """An engine that reports another first token in iteration 0 than it sampled, with the log-prob of the sampled."""

    engine: Engine
    state: TrainState

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        first, *others = self.engine.generate(requests, sampling, dialogue)
        if sampling.greedy or self.state.iteration:
            return [first, *others]
        token = first.response_ids[0]
        token += -1 if token > FIRST_TEXT_ID else 1
        return [replace(first, response_ids=(token, *first.response_ids[1:])), *others]
