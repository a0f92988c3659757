"""Pack matrices for the kernels: weights that are consecutive in memory, packed for products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_repro.base.mode import Precision
from ppo_repro.numerics.attached import attached_to
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.gradient_sums import SlotSums
from ppo_repro.numerics.interface import Struct, ffi, names, pointer
from ppo_repro.numerics.rounding import round_rows

PRECISIONS = names("Precision", "PRECISION_")  # by their number in C


def are_together(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors lie in one storage, one after the other."""
    first = tensors[0]
    offset = first.storage_offset()
    together = True
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        together &= same and tensor.storage_offset() == offset and tensor.is_contiguous()
        offset += tensor.numel()
    return together


def fuse(tensors: Sequence[Tensor]) -> None:
    """Move some parameters into one storage, one after the other, in place; do nothing if they already are."""
    if are_together(tensors):
        return
    with torch.no_grad():
        memory = torch.cat([t.detach().reshape(-1) for t in tensors])
        for tensor, part in zip(tensors, memory.split([t.numel() for t in tensors]), strict=True):
            tensor.data = part.view(tensor.shape)


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return numbers that change when one of the tensors is written in place or gets other memory.

    The numbers miss writes through `.data`, NumPy or another library. So `api/passes.py` packs weights in each
    pass, and code of this package calls `increment_version`.
    """
    return tuple(number for t in tensors for number in (t.data_ptr(), t._version))


@dataclass(frozen=True)
class Packing:
    """How a matrix is packed. Rounding changes the packed copy alone."""

    weights: str = "float32"  # format of `rounding.py`
    biases: str = "float32"
    precision: Precision = "highest"  # of the products
    moves: bool = True  # put parameters that lie apart together in memory; False: copy them


class PackedMatrix:
    """Weight [N, K] and bias [N], each of one or more parameters, which the kernels read one after the other."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        packing: Packing,
        biases: Sequence[Tensor] = (),
        transposed: bool = False,
        struct: Struct | None = None,
    ) -> None:
        """Describe the matrix. `prepare` packs it.

        Args:
            weights: parameters [N_i, K], float32; N is the sum of the N_i.
            biases: parameters [N_i], float32, or none.
            transposed: whether `weights` is one parameter [K, N].
            struct: the C struct `Matrix` to fill, whose memory the caller keeps alive; None for a new struct.
        """
        self.weights, self.biases, self.packing = tuple(weights), tuple(biases), packing
        rows = sum(w.shape[0] for w in weights)
        n, k = (weights[0].shape[1], rows) if transposed else (rows, weights[0].shape[1])
        self.shape = weights[0].shape
        self.struct = ffi.new("Matrix *") if struct is None else struct
        self.struct.n, self.struct.k, self.struct.transposed = n, k, transposed
        self.struct.grad, self.struct.bias_grad = -1, -1
        self.struct.precision = PRECISIONS.index(packing.precision)
        self._state: tuple[int, ...] = ()
        self._panels: Tensor | None = None
        self._read: tuple[Tensor | None, ...] = ()  # weight and bias in the kernels' memory

    def forget(self) -> None:
        """Free the packed copy until the weights are needed again."""
        self._state, self._panels, self._read = (), None, ()

    def fuse(self) -> None:
        """Move the parameters of weight and of bias one after the other in memory."""
        fuse(self.weights)
        if self.biases:
            fuse(self.biases)

    def prepare(self) -> Struct:
        """Pack the weights if they have changed since the last call, and return the struct."""
        matrix = self.struct
        device = self.weights[0].device
        if versions_of((*self.weights, *self.biases)) == self._state:
            return matrix
        if self.packing.moves:
            self.fuse()
        kernels = kernels_of(device)
        if self._panels is None:
            self._panels = torch.empty(kernels.panel_floats(matrix.n, matrix.k, matrix.precision), device=device)
        self._read = _joined(self.weights, self.packing.weights, True), _joined(self.biases, self.packing.biases, False)
        matrix.w, matrix.bias = (pointer(tensor, device) for tensor in self._read)
        matrix.panels = pointer(self._panels, device)
        kernels.pack(matrix)
        self._state = versions_of((*self.weights, *self.biases))  # last: after a failure the next call packs
        return matrix

    def set_gradient_offsets(self, sums: SlotSums | None) -> None:
        """Write into the struct the memory for the gradients of weight and bias; None for no gradients."""
        self.struct.grad = -1 if sums is None else sums.offset(*self.weights)
        self.struct.bias_grad = -1 if sums is None or not self.biases else sums.offset(*self.biases)


class ExpertMatrix(PackedMatrix):
    """Weight [N, K] of one expert, a part of the parameter [E, N, K] of all experts of a layer."""

    def __init__(self, stacked: Tensor, expert: int, packing: Packing, structs: Any) -> None:
        """Describe the matrix of an expert. `structs` is the C array `Matrix[E]` of all experts."""
        self._stacked, self._expert, self._structs = stacked, expert, structs  # the array keeps its C memory alive
        super().__init__([stacked.detach()[expert]], packing, struct=structs + expert)

    def prepare(self) -> Struct:
        """Pack the expert's weights if they have changed since the last call, and return the struct."""
        self.weights = (self._stacked.detach()[self._expert],)  # the parameter may have other memory now
        return super().prepare()

    def set_gradient_offsets(self, sums: SlotSums | None) -> None:
        """Write into the struct the memory for the gradient of the weight; None for no gradient."""
        first = -1 if sums is None else sums.offset(self._stacked)
        self.struct.grad = first if first < 0 else first + self._expert * self.weights[0].numel()


def _joined(tensors: Sequence[Tensor], form: str, scaled: bool) -> Tensor | None:
    """Return the first of some parameters that are together in memory, else a copy of all; None for no parameters.

    Another form than float32 rounds the copy; `scaled` as in `round_rows`.
    """
    if not tensors:
        return None
    if form != "float32":
        return torch.cat([round_rows(tensor, form, scaled=scaled) for tensor in tensors])
    return tensors[0] if are_together(tensors) else torch.cat([tensor.detach() for tensor in tensors])


def matrix_of(layers: Sequence[Any], packing: Packing, struct: Struct | None = None) -> PackedMatrix:
    """Return the matrix of linear layers with consecutive outputs. `struct` is that of `PackedMatrix`."""
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    weights = [layer.weight for layer in layers]
    return PackedMatrix(weights, packing, biases, isinstance(layers[0], Conv1D), struct)


def packed(module: nn.Module, packing: Packing) -> PackedMatrix:
    """Return the packed weights of an nn.Linear outside of a trunk: a head, or a layer of a control network.

    The next call returns the same object, unless the module has another weight or bias, or `packing` differs.
    """
    attached = attached_to(module)
    matrix: PackedMatrix | None = attached.matrix
    if matrix is not None:
        same_weight = matrix.weights[0] is module.weight and matrix.shape == module.weight.shape
        same_bias = next(iter(matrix.biases), None) is getattr(module, "bias", None)
        if same_weight and same_bias and matrix.packing == packing:
            return matrix
    matrix = attached.matrix = matrix_of((module,), packing)
    return matrix
