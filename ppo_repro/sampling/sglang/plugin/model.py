"""Define SGLang's model class for deterministic numerics: a transformers model, which the trainer's kernels compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_server_args
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.numerics import library
from ppo_repro.numerics.families import CAUSAL_MODELS, mixture_layers, positions_of
from ppo_repro.numerics.lowering import Lowered, lower
from ppo_repro.numerics.network import Network, network_of
from ppo_repro.numerics.sequences import index, ragged
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.sampling.sglang.plugin.logits import Logits
from ppo_repro.sampling.sglang.plugin.names import ARCHITECTURES, DIGEST
from ppo_repro.sampling.sglang.plugin.pool import PoolCache

# on CPUs SGLang pads these widths to multiples of 32 for its own kernels, and keeps the model's as `original_..`
PADDED = ("intermediate_size", "moe_intermediate_size")


class PpoReproForCausalLM(nn.Module):
    """Model with SGLang's interface around the trainer's model.

    The attention backend sets `cache` once SGLang has made its pools.
    """

    def __init__(self, config: PretrainedConfig, quant_config: object | None = None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise UserError("deterministic numerics in SGLang: --quantization is not supported; leave it out")
        library.use_threads(torch.get_num_threads())  # OMP_NUM_THREADS
        self.config = config
        self.policy = _lowered(config)
        self.network = cast(Network, network_of(self.policy))
        self.logits_processor = Logits(config, self.policy)
        self.cache: PoolCache | None = None
        self._missing = {name for name, _ in self.policy.named_parameters()}

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch) -> Any:
        """Return the logits after the last token of each request in a LogitsProcessorOutput, and fill SGLang's pool.

        `input_ids` and `positions`, int64 [N], are the new tokens of all requests, request after request.
        """
        if self.cache is None or self._missing:
            raise RuntimeError("deterministic numerics in SGLang: the pools were not made, or weights are missing")
        seats, (starts, lengths) = forward_batch.req_pool_indices.long(), _spans(forward_batch)
        batch = ragged(input_ids.split(lengths.tolist()), past=starts.tolist())
        if not torch.equal(index(batch.rows.position), positions.long()):
            raise RuntimeError("deterministic numerics in SGLang: positions are not those of the requests' tokens")
        self.network.prepare()
        self.cache.take_pasts(seats, starts)
        capturer = get_global_experts_capturer()  # there with --enable-return-routed-experts
        hidden, routes = self.network.over_cache(batch, self.cache.cache, seats.tolist(), seen=capturer is not None)
        self.cache.give(seats[index(batch.rows.sequence)], positions.long(), forward_batch.out_cache_loc.long())
        if routes is not None:
            # SGLang keeps routes beside keys and values: a cached prefix has the routes of the pass that computed it
            layers = mixture_layers(self.policy)
            for layer, experts in zip(layers, torch.from_numpy(routes).chunk(len(layers), dim=1), strict=True):
                capturer.capture(layer, experts)
        return self.logits_processor(input_ids, hidden, None, forward_batch)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy float32 weights, which have transformers' names, into the model.

        Raises ValueError for an unknown name, a wrong shape or type.
        """
        known = dict(self.policy.named_parameters(remove_duplicate=False))
        for name, weight in weights:
            if name not in known:
                raise ValueError(f"weight {name}: the model has no parameter of that name")
            if weight.shape != known[name].shape or weight.dtype != torch.float32:
                raise ValueError(
                    f"weight {name}: {weight.dtype} {tuple(weight.shape)}; "
                    f"must be torch.float32 {tuple(known[name].shape)}"
                )
            known[name].copy_(weight)
            self._missing.discard(name)
        if self._missing:
            raise ValueError(f"weight {min(self._missing)}: missing")

    def get_weights_by_name(self, name: str, truncate_size: int = 100, tp_size: int = 1) -> list[Any]:
        """Return the first `truncate_size` rows of a weight, or, for the name DIGEST, the digest of all weights."""
        if name == DIGEST:
            return list(weights_digest(self.policy.named_parameters()).encode())
        return list(self.policy.get_parameter(name)[:truncate_size].tolist())

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings, which SGLang reads."""
        return self.policy.get_input_embeddings()


def _lowered(config: PretrainedConfig) -> PreTrainedModel:
    """Return the transformers model of a configuration in deterministic numerics, without its weights."""
    fields = config.to_dict()
    for name in PADDED:
        if f"original_{name}" in fields:
            fields[name] = fields.pop(f"original_{name}")
    stock = type(config).from_dict(fields)
    model = AutoModelForCausalLM.from_config(stock, dtype=torch.float32, trust_remote_code=False).eval()
    if type(model) not in CAUSAL_MODELS:
        known = ", ".join(c.__name__ for c in CAUSAL_MODELS)
        raise UserError(f"--model-path: the model is a {type(model).__name__}; must be one of {known}")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    context = get_server_args().context_length
    if context is None:
        raise UserError("--context-length: deterministic numerics in SGLang need it; each request has so much memory")
    [precision] = [known for known, name in ARCHITECTURES.items() if [name] == config.architectures]
    return lower(model, Lowered(min(context, positions_of(stock)), precision=precision))


def _spans(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Return the position of the first new token of each request, and the number of new tokens: int64 [R] each."""
    if batch.forward_mode.is_decode():
        return batch.seq_lens.long() - 1, torch.ones_like(batch.seq_lens, dtype=torch.int64)
    if not batch.forward_mode.is_extend():
        raise RuntimeError(f"deterministic numerics in SGLang: a forward pass of mode {batch.forward_mode} is unknown")
    assert batch.extend_prefix_lens is not None
    assert batch.extend_seq_lens is not None
    return batch.extend_prefix_lens.long(), batch.extend_seq_lens.long()
