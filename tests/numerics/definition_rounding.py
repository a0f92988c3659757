"""Rounding on purpose to other number formats, written out in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.numerics.definition_elementary import Array, D, F, quiet

# stored bits of the significand, smallest exponent of a normal number, largest number, what numbers beyond it become
FLOATS = {
    "bfloat16": (7, -126, 255 * 2.0**120, np.inf),
    "float16": (10, -14, 65504.0, np.inf),
    "float8_e4m3": (3, -6, 448.0, 448.0),
    "float8_e5m2": (2, -14, 57344.0, 57344.0),
}


@dataclass(frozen=True)
class Rounding:
    """The formats that a model rounds to: results of its steps, inputs of linear layers, the cache."""

    activations: str = "float32"
    inputs: str = "float32"
    cache: str = "float32"


def nearest(form: str, x: Array) -> Array:
    """The nearest number of a format, ties to even; infinity or, in 8 bits, the largest number beyond its range."""
    if form == "int8":
        return np.clip(np.rint(x), F(-127), F(127))
    stored, smallest, largest, beyond = FLOATS[form]
    exponent = np.maximum(np.frexp(x.astype(D))[1] - 1, smallest)
    step = np.ldexp(1.0, exponent - stored)
    y = np.rint(x.astype(D) / step) * step
    return np.where(np.abs(y) > largest, np.copysign(beyond, x), y).astype(F)


@quiet
def rounded(form: str, x: Array, scaled: bool = True) -> Array:
    """x [.., K] rounded. In 8 bits y = s nearest(x / s) with a scale for each row, s = max |x| / largest number.

    A row without a scale above 0 becomes zeros. Not `scaled`: s = 1 in floating-point formats.
    """
    if form == "float32":
        return x
    if form != "int8" and not (scaled and form.startswith("float8")):
        return nearest(form, x)
    largest = F(127) if form == "int8" else F(FLOATS[form][2])
    s = np.abs(x).max(-1, keepdims=True) / largest
    return np.where(s > 0, nearest(form, x / s) * s, F(0) * x)
