"""Logits of hidden states, for the tokens to sample."""

from __future__ import annotations

from typing import Any, NoReturn

from sglang.srt.layers.logits_processor import LogitsProcessor
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.numerics.network import logits


class Logits(LogitsProcessor):
    """SGLang chooses the rows; the product is that of the policy's head. It has no other way to logits."""

    def __init__(self, config: PretrainedConfig, policy: PreTrainedModel) -> None:
        super().__init__(config)
        self._policy = (policy,)  # in a tuple, so that it is no module of this one
        self.input_logprob_processor = _NoPrompts()

    def _get_logits(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return logits(self._policy[0], hidden_states.contiguous())


class _NoPrompts:
    """What SGLang calls for a request that asks for log-probs of its prompt."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("deterministic numerics in SGLang: a request with logprob_start_len is not supported")
