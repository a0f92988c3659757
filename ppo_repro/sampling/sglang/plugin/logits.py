"""Compute logits of hidden states, and log-probs of a request's input tokens."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.logprob_processor import LogprobResult
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.numerics.network import logits
from ppo_repro.numerics.token_statistics import token_statistics


class Logits(LogitsProcessor):
    """Logits processor of SGLang, which chooses the rows. The policy's head computes all logits of the server."""

    def __init__(self, config: PretrainedConfig, policy: PreTrainedModel) -> None:
        super().__init__(config)
        self._policy = (policy,)  # in a tuple: the policy must not become a submodule
        self.input_logprob_processor = _InputLogprobs(policy)

    def _get_logits(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return logits(self._policy[0], hidden_states.contiguous())


class _InputLogprobs:
    """Processor for the log-probs of input tokens at temperature 1, also in batches that sample."""

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
        """Return the input tokens' log-probs (nats) and the logits to sample from; SGLang defines the parameters."""
        if logits_metadata.extend_return_top_logprob or logits_metadata.extend_token_ids_logprob:
            raise RuntimeError("deterministic numerics in SGLang: log-probs of other tokens are not supported")
        rows = logits(self.policy, pruned_states.contiguous())
        read = rows[input_logprob_indices]
        tokens = logits_metadata.extend_input_logprob_token_ids_gpu[: len(read)].long()
        logprobs, _ = token_statistics(read, tokens, 1.0, None, "deterministic")
        return LogprobResult(token_logprobs=logprobs), rows[sample_indices]
