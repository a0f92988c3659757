"""Round deliberately to other number formats (`mismatch.sampler.precision`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo_repro.numerics.definition.elementary import Array, D, F, quiet

# stored bits of the significand, smallest exponent of a normal number, largest number, what numbers beyond it become
FLOATS = {
    "bfloat16": (7, -126, 255 * 2.0**120, np.inf),
    "float16": (10, -14, 65504.0, np.inf),
    "float8_e4m3": (3, -6, 448.0, 448.0),
    "float8_e5m2": (2, -14, 57344.0, 57344.0),
}


@dataclass(frozen=True)
class Rounding:
    """Formats to which a model rounds: results of operations, inputs of linear layers, keys and values."""

    activations: str = "float32"
    inputs: str = "float32"
    cache: str = "float32"


def nearest(form: str, x: Array) -> Array:
    """Return the nearest number of a format, ties to even; beyond its range infinity, or in 8 bits the largest number.

    Kernel: `round_float`.
    """
    if form == "int8":
        return np.clip(np.rint(x), F(-127), F(127))
    stored, smallest, largest, beyond = FLOATS[form]
    exponent = np.maximum(np.frexp(x.astype(D))[1] - 1, smallest)
    step = np.ldexp(1.0, exponent - stored)
    y = np.rint(x.astype(D) / step) * step
    return np.where(np.abs(y) > largest, np.copysign(beyond, x), y).astype(F)


@quiet
def rounded(form: str, x: Array, scaled: bool = True) -> Array:
    """Round x [.., K]. In 8 bits y = s nearest(x / s) with a scale for each row, s = max |x| / largest number.

    A row whose scale is not above 0 becomes zeros. Without `scaled`, s = 1 in floating-point formats.

    Kernel: `round_row`.
    """
    if form == "float32":
        return x
    if form != "int8" and not (scaled and form.startswith("float8")):
        return nearest(form, x)
    largest = F(127) if form == "int8" else F(FLOATS[form][2])
    s = np.abs(x).max(-1, keepdims=True) / largest
    return np.where(s > 0, nearest(form, x / s) * s, F(0) * x)
