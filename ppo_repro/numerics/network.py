"""Run a trunk by the C kernels: forward, backward, and over a cache; then compute the logits of its head.

`network_of` returns the `Network` of a deterministic model. `packed_model.py` has the structs of a model,
`kernel_batch.py` the struct of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from ppo_repro.base.errors import NumericsError
from ppo_repro.numerics import library
from ppo_repro.numerics.attached import attached_in, attached_to
from ppo_repro.numerics.description import NORMS
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.families import head_of, trunk_of
from ppo_repro.numerics.interface import Ints, constants, ints, pointer
from ppo_repro.numerics.kernel_batch import Cache, KernelBatch, cache_of_batch, check_batch
from ppo_repro.numerics.linear import linear, product
from ppo_repro.numerics.logit_scale import logit_scale_of
from ppo_repro.numerics.lowering import Lowered, lowered_of, shapes_of
from ppo_repro.numerics.matrices import Packing, packed
from ppo_repro.numerics.native import NativeNetwork
from ppo_repro.numerics.packed_model import PackedModel
from ppo_repro.numerics.rounding import round_rows
from ppo_repro.numerics.sequences import Ragged, Rows, edge_of, index, sums_of

KEEP_NOTHING, KEEP_INPUTS, KEEP_ALL = constants.KEEP_NOTHING, constants.KEEP_INPUTS, constants.KEEP_ALL


CacheT = TypeVar("CacheT")


class Passes(Protocol[CacheT]):
    """Passes of one trunk: `Network` by the kernels, `NativeNetwork` by stock torch.

    Weights may change in place between passes. Each pass uses the current weights.
    """

    def prepare(self) -> None:
        """Pack the weights that have changed; call this before `over_cache`."""
        ...

    def make_cache(self, seats: int, positions: int) -> CacheT:
        """Return a cache of `seats` seats for `positions` tokens each."""
        ...

    def copy_prefix(self, cache: CacheT, source: int, target: int, positions: int) -> None:
        """Copy the keys and values of a seat's first positions to another seat."""
        ...

    def over_cache(
        self, batch: Ragged, cache: CacheT, seats: Sequence[int], seen: bool = False
    ) -> tuple[Tensor, Ints | None]:
        """Compute tokens whose past is in a cache, and write their keys and values there. Call `prepare` first.

        Args:
            batch: n new tokens of S sequences, with their positions.
            seats: the seat of each sequence in the cache [S].

        Returns:
            Hidden states float32 [n, H]; routes int32 [n, mixtures x chosen], None unless `seen`.
        """
        ...

    def over_batch(self, batch: Ragged, wanted: Ints, seen: bool = False) -> tuple[Tensor, Ints | None]:
        """Compute whole sequences, differentiably.

        Args:
            batch: n tokens of S sequences.
            wanted: [r], rising and without repetition.

        Returns:
            Hidden states [r, H] at `wanted`, float32; routes of all n rows int32 [n, mixtures x chosen], None unless
            `seen`.
        """
        ...


class Network:
    """Passes of one trunk by the kernels."""

    def __init__(self, trunk: PreTrainedModel, lowered: Lowered) -> None:
        """Make the structs of the trunk. Raises UserError, which names a setting that the kernels cannot compute."""
        self.parameters = dict(trunk.named_parameters())
        self.shapes = shapes_of(trunk)
        self.lowered = lowered
        self.model = PackedModel(trunk, lowered)
        self.device = self.model.device
        self.groups = self.model.groups(self.parameters.values())
        names = {id(module): name for name, module in trunk.named_modules()}
        layers, last_norm = self.model.description.layers, self.model.description.last_norm
        norms = [*(layer.norms.get(name) for layer in layers for name in NORMS), last_norm]
        self._norm_names = [names.get(id(norm)) for norm in norms]  # by the number that `model_forward` returns
        self._spare: Tensor | None = None  # memory of activations that no pass needs now

    def prepare(self) -> None:
        self.model.prepare()

    def forget(self) -> None:
        """Free the packed copies of the weights until the next pass."""
        self.model.forget()

    def make_cache(self, seats: int, positions: int) -> Cache:
        return Cache(self.model.struct, seats, positions, self.device)

    def copy_prefix(self, cache: Cache, source: int, target: int, positions: int) -> None:
        keys, values = pointer(cache.keys, self.device), pointer(cache.values, self.device)
        begin, to = source * cache.each, target * cache.each
        kernels_of(self.device).copy_prefix(self.model.struct, keys, values, cache.capacity, begin, to, positions)

    def over_cache(
        self, batch: Ragged, cache: Cache, seats: Sequence[int], seen: bool = False
    ) -> tuple[Tensor, Ints | None]:
        check_batch(self.model.struct, batch, self.lowered.max_context)
        base = ints(np.asarray(seats) * cache.each)
        kernel_batch = KernelBatch(batch, cache, base=base, seen=self._routes(batch, seen))
        return self.forward(kernel_batch, None, KEEP_NOTHING), kernel_batch.seen

    def over_batch(self, batch: Ragged, wanted: Ints, seen: bool = False) -> tuple[Tensor, Ints | None]:
        """Compute whole sequences, differentiably.

        The backward pass adds to `batch.rows.sums`. It raises PromiseBroken if the sequences are not in the order of
        their slots.

        Raises:
            ValueError: `wanted` does not rise (a repeated row would lose gradients), or nothing receives the gradients
                of the parameters.
        """
        check_batch(self.model.struct, batch, self.lowered.max_context)
        if (np.diff(np.asarray(wanted)) <= 0).any():
            raise ValueError("rows must rise, each once")
        self.prepare()
        cache, base = cache_of_batch(self.model.struct, batch, self.device)
        kernel_batch = KernelBatch(batch, cache, base=base, seen=self._routes(batch, seen))
        trained = [p for p in self.parameters.values() if p.requires_grad]
        if trained and torch.is_grad_enabled():
            sums_of(batch.rows, "a trunk")
            return _Hidden.apply(edge_of(batch.rows, trained), self, kernel_batch, wanted), kernel_batch.seen
        hidden = self.forward(kernel_batch, None, KEEP_NOTHING)
        return hidden[index(wanted, self.device)], kernel_batch.seen

    def _routes(self, batch: Ragged, wanted: bool) -> Ints | None:
        """Return memory for the routes of a pass; None if not `wanted`."""
        width = self.model.struct.mixtures * self.model.struct.chosen
        return np.empty((len(batch.ids), width), np.int32) if wanted else None

    def forward(self, kernel_batch: KernelBatch, activations: Tensor | None, keep: int) -> Tensor:
        """Return the hidden states [n, H]. NumericsError names a norm whose input is not finite.

        Args:
            activations: `activation_memory` for the same tokens and `keep`; None with KEEP_NOTHING.
            keep: what `activations` receive, the C enum `Keep`.
        """
        hidden = torch.empty(len(kernel_batch.batch.ids), self.model.struct.hidden, device=self.device)
        memory = pointer(activations, self.device), keep, pointer(hidden, self.device)
        not_finite = kernels_of(self.device).model_forward(self.model.struct, kernel_batch.struct, *memory)
        if not_finite:
            name = self._norm_names[not_finite - 1]
            raise NumericsError(f"the input of {name} is not finite; lower the learning rate or check the weights")
        return hidden

    def activation_memory(self, tokens: int, keep: int) -> Tensor:
        """Return memory for the activations that a pass keeps; reuse the last pass's memory if large enough."""
        floats = self.model.kept_floats(tokens, keep)
        spare, self._spare = self._spare, None  # reused, because the system is slow to give new memory
        return torch.empty(floats, device=self.device) if spare is None or spare.numel() < floats else spare

    def reuse(self, activations: Tensor | None) -> None:
        """Let the next pass reuse the memory of activations; None frees the memory."""
        self._spare = activations


