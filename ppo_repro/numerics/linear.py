"""Matrices as the kernels read them, and linear layers that stand alone: heads, layers of control networks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ppo_repro.numerics.attached import ATTACHED
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.gradient_sums import SlotSums
from ppo_repro.numerics.interface import Ints, Struct, ffi, pointer
from ppo_repro.numerics.precision import round_rows
from ppo_repro.numerics.rows import Rows


def fuse(tensors: Sequence[Tensor]) -> None:
    """Let some parameters lie one after the other in one storage, in place; nothing moves if they already do."""
    first = tensors[0]
    place = first.storage_offset()
    together = True
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        together &= same and tensor.storage_offset() == place and tensor.is_contiguous()
        place += tensor.numel()
    if together:
        return
    with torch.no_grad():
        memory = torch.cat([t.detach().reshape(-1) for t in tensors])
        for tensor, part in zip(tensors, memory.split([t.numel() for t in tensors]), strict=True):
            tensor.data = part.view(tensor.shape)


def state_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return numbers that change when one of the tensors is changed in place or gets other memory.

    Not seen: writes through `.data`, NumPy or another library; `library/gradients.py` therefore packs anew in each
    pass, and code of this package calls `increment_version`.
    """
    return tuple(number for t in tensors for number in (t.data_ptr(), t._version))


