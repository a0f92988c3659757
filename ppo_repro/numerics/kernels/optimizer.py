"""AdamW, the integer sums of the gradient norm and the conversion of gradients, each in one pass over a flat tensor.

AdamW rounds each operation to float32 as the eager code does; sums of squares are exact integers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppo_repro.numerics.arithmetic.grid import LIMB_BITS
from ppo_repro.numerics.kernels.core.compile import kernel
from ppo_repro.numerics.kernels.core.pool import in_parts, results_of_parts
from ppo_repro.numerics.kernels.core.rows import largest_bits
from ppo_repro.numerics.kernels.core.scalar import pow2_32
from ppo_repro.numerics.kernels.token_statistics import Array

_CHUNK = 1 << 10  # sums of this many squares of at most 2^52 fit into int64
_AT_ONCE = 1 << 18  # numbers that are converted before their place is overwritten
_SPLIT, _BELOW = 32, (1 << 32) - 1
_LIMB_MASK, _LIMB_UNIT = (1 << LIMB_BITS) - 1, 2.0**LIMB_BITS
# nanoseconds per element, measured roughly; they only decide how many threads are worth waking
NS_ADAMW, NS_LARGEST, NS_SQUARES, NS_CONVERT = 1.0, 0.15, 0.5, 0.6


class StepConstants(NamedTuple):
    """The factors of one AdamW step, the same for every element."""

    clip: float  # of the gradient, by its global norm
    beta1: float
    rest1: float  # 1 - beta1
    beta2: float
    rest2: float
    second_scale: float  # square root of the second moment's bias correction
    eps: float
    decay: float  # 1 - learning rate x weight decay
    step_size: float  # learning rate over the first moment's bias correction

    def as_float32(self) -> StepConstants:
        """As kernels take them."""
        return StepConstants._make(np.float32(factor) for factor in self)


@kernel
def _adamw(parameter, gradient, mean, square, c):  # type: ignore[no-untyped-def]
    for i in range(parameter.size):
        g = gradient[i] * c.clip
        m = mean[i] * c.beta1 + g * c.rest1
        s = square[i] * c.beta2 + (g * g) * c.rest2
        mean[i], square[i] = m, s
        denominator = np.sqrt(s) / c.second_scale + c.eps
        parameter[i] = parameter[i] * c.decay - (m / denominator) * c.step_size


@kernel
def _largest(x):  # type: ignore[no-untyped-def]
    return np.int32(largest_bits(x.view(np.int32))).view(np.float32)


@kernel
def _squares(x, shift):  # type: ignore[no-untyped-def]
    """sum_i rne(x_i 2^shift)^2 as two integers (high, low): high 2^_SPLIT + low."""
    # float32 holds powers up to 2^127; the products are exact, or so small that they round to 0 in any case
    scale, rest = pow2_32(min(shift, 127)), pow2_32(max(shift - 127, 0))
    high, low = np.int64(0), np.int64(0)
    for start in range(0, x.size, _CHUNK):
        chunk = x[start : start + _CHUNK]
        total = np.int64(0)
        for i in range(chunk.size):
            integer = np.int64(np.int32(np.rint(chunk[i] * scale * rest)))
            total += integer * integer
        high, low = high + (total >> _SPLIT), low + (total & _BELOW)
    return high, low


@kernel
def _convert(integers, unit, out):  # type: ignore[no-untyped-def]
    for i in range(integers.size):
        out[i] = np.float32(np.float64(integers[i]) * unit)


@kernel
def _convert_limbs(high, low, unit, out):  # type: ignore[no-untyped-def]
    for i in range(low.size):
        above, below = np.int64(high[i]) + (low[i] >> LIMB_BITS), low[i] & _LIMB_MASK
        out[i] = np.float32((np.float64(above) * _LIMB_UNIT + np.float64(below)) * unit)


def adamw(parameter: Array, gradient: Array, mean: Array, square: Array, constants: StepConstants) -> None:
    """One AdamW step in place on flat float32 arrays, each operation rounded to float32; `constants` `as_float32`."""

    def run(first: int, last: int) -> None:
        _adamw(parameter[first:last], gradient[first:last], mean[first:last], square[first:last], constants)

    in_parts(run, len(parameter), NS_ADAMW)


def largest(x: Array) -> float:
    """max |x| of a flat float32 array; infinite or NaN if any element is. 0 elements give 0."""
    maxima = results_of_parts(lambda first, last: _largest(x[first:last]), len(x), NS_LARGEST)
    return float(maxima[0] if len(maxima) == 1 else np.max(maxima)) if maxima else 0.0


def sum_of_squares(x: Array, shift: int) -> int:
    """sum_i rne(x_i 2^shift)^2 of a flat float32 array, exactly; |x_i 2^shift| <= 2^26."""
    sums = results_of_parts(lambda first, last: _squares(x[first:last], shift), len(x), NS_SQUARES)
    return sum((high << _SPLIT) + low for high, low in sums)


def to_float32(integers: Array, high: Array | None, unit: float, out: Array) -> None:
    """out = fl32(fl64(high 2^LIMB_BITS + integers) unit), the sum rounded once; integers flat int64, out float32.

    `out` may begin where `integers` does. `high` is int32 or int64, |high| < 2^53; None stands for zeros.
    """
    scratch = np.empty(_AT_ONCE, np.float32)
    for start in range(0, len(out), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(out))
        part = scratch[: stop - start]
        if high is None:
            in_parts(lambda i, j: _convert(integers[start + i : start + j], unit, part[i:j]), stop - start, NS_CONVERT)  # noqa: B023
        else:
            _convert_limbs(high[start:stop], integers[start:stop], unit, part)
        out[start:stop] = part
