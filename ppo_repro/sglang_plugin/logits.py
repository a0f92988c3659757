"""Logits of hidden states, and log-probs of a prompt's own tokens where a request asks for them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.logprob_processor import (
    LogprobResult,
    LogprobStage,
    get_token_ids_logprobs_raw,
    get_top_logprobs_raw,
)
from torch import Tensor, nn
from transformers import PretrainedConfig

from ppo_repro.numerics.arithmetic.distribution import distribution, require_finite


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probs float32 [n, V] of logits float32 [n, V] at temperature 1; NumericsError if one is not finite."""
    require_finite(logits)
    d = distribution(logits, None)
    return (d.shifted.to(torch.float64) - d.log_total).to(torch.float32)


class _Head:
    """The LM head without a `weight`: any other way from SGLang to logits would raise."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head


class ExactLogits(LogitsProcessor):
    """SGLang chooses the rows; the product is that of the lowered head."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        if not hasattr(self, "input_logprob_processor"):
            raise RuntimeError("exact numerics in SGLang: this release computes log-probs of prompts elsewhere")
        self.input_logprob_processor = _InputLogprobs()

    def forward(self, input_ids: Tensor, hidden_states: Tensor, lm_head: nn.Module, logits_metadata: Any) -> Any:
        """As in SGLang; `lm_head` is the lowered layer."""
        return super().forward(input_ids, hidden_states, _Head(lm_head), logits_metadata)

    def _get_logits(self, hidden_states: Tensor, lm_head: _Head, *_: Any, **__: Any) -> Tensor:
        return lm_head.head(hidden_states)


class _InputLogprobs:
    """Log-probs of the tokens of prompts, always at temperature 1, as SGLang has them."""

    def forward(
        self,
        pruned_states: Tensor,
        sample_indices: Tensor,
        input_logprob_indices: Tensor,
        token_to_seq_idx: list[int],
        lm_head: _Head,
        get_logits_fn: Any,
        logits_metadata: Any,
        skip_chunking_for_dp_attn: bool = False,
    ) -> tuple[LogprobResult, Tensor]:
        """(log-probs of the input tokens and of others that were asked for, logits to sample from)."""
        logits = lm_head.head(pruned_states)
        logprobs = log_softmax(logits[input_logprob_indices])
        tokens = logits_metadata.extend_input_logprob_token_ids_gpu[: len(logprobs)].long()
        result = LogprobResult(token_logprobs=logprobs.gather(1, tokens[:, None])[:, 0])
        lengths = logits_metadata.extend_logprob_pruned_lens_cpu
        if logits_metadata.extend_return_top_logprob:
            result.top_logprobs_val, result.top_logprobs_idx = get_top_logprobs_raw(
                logprobs, logits_metadata.top_logprobs_nums, LogprobStage.PREFILL, lengths
            )
        if logits_metadata.extend_token_ids_logprob:
            result.token_ids_logprobs_val, result.token_ids_logprobs_idx = get_token_ids_logprobs_raw(
                logprobs, logits_metadata.token_ids_logprobs, LogprobStage.PREFILL, lengths
            )
        return result, logits[sample_indices]
