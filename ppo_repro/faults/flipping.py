"""The smallest differences that a run can begin with: one bit of one log-prob, or one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ppo_repro.models.state import TrainState
from ppo_repro.rollout.engine import Completion, Dialogue, Engine, Request, Sampling

FIRST_TEXT_ID = 2  # of the tokenizers made here: the tokens before it are <pad> and <eos>


@dataclass(frozen=True)
class FlippingEngine:
    """An engine whose first token in iteration 0 is reported otherwise than it was sampled; nothing else differs."""

    engine: Engine
    state: TrainState
    what: Literal["bit", "token"]  # the last bit of its log-prob, or its id, which becomes a neighbour's

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        completions = self.engine.generate(requests, sampling, dialogue)
        if sampling.greedy or self.state.iteration:
            return completions
        first = completions[0]
        if self.what == "token":
            token = first.response_ids[0]
            token += -1 if token > FIRST_TEXT_ID else 1
            return [replace(first, response_ids=(token, *first.response_ids[1:])), *completions[1:]]
        logprobs = first.logprobs.clone()
        logprobs.view(torch.int32)[0] ^= 1
        return [replace(first, logprobs=logprobs), *completions[1:]]
