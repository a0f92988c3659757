"""Logits of hidden states, and log-probs of a prompt's own tokens where a request asks for them."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.logprob_processor import (
    LogprobResult,
    LogprobStage,
    get_token_ids_logprobs_raw,
    get_top_logprobs_raw,
)
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.numerics.network import logits
from ppo_repro.numerics.token_statistics import log_softmax


class Logits(LogitsProcessor):
    """SGLang chooses the rows; the product is that of the policy's head. It has no other way to logits."""

    def __init__(self, config: PretrainedConfig, policy: PreTrainedModel) -> None:
        super().__init__(config)
        if not hasattr(self, "input_logprob_processor"):
            raise RuntimeError("deterministic numerics in SGLang: this release scores prompts elsewhere")
        self._policy = (policy,)  # in a tuple, so that it is no module of this one
        self.input_logprob_processor = _InputLogprobs(policy)

    def _get_logits(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return logits(self._policy[0], hidden_states.contiguous())


class _InputLogprobs:
    """Log-probs of the tokens of prompts, always at temperature 1, as SGLang has them."""

    def __init__(self, policy: PreTrainedModel) -> None:
        self.policy = policy

    def forward(
        self,
        pruned_states: Tensor,
        sample_indices: Tensor,
        input_logprob_indices: Tensor,
        token_to_seq_idx: list[int],
        lm_head: None,
        get_logits_fn: Any,
        logits_metadata: Any,
        skip_chunking_for_dp_attn: bool = False,
    ) -> tuple[LogprobResult, Tensor]:
        """(log-probs of the input tokens and of others that were asked for, logits to sample from)."""
        found = logits(self.policy, pruned_states.contiguous())
        logprobs = log_softmax(found[input_logprob_indices])
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
        return result, found[sample_indices]
