"""Each form of a mean over seeds by hand; values that are not finite are counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from ppo_repro.analysis.mean_text import mean_alone, mean_and_half_width, mean_and_interval, mean_and_range

# the half width of the interval of 1 and 3 is t s / sqrt 2 = 12.706 x 1.4142 / 1.4142
FORMS = {
    "{:.1f}": mean_alone,
    "{:.1f} ± 12.7": mean_and_half_width,
    "{:.1f} [-10.7, 14.7]": mean_and_interval,
    "{:.1f} (1.0 to 3.0)": mean_and_range,
}


@pytest.mark.parametrize(("expected", "text"), FORMS.items())
def test_a_mean_over_seeds(expected: str, text: Callable[..., Any]) -> None:
    assert text([1.0, 3.0], "{:.1f}") == expected.format(2.0)
    assert text([1.0, math.nan, 3.0, math.inf], "{:.1f}") == f"{expected.format(2.0)} (2 not finite)"
    assert text([2.0], "{:.1f}") == "2.0"
    assert text([math.nan], "{:.1f}") == "not finite"
