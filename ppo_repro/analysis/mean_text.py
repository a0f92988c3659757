"""Write the mean of a measure over seeds as text. Values that are not finite are left out and counted.

text                      function                  used for
0.360                     `mean_alone`              measures beside the one that is compared
0.360 ± 0.150             `mean_and_half_width`     `analyse table`; pages of grids with many seeds
0.360 (0.285 to 0.491)    `mean_and_range`          pages of grids with few seeds
0.360 [0.210, 0.510]      `mean_and_interval`       pages of studies
+0.045 [-0.013, +0.103]   `with_interval`           numbers that are computed already, such as differences
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ppo_repro.analysis.significance import one_sample, t_interval
from ppo_repro.statistics.clusters import Floats

FORM = "{:.3f}"
NOT_FINITE = "not finite"
HALF_WIDTH = "mean ± half of the 95 % Student interval"


def finite_of(values: npt.ArrayLike) -> tuple[Floats, str]:
    """Return the finite values, and the text that counts the others: ` (2 not finite)`, "" for none."""
    numbers = np.asarray(values, np.float64)
    finite = numbers[np.isfinite(numbers)]
    others = len(numbers) - len(finite)
    return finite, f" ({others} {NOT_FINITE})" if others else ""


def _finite_text(values: npt.ArrayLike, text: Callable[[Floats], str], nothing: str = NOT_FINITE) -> str:
    """Return the text of the finite values with the count of the others, or `nothing` if no value is finite."""
    finite, others = finite_of(values)
    return text(finite) + others if len(finite) else nothing


def mean_alone(values: npt.ArrayLike, form: str, nothing: str = NOT_FINITE) -> str:
    """Return the mean as text, or `nothing` if no value is finite."""
    return _finite_text(values, lambda finite: form.format(finite.mean()), nothing)


def mean_and_half_width(values: npt.ArrayLike, form: str = FORM) -> str:
    """Return mean and half width of the 95 % Student interval; only the mean if the values do not vary."""

    def text(finite: Floats) -> str:
        mean = one_sample(finite)
        half = t_interval(mean, 0.95)[1] - mean.mean
        return form.format(mean.mean) if math.isnan(half) else f"{form} ± {form}".format(mean.mean, half)

    return _finite_text(values, text)


def mean_and_range(values: npt.ArrayLike, form: str = FORM) -> str:
    """Return mean, smallest and largest value; only the mean of one value."""

    def text(finite: Floats) -> str:
        if len(finite) == 1:
            return form.format(finite[0])
        return f"{form} ({form} to {form})".format(finite.mean(), finite.min(), finite.max())

    return _finite_text(values, text)


def mean_and_interval(values: npt.ArrayLike, form: str = FORM) -> str:
    """Return mean and 95 % Student interval; only the mean if the values do not vary."""

    def text(finite: Floats) -> str:
        mean = one_sample(finite)
        return with_interval(form, mean.mean, *t_interval(mean, 0.95))

    return _finite_text(values, text)


def with_interval(form: str, mean: float, low: float, high: float) -> str:
    """Return "mean [low, high]" as text, only the mean if low is NaN, and "not finite" if the mean is NaN."""
    if math.isnan(mean):
        return NOT_FINITE
    return form.format(mean) if math.isnan(low) else f"{form} [{form}, {form}]".format(mean, low, high)
