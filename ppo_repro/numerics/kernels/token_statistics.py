"""Log-prob, entropy and distances to a reference for each row of logits, as `numerics.logprobs` defines them.

Rows are computed one after another, so that scratch memory is needed for one row only. Logits are float32 [n, V];
`eligible` is bool [n, V], or [n, 0] where every token is eligible. `rows` is what the backward pass needs of each row,
float64 [n, 4]: maximum, total mass, ln(total 2^-39), entropy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.distribution import (
    HALF_BITS,
    HALF_MASK,
    MASS_UNIT,
    NOT_FINITE,
    PART_BITS,
    PART_MASK,
    value_bits,
)
from ppo_repro.numerics.kernels.core.compile import inline, kernel, kernel_part
from ppo_repro.numerics.kernels.core.pool import in_parts
from ppo_repro.numerics.kernels.core.rows import largest_bits_64, round_limbs
from ppo_repro.numerics.kernels.core.scalar import (
    INFINITY_BITS,
    exp32,
    exponent32,
    exponent64,
    log64,
    magnitude_bits,
    ordered,
    pow2_32,
    pow2_64,
)

_PER_UNIT, _PART_UNIT = 1.0 / MASS_UNIT, np.float32(2.0**PART_BITS)
_HALF_MASS = np.float32(0.5 / MASS_UNIT)  # weights up to this have no mass: half a unit is rounded to the even zero
_HALF_UNIT, _PER_HALF = 2.0**HALF_BITS, 2.0**-HALF_BITS
_LEAST, _GREATEST, _NO_WEIGHT = np.int32(-(2**31)), np.int32(2**31 - 1), np.float32(0)
# nanoseconds per token, measured roughly; they only decide how many threads are worth waking
NS_FORWARD, NS_BACKWARD, NS_COMPARE = 1.5, 2.0, 4.5

Array = NDArray[np.generic]


@kernel_part
def extremes(x, eligible):  # type: ignore[no-untyped-def]
    """(maximum over eligible tokens, maximum, minimum) of a row, float32; the first is NaN if no token is eligible."""
    bits = x.view(np.int32)
    best, highest, lowest = _LEAST, _LEAST, _GREATEST
    if eligible.size:
        for v in range(bits.size):
            key = ordered(bits[v])
            highest, lowest = max(highest, key), min(lowest, key)
            best = max(best, key if eligible[v] else _LEAST)
    else:
        for v in range(bits.size):
            key = ordered(bits[v])
            highest, lowest = max(highest, key), min(lowest, key)
        best = highest
    return (
        np.int32(ordered(best)).view(np.float32),
        np.int32(ordered(highest)).view(np.float32),
        np.int32(ordered(lowest)).view(np.float32),
    )


@kernel_part
def top_and_reach(x, eligible, temperature):  # type: ignore[no-untyped-def]
    """The maximum of the scaled eligible logits, and the bits of the largest |scaled logit - maximum| of all tokens.

    Division and subtraction are monotone, so the extremes of the logits give those of the differences.
    """
    best, highest, lowest = extremes(x, eligible)
    top = best / temperature
    above = magnitude_bits(highest / temperature - top)
    below = magnitude_bits(lowest / temperature - top)
    reach = max(above, below)
    if reach >= INFINITY_BITS:
        raise NumericsError(NOT_FINITE)
    return top, reach


@inline
def parts(weight):  # type: ignore[no-untyped-def]
    """The three parts of the mass rne(weight MASS_UNIT), int32, highest first; float32 weights up to 1.

    Every step but the last is exact in float32.
    """
    y = weight * _PART_UNIT
    highest = np.floor(y)
    y = (y - highest) * _PART_UNIT
    middle = np.floor(y)
    lowest = np.rint((y - middle) * _PART_UNIT)
    return np.int32(highest), np.int32(middle), np.int32(lowest)


@inline
def mass(weight):  # type: ignore[no-untyped-def]
    """rne(weight MASS_UNIT), float64."""
    return np.rint(np.float64(weight) * MASS_UNIT)


@kernel_part
def weigh(x, eligible, temperature, top, shifted, weights):  # type: ignore[no-untyped-def]
    """shifted = x / temperature - top, weights = exp(shifted), 0 if not eligible; float32. Returns the total mass."""
    if eligible.size:
        for v in range(x.size):
            s = x[v] / temperature - top
            shifted[v] = s
            weight = exp32(s)
            weights[v] = weight if eligible[v] else _NO_WEIGHT
    else:
        for v in range(x.size):
            s = x[v] / temperature - top
            shifted[v] = s
            weights[v] = exp32(s)
    high, low = np.int64(0), np.int64(0)
    for v in range(weights.size):
        highest, middle, lowest = parts(weights[v])
        high += highest
        low += np.int32((middle << PART_BITS) + lowest)
    return np.float64((high << (2 * PART_BITS)) + low)


@kernel_part
def _expectation(weights, total, values, up, down):  # type: ignore[no-untyped-def]
    """`distribution.expectation` of a row of values on the grid `down` = 1 / `up`; `up` has the type of the values."""
    above, between, below = np.int64(0), np.int64(0), np.int64(0)
    for v in range(weights.size):
        b = np.int64(np.int32(np.rint(values[v] * up)))
        highest, middle, lowest = parts(weights[v])
        above += np.int64(highest) * b
        between += np.int64(middle) * b
        below += np.int64(lowest) * b
    between += below >> PART_BITS
    below = ((between & PART_MASK) << PART_BITS) + (below & PART_MASK)
    return round_limbs(above + (between >> PART_BITS), below, 2 * PART_BITS) * down / total


@kernel_part
def _square(weights):  # type: ignore[no-untyped-def]
    """The sum of the squares of the masses as `distribution.sum_of_squares` has it."""
    highest, middle, lowest = np.int64(0), np.int64(0), np.int64(0)
    for v in range(weights.size):
        m = mass(weights[v])
        h = np.floor(m * _PER_HALF)
        high, low = np.int64(np.int32(h)), np.int64(np.int32(m - h * _HALF_UNIT))
        highest += high * high
        middle += high * low
        lowest += low * low
    middle = middle << 1
    below = lowest + ((middle & HALF_MASK) << HALF_BITS)
    return round_limbs(highest + (middle >> HALF_BITS), below, 2 * HALF_BITS)


@kernel_part
def _difference(weights, shifted, log_total, ref_shifted, ref_log_total, difference):  # type: ignore[no-untyped-def]
    """difference = log p - log q where p has mass, else 0. Returns the bits of the largest magnitude."""
    for v in range(weights.size):
        d = (np.float64(shifted[v]) - log_total) - (np.float64(ref_shifted[v]) - ref_log_total)
        difference[v] = d if weights[v] > _HALF_MASS else 0.0
    return largest_bits_64(difference)


@kernel
def _forward(first, last, logits, targets, eligible, temperature, bits, rows, out):  # type: ignore[no-untyped-def]
    shifted, weights = np.empty(logits.shape[1], np.float32), np.empty(logits.shape[1], np.float32)
    for i in range(first, last):
        if not 0 <= targets[i] < weights.size:
            raise IndexError("a target lies outside the vocabulary")
        top, reach = top_and_reach(logits[i], eligible[i], temperature)
        total = weigh(logits[i], eligible[i], temperature, top, shifted, weights)
        log_total = log64(total * _PER_UNIT)
        e = exponent32(reach)
        entropy = log_total - _expectation(weights, total, shifted, pow2_32(bits - e), pow2_64(e - bits))
        rows[i, 0], rows[i, 1], rows[i, 2], rows[i, 3] = top, total, log_total, entropy
        out[0, i] = np.float64(shifted[targets[i]]) - log_total
        out[1, i] = entropy


@kernel
def _backward(first, last, logits, targets, eligible, temperature, rows, seeds, out):  # type: ignore[no-untyped-def]
    shifted, weights = np.empty(logits.shape[1], np.float32), np.empty(logits.shape[1], np.float32)
    for i in range(first, last):
        total, log_total, entropy = rows[i, 1], rows[i, 2], rows[i, 3]
        weigh(logits[i], eligible[i], temperature, np.float32(rows[i, 0]), shifted, weights)
        gl, gh, gradient = np.float64(seeds[0, i]), np.float64(seeds[1, i]), out[i]
        for v in range(weights.size):
            p = mass(weights[v]) / total
            d = ((np.float64(shifted[v]) - log_total + entropy) * p) * gh
            gradient[v] = np.float32(-(d + gl * p)) / temperature
        t = targets[i]
        p = mass(weights[t]) / total
        d = ((np.float64(shifted[t]) - log_total + entropy) * p) * gh
        gradient[t] = np.float32(-(d + gl * p) + gl) / temperature


@kernel
def _compare(first, last, logits, ref_logits, targets, eligible, temperature, bits, out):  # type: ignore[no-untyped-def]
    v = logits.shape[1]
    shifted, weights, difference = np.empty(v, np.float32), np.empty(v, np.float32), np.empty(v, np.float64)
    ref_shifted, ref_weights = np.empty(v, np.float32), np.empty(v, np.float32)
    for i in range(first, last):
        if not 0 <= targets[i] < v:
            raise IndexError("a target lies outside the vocabulary")
        top, reach = top_and_reach(logits[i], eligible[i], temperature)
        total = weigh(logits[i], eligible[i], temperature, top, shifted, weights)
        ref_top, _ = top_and_reach(ref_logits[i], eligible[i], temperature)
        ref_total = weigh(ref_logits[i], eligible[i], temperature, ref_top, ref_shifted, ref_weights)
        log_total, ref_log_total = log64(total * _PER_UNIT), log64(ref_total * _PER_UNIT)
        out[0, i] = np.float64(shifted[targets[i]]) - log_total
        e = exponent32(reach)
        out[1, i] = log_total - _expectation(weights, total, shifted, pow2_32(bits - e), pow2_64(e - bits))
        out[2, i] = _square(weights) / (total * total)
        out[3, i] = np.float64(ref_shifted[targets[i]]) - ref_log_total
        e = exponent64(_difference(weights, shifted, log_total, ref_shifted, ref_log_total, difference))
        out[4, i] = _expectation(weights, total, difference, pow2_64(bits - e), pow2_64(e - bits))


def forward(logits: Array, targets: Array, temperature: float, eligible: Array) -> tuple[Array, Array]:
    """Log-prob and entropy, float32 [2, n], and `rows`. Raises NumericsError, and IndexError for a bad target."""
    n, v = logits.shape
    rows, out = np.empty((n, 4)), np.empty((2, n), np.float32)
    arguments = (logits, targets, eligible, np.float32(temperature), value_bits(v), rows, out)
    in_parts(lambda first, last: _forward(first, last, *arguments), n, NS_FORWARD * v)
    return out, rows


def backward(logits: Array, targets: Array, temperature: float, eligible: Array, rows: Array, seeds: Array) -> Array:
    """Gradient of the logits, float32 [n, V], from `seeds`: the gradients of log-prob and entropy, float32 [2, n]."""
    out = np.empty_like(logits)
    arguments = (logits, targets, eligible, np.float32(temperature), rows, seeds, out)
    in_parts(lambda first, last: _backward(first, last, *arguments), len(logits), NS_BACKWARD * logits.shape[1])
    return out


def compare(logits: Array, ref_logits: Array, targets: Array, temperature: float, eligible: Array) -> Array:
    """float32 [5, n]: log-prob, entropy, sum of squares, reference log-prob, KL(policy || reference).

    Raises NumericsError, and IndexError for a bad target.
    """
    n, v = logits.shape
    out = np.empty((5, n), np.float32)
    arguments = (logits, ref_logits, targets, eligible, np.float32(temperature), value_bits(v), out)
    in_parts(lambda first, last: _compare(first, last, *arguments), n, NS_COMPARE * v)
    return out
