"""The built-in engine on a copy of the policy that computes as torch does, in a dtype of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ppo_repro.rollout.engine import Completion, Dialogue, Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its parameters in a dtype, in place. Buffers stay: rotary frequencies are float32 everywhere."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


class StockEngine(TorchEngine):
    """Samples by torch's own forward pass in the dtype of `copy`, an unmodified model. No bit of it is promised.

    The copy takes the weights of `live`, rounded to its dtype, before each call. Log-probs are those of its logits.
    """

    def __init__(
        self,
        copy: PreTrainedModel,
        live: PreTrainedModel,
        stop_ids: frozenset[int],
        mode: str,
        max_context: int,
        slots: int,
        prefill_chunk: int,
        prefix_cache: bool,
    ) -> None:
        super().__init__(copy, stop_ids, mode, max_context, slots, prefill_chunk, prefix_cache)
        self._live = live

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        for name, parameter in self.policy.named_parameters():
            parameter.copy_(self._live.get_parameter(name))
        return super().generate(requests, sampling, dialogue)
