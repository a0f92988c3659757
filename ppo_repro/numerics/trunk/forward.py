"""The one place that chooses which code runs the forward pass of a trunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.numerics import backend
from ppo_repro.numerics.layers.attention import cached_reach, reach
from ppo_repro.numerics.layers.families import decoder_layers, stock_masks
from ppo_repro.numerics.layers.kv_cache import GridCache, SlotCache
from ppo_repro.numerics.layers.lowering import is_exact
from ppo_repro.numerics.layers.routes import give_routes, routers
from ppo_repro.numerics.trunk import decoding, training
from ppo_repro.numerics.trunk.decoding import Decoder
from ppo_repro.numerics.trunk.weights import unpack

Cache = GridCache | SlotCache


class TrunkForward:
    """The forward pass of a trunk, by the first line of this table that fits:

    | numerics | model                       | backend    | tokens                 | path                             |
    |----------|-----------------------------|------------|------------------------|----------------------------------|
    | native   | any                         | any        | any                    | modules, `_through_modules`      |
    | exact    | any                         | eager      | any                    | modules                          |
    | exact    | Gemma, GPT-2, GPT-NeoX,     | any        | any                    | modules                          |
    |          | mixtures of experts,        |            |                        |                                  |
    |          | not SiLU, or with hooks     |            |                        |                                  |
    | exact    | with layers that round      | any        | any                    | modules                          |
    | exact    | few weights in a layer      | float64    | of a batch             | `training`, by `programs`        |
    | exact    | any                         | any        | of a batch             | `training`, by `layer_forward`   |
    | exact    | few weights in a layer, or  | float64    | one a row, over cache  | `decoding`, by `decoder_trunk`   |
    |          | few rows and one thread     |            |                        |                                  |
    | exact    | any                         | any        | over a cache           | `decoding`, by `layer_forward`   |

    In exact numerics every path gives the same bits. The numerics, the model's structure, its hooks and the backend
    are looked at when an object is made; weights that change in place later are seen.
    """

    def __init__(self, trunk: PreTrainedModel) -> None:
        self._trunk, self._has_routers = trunk, bool(routers(trunk))
        has_kernels = is_exact(trunk) and backend.has_kernels(next(trunk.parameters()))
        self._weights = unpack(trunk) if has_kernels else None
        self._decoder = None if self._weights is None else Decoder(self._weights)

    def over_batch(
        self, input_ids: Tensor, position_ids: Tensor, first_key: Tensor, rows: Tensor, routes: Tensor | None = None
    ) -> Tensor:
        """Final hidden states [n, H] float32 at the flat positions `rows` [n] int64, all of them different.

        input_ids, position_ids, first_key [R, L] int64 as in `TokenBatch`. Differentiable. `routes` [R L, M k] are the
        experts of a mixture in exact numerics, also in a backward pass that computes layers again; None: its routers
        choose.
        """
        if self._has_routers or routes is not None:
            give_routes(self._trunk, routes)
        if self._weights is not None:
            recompute = any(layer.gradient_checkpointing for layer in decoder_layers(self._trunk))
            return training.hidden_states(self._weights, input_ids, position_ids, first_key, rows, recompute)
        hidden = _through_modules(self._trunk, input_ids, position_ids, first_key)
        return hidden.reshape(-1, hidden.shape[-1])[rows]

    @torch.no_grad()
    def over_cache(self, ids: Tensor, cache: Cache, rows: Tensor | None = None) -> Tensor:
        """Final hidden states [n, H] float32 of the tokens `ids` [R, L] int64 in the target of `cache`.

        `rows` [n] int64 are flat positions in [R, L]; None takes all. A GridCache for exact numerics, else a SlotCache.
        """
        if self._decoder is not None and isinstance(cache, GridCache):
            return decoding.hidden_states(self._decoder, ids, cache, rows)
        if self._has_routers:
            give_routes(self._trunk, None)
        hidden = _through_modules(self._trunk, ids, cache.target.positions, cache)
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat if rows is None else flat[rows]


def _through_modules(trunk: PreTrainedModel, ids: Tensor, positions: Tensor, visible: Tensor | Cache) -> Tensor:
    """Hidden states [R, L, H] by transformers' own forward; `visible` is the first key of each query, or the cache."""
    options: dict[str, Any]
    if is_exact(trunk):
        # without a mask GPT-2 warns about padding; visibility is first_key's or the cache's alone
        options = {"attention_mask": torch.ones_like(ids)}
        options["first_key" if isinstance(visible, Tensor) else "kv_cache"] = visible
    elif isinstance(visible, Tensor):
        options = {"attention_mask": stock_masks(trunk.config, lambda window: reach(visible, window))}
    else:
        masks = stock_masks(trunk.config, lambda window: cached_reach(positions, window))
        options = {"attention_mask": masks, "past_key_values": visible}
    with _recording_gradients(trunk):
        return trunk(input_ids=ids, position_ids=positions, use_cache=False, **options).last_hidden_state


@contextmanager
def _recording_gradients(trunk: nn.Module) -> Iterator[None]:
    """Layers are in training mode inside, where gradients are recorded: only then does transformers checkpoint them.

    Not over a cache: transformers would take it away.
    """
    layers = decoder_layers(trunk) if torch.is_grad_enabled() else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
