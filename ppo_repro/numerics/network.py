"""A transformers trunk as data for the C kernels: its forward and backward pass, and decoding over a cache.

The model stays as transformers made it, module by module; only its matrices that belong together (queries, keys and
values; gates and ups) lie one after the other in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.base.errors import NumericsError, UserError
from ppo_repro.base.output import shown
from ppo_repro.numerics import library
from ppo_repro.numerics.attached import ATTACHED
from ppo_repro.numerics.description import LayerParts, check_config, describe
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.families import NAMES, TRUNKS, head_dim, head_of, trunk_of
from ppo_repro.numerics.gradient_sums import SlotSums
from ppo_repro.numerics.interface import CPU, Ints, Struct, constants, ffi, ints, pointer
from ppo_repro.numerics.linear import PackedMatrix, linear, matrix_of, packed, product, state_of
from ppo_repro.numerics.native import NativeNetwork
from ppo_repro.numerics.precision import EXACT, FORMATS, Precision, round_rows
from ppo_repro.numerics.rotary import rotating, tables
from ppo_repro.numerics.rows import Ragged, Rows, index

KEEP_NOTHING, KEEP_INPUTS, KEEP_ALL = constants.KEEP_NOTHING, constants.KEEP_INPUTS, constants.KEEP_ALL


@dataclass(frozen=True)
class Lowered:
    """What a trunk in deterministic numerics has beside its modules."""

    max_context: int
    precision: Precision = EXACT
    recompute: bool = False  # keep only inputs of layers; the backward pass computes the rest again


def _round16(n: int) -> int:
    return -(-n // 16) * 16


class Cache:
    """Keys and values of some slots of `positions` tokens each."""

    def __init__(self, model: Struct, slots: int, positions: int, device: torch.device) -> None:
        """Take memory for keys and values, not cleared.

        Args:
            model: layers, heads and their size.
            slots: sequences.
            positions: of a slot, rounded up to a multiple of 16.
            device: of the kernels.
        """
        self.each = _round16(positions)
        self.capacity = slots * self.each
        floats = model.layers * model.kv_heads * self.capacity * model.head_dim
        self.keys, self.values = (torch.empty(floats, device=device) for _ in range(2))


class _Layer:
    """The packed matrices of one layer by the fields of its struct."""

    def __init__(self, parts: LayerParts, mixture: int, precision: Precision) -> None:
        self.parts, self.matrices, self.experts = parts, {}, {}
        for name, layers in parts.matrices.items():
            form = precision.other_weights if name == "router" else precision.weights
            self.matrices[name] = matrix_of(layers, form, precision.other_weights)
        for name, stacked in parts.experts.items():
            self.experts[name] = [PackedMatrix([w], form=precision.weights) for w in stacked.detach()]
        self.arrays = {name: ffi.new("Matrix[]", [m.struct[0] for m in of]) for name, of in self.experts.items()}
        matrices = {name: matrix.struct[0] for name, matrix in self.matrices.items()}
        self.numbers = {"window": parts.window, "mixture": mixture, "scale": parts.scale, **matrices, **self.arrays}


@dataclass(frozen=True)
class _Call:
    """A batch as the kernels take it."""

    struct: Struct
    batch: Ragged
    alive: tuple[Any, ...]  # what the struct points to, besides


# a batch, the inputs of its layers and the output of the last one [layers + 1, n, H], and the hidden states [n, H]
Watch = Callable[[Ragged, Sequence[Tensor], Tensor], None]


class Network:
    """The kernels' view of one trunk. Weights may change in place between passes; each pass sees them as they are."""

    watch: Watch | None = None  # is shown each pass without gradients

    def __init__(self, trunk: PreTrainedModel, lowered: Lowered) -> None:
        self.parameters = dict(trunk.named_parameters())
        self.device = CPU if trunk.device.type == "meta" else trunk.device  # `plan` has shapes alone
        self.description = describe(trunk)
        self.lowered = lowered
        mixtures = accumulate((bool(parts.experts) for parts in self.description.layers), initial=0)
        self.layers = [_Layer(p, m, lowered.precision) for p, m in zip(self.description.layers, mixtures, strict=False)]
        dense = [matrix for layer in self.layers for matrix in layer.matrices.values()]
        self.matrices = dense + [m for layer in self.layers for of in layer.experts.values() for m in of]
        self._layer_structs = ffi.new("Layer[]", [layer.numbers for layer in self.layers])
        self._rounded: dict[int, tuple[tuple[int, ...], Tensor]] = {}  # other weights by id: their state, and rounded
        rotary = self.description.positions is None
        angles = tables(trunk.config, lowered.max_context) if rotary else (torch.zeros(1), torch.zeros(1))
        self._tables = [table.to(self.device) for table in angles]
        precision = lowered.precision
        self.shapes = shapes_of(trunk)
        model = dict(
            **self.description.numbers,
            rotary=rotating(trunk.config) if rotary else 0,
            round_activations=FORMATS.index(precision.activations),
            round_inputs=FORMATS.index(precision.linear_inputs),
            round_cache=FORMATS.index(precision.kv_cache),
            embedding_grad=-1,
            positions_grad=-1,
            cosine=self._pointer(self._tables[0]),
            sine=self._pointer(self._tables[1]),
            layer=self._layer_structs,
        )
        self.struct = ffi.new("Model *", model)
        _refuse_fault(self.struct, trunk.config)
        d, names = self.description, {id(module): name for name, module in trunk.named_modules()}
        norms = [*(layer.norms[name] for layer in d.layers for name in ("norm1", "norm2")), d.last_norm]
        self._norm_names = [names[id(norm)] for norm in norms]
        self._spare: Tensor | None = None  # what the last backward pass was done with

    def _pointer(self, tensor: Tensor | None) -> Any:
        """Return a pointer to a tensor on the network's device."""
        return pointer(tensor, self.device)

    def _weight(self, tensor: Tensor | None) -> Any:
        """Return a pointer to a parameter that is no matrix, or to its rounded copy."""
        form = self.lowered.precision.other_weights
        if tensor is None or form == "float32":
            return self._pointer(tensor)
        state = state_of((tensor,))
        if id(tensor) not in self._rounded or self._rounded[id(tensor)][0] != state:
            self._rounded[id(tensor)] = state, round_rows(tensor, form)
        return self._pointer(self._rounded[id(tensor)][1])

    def _norm(self, norm: Any) -> dict[str, Any]:
        weight, bias = self._weight(norm.weight), self._weight(getattr(norm, "bias", None))
        return {"w": weight, "b": bias, "grad": -1, "b_grad": -1}

    def prepare(self) -> None:
        """Let the structs point to the weights, and pack those that have changed: before each pass."""
        library.check_denormals()
        for into, layer in zip(self._layer_structs, self.layers, strict=True):
            for name, norm in layer.parts.norms.items():
                setattr(into, name, self._norm(norm))
            for name, matrix in layer.matrices.items():
                setattr(into, name, matrix.prepare()[0])
            for name, array in layer.arrays.items():
                for e, matrix in enumerate(layer.experts[name]):
                    array[e] = matrix.prepare()[0]
        d = self.description
        self.struct.embedding, self.struct.positions = self._weight(d.embedding), self._weight(d.positions)
        self.struct.last_norm = self._norm(d.last_norm)

    def kept_bytes(self, tokens: int, keep: int = KEEP_ALL) -> int:
        """Return how many bytes a pass over some tokens keeps for its backward pass."""
        return 4 * int(kernels_of(self.device).kept_floats(self.struct, tokens, keep))

    def packed_bytes(self) -> int:
        """Return how many bytes the packed copies of the weights take."""
        floats = kernels_of(self.device).panel_floats
        return sum(4 * floats(m.struct.n, m.struct.k) for m in self.matrices)

    def fuse(self) -> None:
        """Let the parameters of each matrix lie one after the other, as a pass does."""
        for matrix in self.matrices:
            matrix.fuse()

    def forget(self) -> None:
        """Free the packed copies of the weights until the next pass."""
        for matrix in self.matrices:
            matrix.forget()
        self._rounded = {}

    def give_back(self, kept: Tensor | None) -> None:
        """Let the next pass use the memory; None: free it."""
        self._spare = kept

    def _collect(self, sums: SlotSums) -> None:
        """Let the structs of a prepared network say where the gradients of all weights go."""

        def norm(module: Any, struct: Struct) -> None:
            bias = getattr(module, "bias", None)
            struct.grad, struct.b_grad = sums.offset(module.weight), -1 if bias is None else sums.offset(bias)

        for into, layer in zip(self._layer_structs, self.layers, strict=True):
            for name, module in layer.parts.norms.items():
                norm(module, getattr(into, name))
            for name, matrix in layer.matrices.items():
                matrix.collect(sums)
                setattr(into, name, matrix.struct[0])
            for name, stacked in layer.parts.experts.items():
                first = sums.offset(stacked)
                for e, expert in enumerate(layer.arrays[name]):
                    expert.grad = first if first < 0 else first + e * stacked[e].numel()
        d = self.description
        self.struct.embedding_grad = sums.offset(d.embedding)
        self.struct.positions_grad = -1 if d.positions is None else sums.offset(d.positions)
        norm(d.last_norm, self.struct.last_norm)

    def _call(self, batch: Ragged, cache: Cache, base: Ints, seen: Ints | None) -> _Call:
        """Return a batch as the kernels take it."""
        rows = batch.rows
        members = dict(
            tokens=len(batch.ids),
            sequences=len(batch.start) - 1,
            ids=pointer(batch.ids),
            position=pointer(rows.position),
            sequence=pointer(rows.sequence),
            start=pointer(batch.start),
            base=pointer(base),
            slots=pointer(rows.slots),
            keys=self._pointer(cache.keys),
            values=self._pointer(cache.values),
            capacity=cache.capacity,
            routes=pointer(batch.routes),
            seen=pointer(seen),
        )
        return _Call(ffi.new("Batch *", members), batch, (cache, base, seen))

    def _seen(self, batch: Ragged, wanted: bool) -> Ints | None:
        return np.empty((len(batch.ids), self.struct.mixtures * self.struct.chosen), np.int32) if wanted else None

    def _forward(self, call: _Call, kept: Tensor | None, keep: int) -> Tensor:
        hidden = torch.empty(len(call.batch.ids), self.struct.hidden, device=self.device)
        memory = self._pointer(kept), keep, self._pointer(hidden)
        place = kernels_of(self.device).model_forward(self.struct, call.struct, *memory)
        if place:
            name = self._norm_names[place - 1]
            raise NumericsError(f"the input of {name} is not finite; lower the learning rate or check the weights")
        return hidden

    def _memory(self, tokens: int, keep: int) -> Tensor:
        """Return memory for what a pass keeps: that of the last pass if it is large enough."""
        floats = self.kept_bytes(tokens, keep) // 4
        spare, self._spare = self._spare, None  # fresh pages cost time
        return torch.empty(floats, device=self.device) if spare is None or spare.numel() < floats else spare

    def _pass(self, call: _Call) -> Tensor:
        """Return the hidden states [n, H] of a pass without gradients."""
        if self.watch is None:
            return self._forward(call, None, KEEP_NOTHING)
        n, width, layers = len(call.batch.ids), self.struct.hidden, len(self.layers)
        kept = self._memory(n, KEEP_INPUTS)
        hidden = self._forward(call, kept, KEEP_INPUTS)
        place = kernels_of(self.device).layer_input_at
        starts = [place(self.struct, n, layer, KEEP_INPUTS) for layer in range(layers + 1)]
        inputs = [kept[start : start + n * width].view(n, width) for start in starts]
        self.watch(call.batch, inputs, hidden)
        return hidden

    def check(self, batch: Ragged) -> None:
        """Raise UserError for ids, positions and routes that are not the model's: other memory lies there."""
        model, tokens = self.struct, len(batch.ids)
        if tokens * max(model.heads, model.mixtures * model.chosen) >= 1 << 31:  # the kernels count them in ints
            raise UserError(
                f"{tokens} tokens in one pass are too many for this model; make layout's micro-batches smaller"
            )
        if tokens and not 0 <= int(batch.ids.min()) <= int(batch.ids.max()) < model.vocabulary:
            raise UserError(f"token ids: must be in 0..{model.vocabulary - 1}")
        if tokens and int(batch.rows.position.min()) < 0:
            raise UserError("positions: must be at least 0")
        longest = int(batch.rows.position.max(initial=-1)) + 1
        if longest > self.lowered.max_context:
            raise UserError(f"{longest} tokens: numerics.max_context is {self.lowered.max_context}")
        if batch.routes is not None:
            self._check_routes(batch.routes, tokens)

    def _check_routes(self, routes: Ints, tokens: int) -> None:
        """Raise UserError unless each token has, in each mixture, `chosen` of the experts by rising index."""
        model = self.struct
        if not model.mixtures or routes.size != tokens * model.mixtures * model.chosen:
            raise UserError(f"routes of shape {list(routes.shape)}: must be {model.mixtures} x {model.chosen} a token")
        chosen = routes.reshape(-1, model.chosen)
        outside = len(chosen) > 0 and (int(chosen[:, 0].min()) < 0 or int(chosen[:, -1].max()) >= model.experts)
        if outside or bool((np.diff(chosen, axis=1) <= 0).any()):
            raise UserError(f"routes: must be experts in 0..{model.experts - 1} by rising index, each once")

    def over_cache(
        self, batch: Ragged, cache: Cache, slots: Sequence[int], seen: bool = False
    ) -> tuple[Tensor, Ints | None]:
        """Compute tokens whose past is in a cache. Their keys and values go there. `prepare` comes first.

        Args:
            batch: n new tokens of S sequences, with their positions.
            cache: the keys and values of earlier tokens.
            slots: the slot of each sequence in the cache [S].
            seen: whether to return the experts that the tokens go to.

        Returns:
            Hidden states float32 [n, H], and routes int32 [n, mixtures x chosen] or None.
        """
        self.check(batch)
        routes = self._seen(batch, seen)
        call = self._call(batch, cache, ints(np.asarray(slots) * cache.each), routes)
        return self._pass(call), routes

    def make_cache(self, slots: int, positions: int) -> Cache:
        return Cache(self.struct, slots, positions, self.device)

    def copy_prefix(self, cache: Cache, source: int, target: int, positions: int) -> None:
        """Copy the keys and values of a slot's first positions to another slot.

        Args:
            cache: has both slots.
            source: slot.
            target: slot.
            positions: how many.
        """
        kernels_of(self.device).copy_prefix(
            self.struct, self._pointer(cache.keys), self._pointer(cache.values), cache.capacity,
            source * cache.each, target * cache.each, positions,
        )  # fmt: skip

    def over_batch(self, batch: Ragged, rows: Ints, seen: bool = False) -> tuple[Tensor, Ints | None]:
        """Return hidden states [n, H] at some rows of whole sequences, differentiable, and the routes of all rows.

        rows: rising, each once; ValueError otherwise, because a repeated row would lose gradients. The backward pass
        adds to the GradientSums of the parameters; PromiseBroken from there if the order of sequences is not that of
        their slots.
        """
        self.check(batch)
        if (np.diff(np.asarray(rows)) <= 0).any():
            raise ValueError("rows must rise, each once")
        self.prepare()
        routes = self._seen(batch, seen)
        trained = [p for p in self.parameters.values() if p.requires_grad]
        if trained and torch.is_grad_enabled():
            # trained[0] only makes autograd call backward; all gradients go to GradientSums
            return _Hidden.apply(trained[0], self, batch, rows, routes), routes
        cache, base = self._own_cache(batch)
        return self._pass(self._call(batch, cache, base, routes))[index(rows, self.device)], routes

    def _own_cache(self, batch: Ragged) -> tuple[Cache, Ints]:
        """Return a cache of exactly these sequences, and where each begins."""
        padded = -(-batch.lengths // 16) * 16
        cache = Cache(self.struct, 1, int(padded.sum()), self.device)
        return cache, ints(np.concatenate([[0], np.cumsum(padded)[:-1]]))


class _Hidden(Function):
    @staticmethod
    def forward(ctx: Any, trained: Tensor, network: Network, batch: Ragged, rows: Ints, routes: Ints | None) -> Tensor:
        keep = KEEP_INPUTS if network.lowered.recompute else KEEP_ALL
        cache, base = network._own_cache(batch)
        ctx.call = network._call(batch, cache, base, routes)
        ctx.keep, ctx.network, ctx.rows = keep, network, rows
        ctx.kept = network._memory(len(batch.ids), keep)
        return network._forward(ctx.call, ctx.kept, keep)[index(rows, network.device)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        network, batch = ctx.network, ctx.call.batch
        parameters = tuple(network.parameters.values())
        sums = ATTACHED.sums_of(*parameters)
        if sums is None:
            raise ValueError("nothing collects the gradients of this network")
        if ctx.kept is None:
            raise RuntimeError("a second backward through one pass: its activations were freed")
        kept, ctx.kept = ctx.kept, None
        device = network.device
        d_hidden = torch.zeros(len(batch.ids), network.struct.hidden, device=device)
        d_hidden[index(ctx.rows, device)] = grad
        use = sums.use("trunk", *parameters)
        network.prepare()
        network._collect(use)
        with use.adding(batch.rows.slots) as c_sums:
            memory = pointer(kept, device), ctx.keep, pointer(d_hidden, device)
            kernels_of(device).model_backward(network.struct, ctx.call.struct, *memory, c_sums)
        network.give_back(kept)
        return None, None, None, None, None


def lower(model: PreTrainedModel, lowered: Lowered) -> PreTrainedModel:
    """Let a float32 model compute in deterministic numerics, in place, and return it. Its modules stay.

    UserError naming the first module, setting or type that is not supported.
    """
    trunk = trunk_of(model)
    if type(trunk) not in TRUNKS:
        raise UserError(
            f"model {type(model).__name__}: deterministic numerics do not know it; choose a {NAMES} model, or "
            "numerics.mode = native"
        )
    check_config(model.config, lowered.max_context)
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise UserError(f"model parameter '{name}' is {parameter.dtype}; deterministic numerics need float32")
    check_parts(model)
    trunk._lowered = lowered  # type: ignore[assignment]
    return model


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each parameter by name."""
    return {name: p.shape for name, p in model.named_parameters()}


def check_parts(model: PreTrainedModel) -> None:
    """Raise UserError for the first module or parameter whose class or shape is not what the model's config makes."""
    try:
        with torch.device("meta"):
            stock = type(model)(copy.deepcopy(model.config))
    except Exception as error:  # a wrong value can fail anywhere
        raise UserError(f"model config: transformers makes no model of it ({shown(str(error))}); mend it") from error
    modules = dict(stock.named_modules())
    for name, module in model.named_modules():
        if type(module) is not type(modules.get(name)):
            raise UserError(
                f"model module '{name}' of class {type(module).__name__}: deterministic numerics do not know it"
            )
    found, expected = (dict(m.named_parameters(remove_duplicate=False)) for m in (model, stock))
    for name in sorted(found.keys() | expected.keys()):
        ours, theirs = (list(p[name].shape) if name in p else "no such parameter" for p in (found, expected))
        if ours != theirs:
            raise UserError(
                f"model parameter '{name}' is {ours}, and its config wants {theirs}; make it again from its config"
            )


def _refuse_fault(model: Struct, config: PretrainedConfig) -> None:
    """Raise UserError naming the first field of a config by which its model breaks a rule of the kernels."""
    fault = library.load().model_fault(model)
    if fault == ffi.NULL:
        return
    field, _, rule = ffi.string(fault).decode().partition(": ")
    name = config.attribute_map.get(field, field)
    value = head_dim(config) if field == "head_dim" else getattr(config, name, None)
    raise UserError(f"model config {name}{'' if value is None else f' = {value!r}'}: {rule}; choose another model")


def lowered_of(model: nn.Module) -> Lowered | None:
    """Return how a model was lowered; None for one in native numerics."""
    found = getattr(trunk_of(model) if isinstance(model, PreTrainedModel) else model, "_lowered", None)
    return found if isinstance(found, Lowered) else None


def is_deterministic(model: nn.Module) -> bool:
    """Tell whether a model computes in deterministic numerics."""
    return lowered_of(model) is not None


def network_of(model: PreTrainedModel) -> Network | NativeNetwork:
    """Return what computes a model's trunk: the kernels if it was lowered, else stock torch."""
    trunk, lowered = trunk_of(model), lowered_of(model)
    if lowered is None:
        return NativeNetwork(trunk)
    network: Network | None = ATTACHED.networks.get(trunk)
    known = {} if network is None or network.lowered != lowered else network.parameters
    same = all(p is known.get(name) for name, p in trunk.named_parameters())
    if network is None or not same or network.shapes != shapes_of(trunk) or network.device != trunk.device:
        network = ATTACHED.networks[trunk] = Network(trunk, lowered)
    return network


def forget_packed(model: nn.Module) -> None:
    """Free the packed copies of a module's weights until its next pass, for one that rests: they are as large."""
    for packed_copies in ATTACHED.packed(model):
        packed_copies.forget()
    library.load().trim_heap()


def free_memory(model: nn.Module) -> None:
    """Free memory that only passes with gradients need, until the next one."""
    kernels_of(next(model.parameters(), torch.empty(0)).device).free_scratch()
    for module in model.modules():
        if module in ATTACHED.networks:
            ATTACHED.networks[module].give_back(None)


def logits(model: PreTrainedModel, hidden: Tensor, rows: Rows | None = None) -> Tensor:
    """Return the logits [n, V] of a causal model from the trunk's hidden states [n, H], by the head.

    They lie where `token_statistics` takes them: in native numerics on the CPU, else where the model is. `rows` as in
    `linear`, for a pass whose head is trained.
    """
    head, lowered = head_of(model), lowered_of(model)
    if lowered is None:
        return cast(Tensor, head(hidden)).cpu()
    precision = lowered.precision
    if precision.other_weights == "float32":
        out = linear(hidden, head, rows)
    else:
        out = product(hidden, packed(head, precision.other_weights))
    return out if precision.logits == "float32" else round_rows(out, precision.logits)