class _Hidden(Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, network: Network, kernel_batch: KernelBatch, wanted: Ints) -> Tensor:
        ctx.keep = KEEP_INPUTS if network.lowered.recompute else KEEP_ALL
        ctx.network, ctx.kernel_batch, ctx.wanted = network, kernel_batch, wanted
        ctx.activations = network.activation_memory(len(kernel_batch.batch.ids), ctx.keep)
        return network.forward(kernel_batch, ctx.activations, ctx.keep)[index(wanted, network.device)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        network, batch, device = ctx.network, ctx.kernel_batch.batch, ctx.network.device
        if ctx.activations is None:
            raise RuntimeError("a second backward through one pass: its activations were freed")
        activations, ctx.activations = ctx.activations, None
        d_hidden = torch.zeros(len(batch.ids), network.model.struct.hidden, device=device)
        d_hidden[index(ctx.wanted, device)] = grad
        slot_sums = sums_of(batch.rows, "a trunk").sums_for("trunk", *network.groups)
        network.model.prepare()
        network.model.set_gradient_offsets(slot_sums)
        with slot_sums.adding(batch.rows.slots) as c_sums:
            memory = pointer(activations, device), ctx.keep, pointer(d_hidden, device)
            kernels_of(device).model_backward(network.model.struct, ctx.kernel_batch.struct, *memory, c_sums)
        network.reuse(activations)
        return None, None, None, None


def network_of(model: PreTrainedModel) -> Passes[Any]:
    """Return the network that computes a model's trunk: by the kernels if it was lowered, else by stock torch."""
    trunk, lowered = trunk_of(model), lowered_of(model)
    if lowered is None:
        return NativeNetwork(trunk)
    attached = attached_to(trunk)
    network: Network | None = attached.network
    known = {} if network is None or network.lowered != lowered else network.parameters
    same = all(p is known.get(name) for name, p in trunk.named_parameters())
    if network is None or not same or network.shapes != shapes_of(trunk) or network.device != trunk.device:
        network = attached.network = Network(trunk, lowered)
    return network


def forget_packed(model: nn.Module) -> None:
    """Free the packed copies of a module's weights. Its next pass packs the weights again."""
    for attached in attached_in(model):
        for owner in (attached.network, attached.matrix):
            if owner is not None:
                owner.forget()
    library.load().trim_heap()


def free_memory(model: nn.Module) -> None:
    """Free the scratch memory of passes with gradients. The next pass with gradients allocates it again."""
    kernels_of(next(model.parameters(), torch.empty(0)).device).free_scratch()
    for attached in attached_in(model):
        if attached.network is not None:
            attached.network.reuse(None)


def logits(model: PreTrainedModel, hidden: Tensor, rows: Rows | None = None) -> Tensor:
    """Return the logits [n, V] of a causal model from the trunk's hidden states [n, H], by the head and what follows.

    In native numerics the logits are on the CPU, else on the model's device. If the head is trained, `rows` has the
    sequence of each row, and the sums that receive gradients.
    """
    head, lowered, scale = head_of(model), lowered_of(model), logit_scale_of(model.config)
    if lowered is None:
        return scale(cast(Tensor, head(hidden)).cpu(), deterministic=False)
    rounding = lowered.rounding
    if rounding.other_weights == "float32":
        out = linear(hidden, head, rows, lowered.precision)
    else:
        out = product(hidden, packed(head, Packing(rounding.other_weights, rounding.other_weights, lowered.precision)))
    out = scale(out, deterministic=True)
    return out if rounding.logits == "float32" else round_rows(out, rounding.logits)
