"""The products of the exact numerics by the backend in use: contractions, and integer sums over tokens.

All backends give the same bits, because every sum is exact.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.contraction import input_operand, linear, most_outliers, weight_operand
from ppo_repro.numerics.arithmetic.elementwise import pow2
from ppo_repro.numerics.arithmetic.grid import INPUT_GAP, MIN_EXPONENT, ROOM, WEIGHT_GAP, exponent
from ppo_repro.numerics.kernels import outliers
from ppo_repro.numerics.kernels.core import rows
from ppo_repro.numerics.kernels.float64 import inputs as float64_inputs
from ppo_repro.numerics.kernels.float64 import operands as float64
from ppo_repro.numerics.kernels.float64 import product as float64_product
from ppo_repro.numerics.kernels.outliers import Outliers
from ppo_repro.numerics.last_result import LastResult

NOTHING = int(rows.NOTHING)
NO_BIAS = np.empty(0, np.float32)
# an output gradient on its grid is split in two, so that sums over this many tokens are exact in float64
_SPLIT_BITS, _CHUNK = 14, 1 << 16


def array(x: Tensor) -> np.ndarray:
    """A contiguous CPU tensor as an array, without a copy where it already is one."""
    return (x.detach() if x.requires_grad else x).contiguous().numpy()


_operands, _exponents, _packed_inputs = LastResult(), LastResult(), LastResult()


@dataclass(frozen=True)
class Operand:
    """Inputs of linear layers, prepared for one kind of kernels."""

    values: np.ndarray  # float32 [M, K], as they came
    prepared: float64_inputs.Inputs
    outliers: Outliers

    @property
    def exponents(self) -> np.ndarray:
        """int64 [M]: see `rows.row_exponents`."""
        return self.prepared.exponents


def operand(x: np.ndarray) -> Operand:
    """x [M, K] float32, C-contiguous, on its grids, for `PreparedWeight.product`; for kernels only."""
    prepared = float64_inputs.quantise_inputs(x)
    found = outliers.find(x, True, prepared.outliers, 1.0, INPUT_GAP, most_outliers(x.shape[1]))
    return Operand(x, prepared, found)


# models that share frozen weights may take their steps side by side
_changing = threading.Lock()


def _unlock() -> None:
    """In a process that was forked: the thread that held the lock is not there."""
    global _changing
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


class PreparedWeight:
    """A weight matrix prepared for contractions; prepared again when the weight or the backend changes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._source: tuple[int, int, str] = (0, -1, "")
        self._weight: Tensor | None = None  # kept alive, so that no other tensor can get its address
        self._prepared: dict[int, tuple[Any, Outliers]] = {}  # by dimension of the contraction

    def forget(self) -> None:
        """Free what is prepared."""
        with _changing:
            self._source, self._weight, self._prepared = (0, -1, ""), None, {}

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedWeight:
        return PreparedWeight(self.name)  # the copy of a weight has another address

    def _get(self, weight: Tensor, dim: int, kind: str) -> tuple[Any, Outliers]:
        # in-place changes increase the version; new storage under the same parameter has another address
        source = (weight.data_ptr(), weight._version, kind)
        with _changing:
            if source != self._source:
                self._prepared, self._source, self._weight = {}, source, weight.detach()
            found = self._prepared.get(dim)
        if found is None:
            found = self._prepare(weight.detach(), dim, kind)
            with _changing:
                if self._source == source:
                    self._prepared[dim] = found
        return found

    def _prepare(self, weight: Tensor, dim: int, kind: str) -> tuple[Any, Outliers]:
        if kind == "eager":
            return weight_operand(weight if dim == 1 else weight.t(), self._where), outliers.NONE
        values = array(weight)
        prepared: Any = float64.pack_weight(values) if dim == 1 else float64.column_grids(values)
        most = most_outliers(weight.shape[dim])
        return prepared, outliers.find(values, dim == 1, prepared.outliers, ROOM, WEIGHT_GAP, most)

    @property
    def _where(self) -> str:
        return f"the input or the weight of {self.name}"

    def contract(self, x: Tensor, weight: Tensor, dim: int, bias: Tensor | None = None) -> Tensor:
        """sum_k x[.., k] w[.., k] [+ bias] over dimension `dim` of weight [N, K], as `contraction.linear` defines it.

        x [M, K] float32 -> [M, N] for dim 1; [M, N] -> [M, K] for dim 0. Raises NumericsError naming the module if x or
        the weight is not finite.
        """
        if not backend.has_kernels(x):
            return linear(input_operand(x, self._where), self._get(weight, dim, "eager")[0], bias)
        inputs = _operands.of(x, (), lambda: operand(array(x)))
        return torch.from_numpy(self.product(inputs, weight, dim, NO_BIAS if bias is None else array(bias)))

    def panels(self, weight: Tensor) -> tuple[float64.Weight, Outliers]:
        """The weight packed for products in float64 along its rows, and its outliers; NumericsError if not finite."""
        packed, found = self._get(weight, 1, "float64")
        if not packed.finite:
            raise NumericsError(f"{self._where} is not finite")
        return packed, found

    def float64_operand(self, weight: Tensor, dim: int) -> tuple[float64.Weight, Outliers]:
        """The weight, finite or not, for float64 products along `dim`, for 0 without panels; and its outliers."""
        found: tuple[float64.Weight, Outliers] = self._get(weight, dim, "float64")
        return found

    def product(self, operand: Operand, weight: Tensor, dim: int, bias: np.ndarray) -> np.ndarray:
        """`contract` with an input already on its grids, a result of `operand`; the bias may be empty."""
        x = operand.prepared
        (prepared, w_outliers), w = self._get(weight, dim, "float64"), array(weight)
        y = np.empty((len(operand.values), weight.shape[1 - dim]), np.float32)
        if not float64_product.contract(x, prepared, w, bias, y):
            raise NumericsError(f"{self._where} is not finite")
        outliers.add_products(operand.values, operand.outliers, w, w_outliers, y, dim)
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


def factor_exponents(name: str, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents of the rows of x and grad, int64 [T] each; NumericsError where the gradient of `name` is not finite."""
    x_exponents, grad_exponents = input_exponents(x), row_exponents(grad)
    if x_exponents is None or grad_exponents is None:
        raise NumericsError(f"the gradient of {name} is not finite; lower the learning rate")
    return x_exponents, grad_exponents


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
        inputs = _packed_inputs.of(x, (x_bits,), lambda: float64_product.pack_inputs(array(x), array(x_up)))
        float64_product.accumulate(array(grad), array(up), inputs, out.numpy(), fresh)
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
    unit = pow2(torch.full((), shift, dtype=torch.int64, device=x.device))
    integers = (x[fitting].to(torch.float64) * unit).round_().to(torch.int64)
    if ids is None:
        out += integers.sum(0).view(out.shape)
    else:
        out.index_add_(0, ids[fitting], integers)
