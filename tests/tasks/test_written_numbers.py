"""Numbers in answers: read by one grammar, compared by value."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.tasks.written_numbers import is_number, last_number

CASES = [
    ("17 + 28 = 45", "45"),
    ("It is 1,234,567.50 in all.", "1234567.50"),
    ("3-2", "2"),
    ("x = -2", "-2"),
    ("x = −2", "-2"),
    ("x = –2", "-2"),
    ("from 10–12", "12"),
    ("a loss of -$5", "-5"),
    ("a loss of $-5", "-5"),
    ("(5) -7 degrees", "-7"),
    ("about 12.", "12"),
    ("p = .5", "0.5"),
    ("1e3 grams", "1e3"),
    ("1.5 × 10^3", "1.5e3"),
    (r"$1.5 \times 10^{-3}$", "1.5e-3"),
    ("2·10⁻³", "2e-3"),
    (r"\$9{,}500", "9500"),
    (r"\boxed{9\,500}", "9500"),
    ("9\u202f500 items", "9500"),
    ("that is 1/2", "1/2"),
    ("that is ½", "1/2"),
    (r"\boxed{-\frac{3}{4}}", "-3/4"),
    ("x = \u20115", "-5"),
    ("答案：－5", "-5"),
    ("a loss of -₹500", "-500"),
    ("1'234'567 people", "1234567"),
    ("₹12,34,567", "1234567"),
    ("1.234.567 Euro", "1234567"),
    (r"\boxed{\frac12}", "1/2"),
    (r"-\dfrac{-3}{4}", "3/4"),
    (r"\cfrac{3}{4}", "3/4"),
    ("2½ cups", "5/2"),
    (r"2\frac{1}{2}", "5/2"),
    ("9.81 m/s2", "9.81"),
    ("9.81 m/s^{2}", "9.81"),
    (r"12 \text{ cm}^2", "12"),
    ("between 10%-20%", "20"),
    ("5€–7€", "7"),
    ("$3$-$5$", "5"),
    ("$-5$", "-5"),
    ("1/2km", "1/2"),
    ("4 and5", "5"),
    ("12\nAnswer7", "7"),
    ("8 kg/m3", "8"),
    ("3x5", "5"),
    ("2^10", "10"),
    ("50%", "50"),
    ("on 12/05/2020", "2020"),
    ("1,2", "2"),
    ("version 1.2.3", "3"),
    ("1/0", "0"),
    ("", None),
    ("٣", None),
]


@pytest.mark.parametrize(("text", "number"), CASES)
def test_the_last_number(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (found is None) == (number is None)
    if found is not None and number is not None:
        assert Fraction(found) == Fraction(number)


@given(st.fractions(-(10**9), 10**9, max_denominator=1000))
def test_a_number_in_any_spelling_has_its_value(value: Fraction) -> None:
    sign, size = "-" if value < 0 else "", abs(value)
    top, bottom = size.numerator, size.denominator
    spellings = [f"{sign}{top}/{bottom}", rf"{sign}\frac{{{top}}}{{{bottom}}}"]
    if bottom == 1:
        groups = f"{top:,}"
        spellings += [f"{sign}{top}", f"{sign}{top}.0", f"{sign}{top}e0", f"{sign}{top} × 10^0", sign + groups]
        spellings += [sign + groups.replace(",", between) for between in ("{,}", r"\,", "\u202f")]
        spellings += [f"{sign}${groups}", f"{groups}".join(("−", "")) if sign else groups]
    for spelling in spellings:
        found = last_number(f"7 of 8: {spelling}.")
        assert found is not None, spelling
        assert is_number(found, str(value)), (spelling, found)
        assert is_number(str(value), spelling), spelling
        assert not is_number(found, str(value + 1)), spelling


@pytest.mark.parametrize("digits", [4000, 5000, 100_000])
def test_long_numbers_are_compared_too(digits: int) -> None:
    """Python reads no number of more than 4,300 digits."""
    found = last_number("so " + "7" * digits)
    assert found is not None
    assert is_number(found, "7" * digits)
    assert not is_number(found, "7" * (digits - 1))
    assert last_number("1e999999999") == "999999999", "no exponent of so many digits"


@pytest.mark.parametrize("answer", ["eighty-five", "1 2", "", "85 apples", "5-3"])
def test_an_answer_that_is_no_number_equals_none(answer: str) -> None:
    assert not is_number("85", answer)
