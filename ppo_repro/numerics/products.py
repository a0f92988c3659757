"""The products of the exact numerics by the backend in use: contractions, and integer sums over tokens.

All backends give the same bits, because every sum is exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.elementwise import pow2
from ppo_repro.numerics.arithmetic.grid import MIN_EXPONENT, contract, exponent, operand_bits, quantise
from ppo_repro.numerics.kernels import dgemm
from ppo_repro.numerics.kernels.amx import gradient, operands
from ppo_repro.numerics.kernels.amx import product as amx
from ppo_repro.numerics.kernels.core import rows

NOTHING = int(rows.NOTHING)
# an output gradient on its grid is split in two, so that sums over this many tokens are exact in float64
_SPLIT_BITS, _CHUNK = 14, 1 << 16


def array(x: Tensor) -> np.ndarray:
    """A contiguous CPU tensor as an array, without a copy where it already is one."""
    return (x.detach() if x.requires_grad else x).contiguous().numpy()


class _LastResult(threading.local):
    """A cache of one entry: layers that share an input, like queries, keys and values, prepare it once.

    Each thread has its own. The tensor is kept alive with the entry, so that no other can get its address.
    """

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._key: tuple[object, ...] = ()
        self._result: Any = None

    def of(self, x: Tensor, kind: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """make(), or its last result if that was for the same unchanged tensor and kind."""
        key = (x.data_ptr(), x._version, tuple(x.shape), x.stride(), *kind)
        if self._tensor is None or key != self._key:
            self._result, self._tensor, self._key = make(), x.detach(), key
        return self._result


_operands, _exponents, _packed_inputs = _LastResult(), _LastResult(), _LastResult()


Operand = operands.PackedRows | dgemm.GridMatrix


def _operand(x: np.ndarray, kind: str, p: int) -> Operand:
    return operands.quantise_rows(x, p) if kind == "amx" else dgemm.prepare(x, p)


class PreparedWeight:
    """A weight matrix prepared for contractions; prepared again when the weight or the backend changes."""

    def __init__(self, name: str, most_bits: int) -> None:
        self.name, self.most_bits = name, most_bits
        self._source: tuple[int, int, str] = (0, -1, "")
        self._prepared: dict[int, Any] = {}  # by dimension of the contraction
        self._outdated: dict[int, operands.PackedWeight] = {}  # to be overwritten: the system clears new memory first

    def bits(self, terms: int) -> int:
        """Operand bits of a contraction with this weight."""
        return min(self.most_bits, operand_bits(terms))

    def _get(self, weight: Tensor, dim: int, kind: str) -> Any:
        # in-place changes increase the version; new storage under the same parameter has another address
        source = (weight.data_ptr(), weight._version, kind)
        if source != self._source:
            self._outdated |= {d: w for d, w in self._prepared.items() if isinstance(w, operands.PackedWeight)}
            self._prepared, self._source = {}, source
        if dim not in self._prepared:
            self._prepared[dim] = self._prepare(weight.detach(), dim, kind)
        return self._prepared[dim]

    def _prepare(self, weight: Tensor, dim: int, kind: str) -> Any:
        p = self.bits(weight.shape[dim])
        if kind == "amx":
            return operands.pack(array(weight), p, dim == 1, self._outdated.pop(dim, None))
        outputs = weight if dim == 1 else weight.t()
        return dgemm.prepare(array(outputs), p) if kind == "dgemm" else quantise(outputs, p)

    def contract(self, x: Tensor, weight: Tensor, dim: int, bias: Tensor | None = None) -> Tensor:
        """fl32(sum_k x[.., k] w[.., k]) + 0 [+ bias] over dimension `dim` of weight [N, K].

        x [M, K] float32 -> [M, N] for dim 1; [M, N] -> [M, K] for dim 0. Raises NumericsError naming the module if x or
        the weight is not finite.
        """
        if not backend.has_kernels(x):
            grid = quantise(x, self.bits(weight.shape[dim]), where=f"the input of {self.name}")
            y = contract(grid, self._get(weight, dim, "eager"))
            return y if bias is None else y + bias
        kind, p = self._kernels(weight.shape[dim]), self.bits(weight.shape[dim])
        operand = _operands.of(x, (kind, p), lambda: _operand(array(x), kind, p))
        return torch.from_numpy(self.product(operand, weight, dim, amx.NO_BIAS if bias is None else array(bias)))

    def _kernels(self, terms: int) -> str:
        return "dgemm" if backend.active() == "amx" and terms > operands.MAX_TERMS else backend.active()

    def operand(self, x: np.ndarray) -> Operand:
        """x [M, K] float32 on its grids, for `product` with any weight of the same bits; for kernels only."""
        terms = x.shape[1]
        return _operand(x, self._kernels(terms), self.bits(terms))

    def packed(self, weight: Tensor) -> operands.PackedWeight:
        """The weight packed for contractions on AMX along its rows; NumericsError if it is not finite."""
        packed: operands.PackedWeight = self._get(weight, 1, "amx")
        if not packed.finite:
            raise NumericsError(f"the input or the weight of {self.name} is not finite")
        return packed

    def product(self, operand: Operand, weight: Tensor, dim: int, bias: np.ndarray) -> np.ndarray:
        """`contract` with an input already on its grids; the bias may be empty."""
        if isinstance(operand, operands.PackedRows):
            y = np.empty((operand.rows, weight.shape[1 - dim]), np.float32)
            finite = amx.contract(operand, self._get(weight, dim, "amx"), amx.padded_bias(bias), y)
        else:
            y = np.empty((len(operand.values), weight.shape[1 - dim]), np.float32)
            finite = dgemm.contract(operand, self._get(weight, dim, "dgemm"), bias, y)
        if not finite:
            raise NumericsError(f"the input or the weight of {self.name} is not finite")
        return y


def row_exponents(x: Tensor) -> Tensor | None:
    """int64 [M]: smallest e >= -100 with max |row| < 2^e, NOTHING for a row of zeros; None if a row is not finite."""
    if backend.has_kernels(x) and x.dtype == torch.float32:
        exponents = rows.row_exponents(array(x))
        return None if exponents is None else torch.from_numpy(exponents).to(torch.int64)
    largest = x.abs().amax(-1)
    if not torch.isfinite(largest).all():
        return None
    return exponent(largest).masked_fill_(largest == 0, NOTHING)


def input_exponents(x: Tensor) -> Tensor | None:
    """`row_exponents` of the inputs of a layer, computed once if several layers share them."""
    exponents: Tensor | None = _exponents.of(x, (backend.active(),), lambda: row_exponents(x))
    return exponents


def largest_product(x: Tensor, grad: Tensor) -> int | None:
    """Largest x[t] + grad[t] of row exponents of inputs and gradients, int64 [T]; None if each row has a NOTHING."""
    if backend.has_kernels(x):
        largest = int(rows.largest_sum(array(x), array(grad)))
        return None if largest == NOTHING else largest
    live = (x != NOTHING) & (grad != NOTHING)
    return int((x + grad)[live].max()) if bool(live.any()) else None


def product_units(x: Tensor, grad: Tensor, shift: int, x_bits: int) -> tuple[Tensor, Tensor]:
    """2^(x + shift), but 2^-1022 where x or grad is NOTHING, and 2^(x_bits - max(x, MIN_EXPONENT)); float64 [T]."""
    if backend.has_kernels(x):
        up, x_up = torch.empty(len(x), dtype=torch.float64), torch.empty(len(x), dtype=torch.float64)
        rows.product_units(array(x), array(grad), shift, x_bits, MIN_EXPONENT, up.numpy(), x_up.numpy())
        return up, x_up
    live = (x != NOTHING) & (grad != NOTHING)
    return pow2(torch.where(live, x + shift, -1022)), pow2(x_bits - x.clamp(min=MIN_EXPONENT))


def add_products(
    grad: Tensor, up: Tensor, bits: int, x: Tensor, x_up: Tensor, x_bits: int, out: Tensor, fresh: bool
) -> None:
    """out[n, k] += sum_t rne(grad[t, n] up[t]) rne(x[t, k] x_up[t]), exactly, in int64; `fresh`: = instead of +=.

    grad [T, N], x [T, K] float32; up, x_up [T] float64 powers of two; the integers stay within 2^bits and
    2^x_bits, at most 2^27 and 2^22.
    """
    if backend.has_kernels(grad):
        kind = backend.active()
        kernels = gradient if kind == "amx" else dgemm
        inputs = _packed_inputs.of(x, (kind, x_bits), lambda: kernels.pack_inputs(array(x), array(x_up), x_bits))
        kernels.accumulate(array(grad), array(up), bits, inputs, out.numpy(), fresh)
        return
    if fresh:
        out.zero_()
    z = (grad.to(torch.float64) * up[:, None]).round_()
    integers = (x.to(torch.float64) * x_up[:, None]).round_()
    high = (z * 2.0**-_SPLIT_BITS).floor_()
    for half, unit in ((high, 1 << _SPLIT_BITS), (z - high * 2.0**_SPLIT_BITS, 1)):
        for start in range(0, len(z), _CHUNK):
            rows = slice(start, start + _CHUNK)
            out += (half[rows].t() @ integers[rows]).to(torch.int64) * unit


def add_integer_rows(x: Tensor, exponents: Tensor, limit: int, shift: int, ids: Tensor | None, out: Tensor) -> None:
    """out += sum_t rne(x[t] 2^shift), or out[ids[t]] += rne(x[t] 2^shift), over rows with exponents up to `limit`."""
    if backend.has_kernels(x) and x.dtype == torch.float32:
        indices = np.empty(0, np.int64) if ids is None else array(ids)
        rows.add_rows_on_grid(array(x), array(exponents), limit, 2.0**shift, indices, out.numpy())
        return
    fitting = exponents <= limit
    unit = pow2(torch.tensor(shift, device=x.device))
    integers = (x[fitting].to(torch.float64) * unit).round_().to(torch.int64)
    if ids is None:
        out += integers.sum(0).view(out.shape)
    else:
        out.index_add_(0, ids[fitting], integers)
