"""The model class of the exact numerics: an unmodified transformers model, lowered as the trainer lowers it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ppo_repro.errors import UserError
from ppo_repro.numerics import library
from ppo_repro.numerics.families import CAUSAL_MODELS, check_visibility, head_of, mixture_layers, seen_routes, trunk_of
from ppo_repro.numerics.layers.lowering import lower
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.numerics.trunk.forward import TrunkForward
from ppo_repro.sglang_plugin.logits import ExactLogits
from ppo_repro.sglang_plugin.pool import PoolCache
from ppo_repro.sglang_plugin.settings import KEY, read_settings

# on CPUs SGLang pads these widths to multiples of 32 for its own kernels, and keeps the model's as `original_..`
PADDED = ("intermediate_size", "moe_intermediate_size")
DIGEST = "ppo_repro.digest"  # for this name /get_weights_by_name returns the digest of all weights


class PpoReproExactForCausalLM(nn.Module):
    """A model as SGLang expects it, around the same layers that training runs.

    The attention backend sets `cache` once SGLang has made its pools.
    """

    def __init__(self, config: PretrainedConfig, quant_config: object | None = None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise UserError("exact numerics in SGLang: --quantization is not supported; leave it out")
        self.config, self.settings = config, read_settings(config)
        library.use_threads(self.settings.threads)
        self.policy = _lowered(config, self.settings.max_context)
        self.logits_processor = ExactLogits(config)
        self.cache: PoolCache | None = None
        self._trunk = TrunkForward(trunk_of(self.policy))
        self._missing = {name for name, _ in self.policy.named_parameters()}

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch) -> Any:
        """Logits after the last token of each request as SGLang's LogitsProcessorOutput; its pool gets keys and values.

        input_ids, positions int64 [N]: the new tokens of all requests, one request after another.
        """
        if self.cache is None or self._missing:
            raise RuntimeError("exact numerics in SGLang: the pools were not made, or weights are missing")
        starts, lengths = _spans(forward_batch)
        self.cache.begin(forward_batch.req_pool_indices.long(), starts, lengths, forward_batch.out_cache_loc.long())
        target = self.cache.target
        if not torch.equal(target.positions[target.valid], positions.long()):
            raise RuntimeError("exact numerics in SGLang: positions are not those of the requests' tokens")
        hidden = self._with_routes(self.cache, input_ids.long())
        return self.logits_processor(input_ids, hidden, head_of(self.policy), forward_batch)

    def _with_routes(self, cache: PoolCache, new: Tensor) -> Tensor:
        """`_hidden`; where --enable-return-routed-experts made a capturer, it gets the experts of each new token.

        It keeps them beside keys and values, so that a cached prefix has those of the pass that computed it.
        """
        capturer = get_global_experts_capturer()
        if capturer is None:
            return self._hidden(cache, new)
        with seen_routes(self.policy) as seen:
            hidden = self._hidden(cache, new)
        routes = seen.take()[cache.target.valid.reshape(-1)]
        layers = mixture_layers(self.policy)
        for layer, experts in zip(layers, routes.chunk(len(layers), dim=1), strict=True):
            capturer.capture(layer, experts)
        return hidden

    def _hidden(self, cache: PoolCache, new: Tensor) -> Tensor:
        """Hidden states [N, H] of the new tokens [N] in the target of the cache."""
        valid = cache.target.valid
        ids = torch.zeros_like(cache.target.positions)
        ids[valid] = new
        rows = None if len(new) == valid.numel() else valid.reshape(-1).nonzero()[:, 0]
        return self._trunk.over_cache(ids, cache, rows)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy float32 weights under transformers' names; ValueError for an unknown name, a wrong shape or type."""
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
        """The first `truncate_size` rows of a weight; for DIGEST the bytes of all weights' hexadecimal digest."""
        if name == DIGEST:
            return list(weights_digest(self.policy.named_parameters()).encode())
        return list(self.policy.get_parameter(name)[:truncate_size].tolist())

    def get_input_embeddings(self) -> nn.Module:
        """SGLang asks for it."""
        return self.policy.get_input_embeddings()


def _lowered(config: PretrainedConfig, max_context: int) -> PreTrainedModel:
    """The transformers model of a config in exact numerics; its weights come later."""
    check_visibility(config, max_context)
    fields = config.to_dict()
    fields.pop(KEY)
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
    return lower(model, max_context)


def _spans(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """Position of the first new token of each request, and how many are new: int64 [R] each."""
    if batch.forward_mode.is_decode():
        return batch.seq_lens.long() - 1, torch.ones_like(batch.seq_lens, dtype=torch.int64)
    if not batch.forward_mode.is_extend():
        raise RuntimeError(f"exact numerics in SGLang: a forward pass of mode {batch.forward_mode} is not known")
    assert batch.extend_prefix_lens is not None
    assert batch.extend_seq_lens is not None
    return batch.extend_prefix_lens.long(), batch.extend_seq_lens.long()
