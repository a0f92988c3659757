"""Describe a trunk to the kernels: the C structs `Model` and `Layer`, and packed copies of the weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.numerics import library
from ppo_repro.numerics.description import LayerParts, describe
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.families import head_dim
from ppo_repro.numerics.gradient_sums import SlotSums
from ppo_repro.numerics.interface import CPU, Struct, ffi, pointer
from ppo_repro.numerics.lowering import Lowered
from ppo_repro.numerics.matrices import PRECISIONS, ExpertMatrix, PackedMatrix, Packing, matrix_of, versions_of
from ppo_repro.numerics.rotary import rotating, tables
from ppo_repro.numerics.rounding import FORMATS, round_rows


class PackedModel:
    """C struct `Model` of one trunk.

    The structs of matrices and norms lie inside the struct of their layer. Weights may change in place between passes:
    call `prepare` before each pass, then `set_gradient_offsets` before a backward pass. `prepare` puts the weights of
    one matrix (queries, keys and values; gates and ups) together in memory, or copies them: see `Packing.moves`.
    """

    def __init__(self, trunk: PreTrainedModel, lowered: Lowered) -> None:
        """Make the structs. Raises UserError, which names a setting that the kernels cannot compute.

        No weight is packed yet.
        """
        self.description = describe(trunk)
        self.device = CPU if trunk.device.type == "meta" else trunk.device  # `plan` has shapes alone
        self.matrices: list[PackedMatrix] = []
        self._norms: list[tuple[nn.Module, Struct]] = []
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # cosines and sines, by id of the parameters
        self._rounding = rounding = lowered.rounding
        self._packing = Packing(rounding.weights, rounding.other_weights, lowered.precision, lowered.moves_weights)
        self._rounded: dict[int, tuple[tuple[int, ...], Tensor]] = {}  # other weights by id: their state, and rounded

        layers = self.description.layers
        self._layers = ffi.new("Layer[]", len(layers))
        mixtures_before = accumulate((bool(parts.experts) for parts in layers), initial=0)
        for struct, parts, mixture in zip(self._layers, layers, mixtures_before, strict=False):
            self._add_layer(struct, parts, mixture)
            if parts.rope is not None:
                self._rotate(struct.rotary, trunk.config, parts.rope, lowered.max_context)

        members = dict(
            **self.description.numbers,
            round_activations=FORMATS.index(self._rounding.activations),
            round_inputs=FORMATS.index(self._rounding.linear_inputs),
            round_cache=FORMATS.index(self._rounding.kv_cache),
            embedding_grad=-1,
            positions_grad=-1,
            layer=self._layers,
        )
        self.struct = ffi.new("Model *", members)
        self._add_norm(self.description.last_norm, ffi.addressof(self.struct, "last_norm"))
        _refuse_fault(self.struct, trunk.config)

    def _add_layer(self, struct: Struct, parts: LayerParts, mixture: int) -> None:
        """Fill in the struct of a layer, and list its matrices and norms. `mixture` earlier layers have experts."""
        struct.mixture = mixture
        for name, number in parts.numbers.items():
            setattr(struct, name, number)
        for name, norm in parts.norms.items():
            self._add_norm(norm, ffi.addressof(struct, name))
        of_router = replace(self._packing, weights=self._rounding.other_weights)
        for name, layers in parts.matrices.items():
            packing = of_router if name == "router" else self._packing
            self.matrices.append(matrix_of(layers, packing, ffi.addressof(struct, name)))
        for name, stacked in parts.experts.items():
            structs = ffi.new("Matrix[]", len(stacked))
            setattr(struct, name, structs)
            self.matrices += [ExpertMatrix(stacked, e, self._packing, structs) for e in range(len(stacked))]

    def _rotate(self, struct: Struct, config: PretrainedConfig, rope: dict[str, Any], positions: int) -> None:
        """Fill in the rotary positions of a layer. Layers with the same parameters share one pair of tables."""
        if id(rope) not in self._tables:
            cosine, sine = tables(config, rope, positions)
            self._tables[id(rope)] = cosine.to(self.device), sine.to(self.device)
        struct.elements = rotating(config, rope)
        struct.cosine, struct.sine = (pointer(table, self.device) for table in self._tables[id(rope)])

    def _add_norm(self, norm: nn.Module, struct: Struct) -> None:
        struct.grad, struct.b_grad = -1, -1
        self._norms.append((norm, struct))

    def prepare(self) -> None:
        """Let the struct point to the current weights, and pack the weights that have changed."""
        library.check_denormals()
        for matrix in self.matrices:
            matrix.prepare()
        for norm, struct in self._norms:
            struct.w, struct.b = self._weight(norm.weight), self._weight(getattr(norm, "bias", None))
        self.struct.embedding = self._weight(self.description.embedding)
        self.struct.positions = self._weight(self.description.positions)

    def _weight(self, tensor: Any) -> Any:
        """Return a pointer to a parameter outside of matrices, or to its rounded copy; NULL for None."""
        form = self._rounding.other_weights
        if tensor is None or form == "float32":
            return pointer(tensor, self.device)
        state = versions_of((tensor,))
        if id(tensor) not in self._rounded or self._rounded[id(tensor)][0] != state:
            self._rounded[id(tensor)] = state, round_rows(tensor, form)
        return pointer(self._rounded[id(tensor)][1], self.device)

    def set_gradient_offsets(self, sums: SlotSums) -> None:
        """Write into the struct the memory for the gradients of all weights."""

        def offset(parameter: Any) -> int:
            return -1 if parameter is None else sums.offset(parameter)

        for matrix in self.matrices:
            matrix.set_gradient_offsets(sums)
        for norm, struct in self._norms:
            struct.grad, struct.b_grad = offset(norm.weight), offset(getattr(norm, "bias", None))
        self.struct.embedding_grad = offset(self.description.embedding)
        self.struct.positions_grad = offset(self.description.positions)

    def fuse(self) -> None:
        """Move the parameters of each matrix one after the other in memory, as `prepare` does."""
        for matrix in self.matrices:
            matrix.fuse()

    def groups(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the trunk's parameters in groups with consecutive gradients: the weights, or biases, of one matrix."""
        by_id: dict[int, tuple[Tensor, ...]] = {id(p): (p,) for p in parameters}
        for parts in (parts for matrix in self.matrices for parts in (matrix.weights, matrix.biases) if len(parts) > 1):
            by_id[id(parts[0])] = parts
            for other in parts[1:]:
                if by_id.pop(id(other), None) is None:
                    shape = list(other.shape)
                    raise UserError(
                        f"one weight {shape} is used twice in one trunk; deterministic numerics cannot train it"
                    )
        return list(by_id.values())

    def forget(self) -> None:
        """Free the packed copies of the weights until the next `prepare`."""
        for matrix in self.matrices:
            matrix.forget()
        self._rounded = {}

    def kept_floats(self, tokens: int, keep: int) -> int:
        """Return the number of floats that a pass over `tokens` tokens keeps for its backward pass."""
        return int(kernels_of(self.device).kept_floats(self.struct, tokens, keep))

    def packed_floats(self, outputs: int) -> int:
        """Return the number of floats in the packed copies of the weights, with a head of `outputs` outputs."""
        shapes = [(matrix.struct.n, matrix.struct.k) for matrix in self.matrices] + [(outputs, self.struct.hidden)]
        floats, precision = kernels_of(self.device).panel_floats, PRECISIONS.index(self._packing.precision)
        return sum(floats(n, k, precision) for n, k in shapes)


def _refuse_fault(model: Struct, config: PretrainedConfig) -> None:
    """Raise UserError for the first field of a config that breaks a rule of the kernels."""
    fault = library.load().model_fault(model)
    if fault == ffi.NULL:
        return
    field, _, rule = ffi.string(fault).decode().partition(": ")
    name = config.attribute_map.get(field, field)
    value = head_dim(config) if field == "head_dim" else getattr(config, name, None)
    raise UserError(f"model config {name}{'' if value is None else f' = {value!r}'}: {rule}; choose another model")
