"""Define the attention backend, which connects the model with SGLang's pools and refuses wrong settings.

The kernels read a cache that `pool` fills from SGLang's pools, so the backend computes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from ppo_repro.base.errors import UserError
from ppo_repro.sampling.sglang.plugin.model import PpoReproForCausalLM
from ppo_repro.sampling.sglang.plugin.names import ATTENTION_BACKEND
from ppo_repro.sampling.sglang.plugin.pool import PoolCache
from ppo_repro.sampling.sglang.plugin.sampler import DeterministicSampler


class NoAttention(AttentionBackend):
    """Attention backend that computes nothing, because `PpoReproForCausalLM.forward` computes the attention."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: the model reads the batch itself."""

    def support_triton(self) -> bool:
        """Return False, because no Triton kernel may write to the pools."""
        return False


def make_backend(runner: Any) -> NoAttention:
    """Return the backend for a model runner whose model is ready.

    Raises UserError for the first wrong setting of the server.
    """
    from sglang.srt.mem_cache import allocation
    from sglang.srt.model_executor import forward_batch_info

    arguments, pool = runner.server_args, runner.token_to_kv_pool
    required: list[tuple[str, object, object]] = [
        ("the model class", type(runner.model), PpoReproForCausalLM),
        ("the sampler", type(runner.sampler).__name__, DeterministicSampler.__name__),
        ("--enable-deterministic-inference", arguments.enable_deterministic_inference, True),
        ("--device", runner.device, "cpu"),
        ("--tp-size", arguments.tp_size, 1),
        ("--pp-size", arguments.pp_size, 1),
        ("--dp-size", arguments.dp_size, 1),
        ("--page-size", runner.page_size, 1),
        ("--speculative-algorithm", arguments.speculative_algorithm, None),
        ("--dtype", runner.dtype, torch.float32),
        ("the dtype of keys", pool.get_key_buffer(0).dtype, torch.float32),
        ("the dtype of values", pool.get_value_buffer(0).dtype, torch.float32),
        # SGLang must call the wrapped functions
        ("Triton in allocation", allocation.support_triton(ATTENTION_BACKEND), False),
        ("Triton in positions", forward_batch_info.support_triton(ATTENTION_BACKEND), False),
        ("the batch-invariant mode", hasattr(type(runner).maybe_enable_batch_invariant_mode, "__wrapped__"), True),
    ]
    for field, actual, wanted in required:
        if actual != wanted:
            raise UserError(f"deterministic numerics in SGLang: {field} is {actual}; must be {wanted}")
    model, table = runner.model, runner.req_to_token_pool.req_to_token
    model.cache = PoolCache(model.network, table, pool, runner.model_config.context_len)
    return NoAttention()