class PackedMatrix:
    """A weight [N, K] of one or more parameters that lie one after the other (`fuse`), and its bias [N] likewise."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] = (),
        transposed: bool = False,
        form: str = "float32",
        bias_form: str = "float32",
    ) -> None:
        """Describe the matrix; `prepare` packs it.

        Args:
            weights: parameters [N_i, K], float32; N is the sum of the N_i.
            biases: parameters [N_i], float32, or none.
            transposed: whether `weights` is one parameter [K, N].
            form, bias_form: formats of `precision.py` to which weights and biases are rounded before they are packed;
                the parameters stay as they are.
        """
        self.weights, self.biases = tuple(weights), tuple(biases)
        rows = sum(w.shape[0] for w in weights)
        n, k = (weights[0].shape[1], rows) if transposed else (rows, weights[0].shape[1])
        self.shape = weights[0].shape
        self.struct = ffi.new("Matrix *", dict(n=n, k=k, transposed=transposed, grad=-1, bias_grad=-1))
        self.form = form
        self._bias_form = bias_form
        self._state: tuple[int, ...] = ()
        self._panels: Tensor | None = None
        self._rounded: tuple[Tensor, ...] = ()

    def forget(self) -> None:
        """Free the packed copy until the weights are needed again."""
        self._state, self._panels, self._rounded = (), None, ()

    def fuse(self) -> None:
        """Let the parameters lie one after the other."""
        fuse(self.weights)
        if self.biases:
            fuse(self.biases)

    def prepare(self) -> Struct:
        """Return the struct, with panels of the weights as they are now."""
        matrix = self.struct
        device = self.weights[0].device
        if state_of((*self.weights, *self.biases)) == self._state:
            return matrix
        self.fuse()
        self._state = state_of((*self.weights, *self.biases))
        kernels = kernels_of(device)
        if self._panels is None:
            self._panels = torch.empty(kernels.panel_floats(matrix.n, matrix.k), device=device)
        matrix.w = pointer(self.weights[0], device)
        matrix.bias = pointer(self.biases[0] if self.biases else None, device)
        if self.form != "float32":
            self._rounded = (torch.cat([round_rows(w, self.form) for w in self.weights]),)
            matrix.w = pointer(self._rounded[0], device)
        if self.biases and self._bias_form != "float32":
            biases = torch.cat([round_rows(b, self._bias_form, scaled=False) for b in self.biases])
            self._rounded = (*self._rounded, biases)
            matrix.bias = pointer(biases, device)
        matrix.panels = pointer(self._panels, device)
        kernels.pack(matrix)
        return matrix

    def collect(self, sums: SlotSums | None) -> None:
        """Send gradients to these sums; None: nowhere."""
        self.struct.grad = -1 if sums is None else sums.offset(*self.weights)
        self.struct.bias_grad = -1 if sums is None or not self.biases else sums.offset(*self.biases)


def matrix_of(layers: Sequence[Any], form: str, bias_form: str) -> PackedMatrix:
    """Return the matrix of some linear layers, whose outputs follow one another."""
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    weights = [layer.weight for layer in layers]
    return PackedMatrix(weights, biases, isinstance(layers[0], Conv1D), form, bias_form)


def packed(module: nn.Module, form: str = "float32") -> PackedMatrix:
    """Return the packed weights of an nn.Linear that stands alone: a head, or a layer of a control network.

    They are kept for the next call, until the module gets another weight or bias, or the call names another `form`.
    """
    found: PackedMatrix | None = ATTACHED.matrices.get(module)
    if found is not None:
        same_weight = found.weights[0] is module.weight and found.shape == module.weight.shape
        same_bias = next(iter(found.biases), None) is getattr(module, "bias", None)
        if same_weight and same_bias and found.form == form:
            return found
    found = matrix_of((module,), form, form)
    ATTACHED.matrices[module] = found
    return found


def product(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """Return x W^T + b, [n, N] float32 without a gradient; x [n, K] float32."""
    x, packed_matrix = x.detach().contiguous(), matrix.prepare()
    if x.dim() != 2 or x.shape[1] != packed_matrix.k:
        raise ValueError(f"inputs {list(x.shape)}, where [n, {packed_matrix.k}] are due")
    y = torch.empty(len(x), packed_matrix.n, device=x.device)
    kernels_of(x.device).linear(packed_matrix, pointer(x, x.device), len(x), ffi.NULL, pointer(y, x.device))
    return y


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matrix: PackedMatrix, rows: Rows | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.matrix, ctx.rows = matrix, rows
        return product(x, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,), matrix, parameters = ctx.saved_tensors, ctx.matrix, (*ctx.matrix.weights, *ctx.matrix.biases)
        matrix.prepare()
        grad, x = grad.contiguous(), x.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        use = None
        if any(p.requires_grad for p in parameters):
            sums = ATTACHED.sums_of(*parameters)
            if sums is None or ctx.rows is None:
                raise ValueError("nothing collects the gradients of this layer, or its rows are not known")
            use = sums.use("linear", *parameters)
        matrix.collect(use)
        _backward(matrix.struct, grad, x, ctx.rows, use, dx)
        return dx, None, None, None


def _backward(
    matrix: Struct, grad: Tensor, x: Tensor | None, rows: Rows | None, use: SlotSums | None, dx: Tensor | None
) -> None:
    """Compute the gradients of a layer's inputs and weights.

    Args:
        matrix: the layer's.
        grad: gradient of the outputs, float32 [n, N].
        x: inputs, float32 [n, K]; None if only a bias is trained.
        rows: which sequence each of the n rows belongs to; None if the weights are not trained.
        use: the sums that get the gradients of weight and bias; None if these are not trained.
        dx: is filled with the gradient of the inputs, float32 [n, K]; None if they need none.
    """
    of_rows: tuple[Ints | None, ...] = (None, None, None)
    adding: AbstractContextManager[Struct | None] = nullcontext()
    if use is not None and rows is not None:
        of_rows, adding = (rows.sequence, rows.position, rows.slots), use.adding(rows.slots)
    with adding as sums:
        into = ffi.NULL if sums is None else sums
        device = grad.device
        products = matrix, pointer(grad, device), pointer(x, device), len(grad)
        kernels_of(device).linear_backward(*products, *map(pointer, of_rows), into, pointer(dx, device))


def linear(x: Tensor, layer: nn.Module, rows: Rows | None = None) -> Tensor:
    """Return x W^T + b of an nn.Linear, [n, N] float32, differentiable in x [n, K].

    Gradients of W and b go to their GradientSums. `rows` says which sequence each row of x belongs to; None if W and b
    are not trained.
    """
    matrix = packed(layer)
    if torch.is_grad_enabled() and (x.requires_grad or matrix.weights[0].requires_grad):
        return _Linear.apply(x, matrix.weights[0], matrix, rows)
    return product(x, matrix)


def add_to_bias(bias: Tensor, grad: Tensor, rows: Rows) -> None:
    """Add the gradients [n, N] of the rows that a bias [N] was added to, float32, to the GradientSums of the bias."""
    sums = ATTACHED.sums_of(bias)
    if sums is None:
        raise ValueError("nothing collects the gradient of this bias")
    use = sums.use("bias", bias)
    matrix = ffi.new(
        "Matrix *", dict(n=len(bias), bias=pointer(bias, bias.device), grad=-1, bias_grad=use.offset(bias))
    )
    _backward(matrix, grad.detach().contiguous(), None, rows, use, None)
