"""Numbers in answers: read by one grammar, compared by value, beside what four public graders read.

The graders of the table are the patterns of lm-evaluation-harness (gsm8k, flexible-extract), verl (gsm8k, flexible),
simple-evals (mgsm) and Qwen2.5-Math (the last number), as of 2025.
"""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.tasks.numbers import is_number, last_number


def lm_eval(text: str) -> str:
    found = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)
    return "".join(found[-1]).strip("$.").replace(",", "") if found else ""


def verl(text: str) -> str:
    found = [x for x in re.findall(r"(\-?[0-9\.\,]+)", text) if x not in ("", ".")]
    return found[-1].replace(",", "") if found else ""


def simple_evals(text: str) -> str:
    found = re.findall(r"\d+\.?\d*", text.replace(",", ""))
    return found[-1].rstrip(".") if found else ""


def qwen(text: str) -> str:
    found = re.findall(r"-?\d*\.?\d+", text.replace(",", ""))
    return found[-1] if found else ""


GRADERS = (lm_eval, verl, simple_evals, qwen)
# text, the number in it, and what each of GRADERS reads
CASES = [
    ("17 + 28 = 45", "45", ("45", "45", "45", "45")),
    ("It is 1,234,567.50 in all.", "1234567.50", ("1234567.50", "1234567.50", "1234567.50", "1234567.50")),
    ("3-2", "2", ("-2", "-2", "2", "-2")),
    ("x = -2", "-2", ("-2", "-2", "2", "-2")),
    ("x = −2", "-2", ("2", "2", "2", "2")),
    ("x = –2", "-2", ("2", "2", "2", "2")),
    ("from 10–12", "12", ("12", "12", "12", "12")),
    ("a loss of -$5", "-5", ("-$5", "5", "5", "5")),
    ("a loss of $-5", "-5", ("-5", "-5", "5", "-5")),
    ("(5) -7 degrees", "-7", ("-7", "-7", "7", "-7")),
    ("about 12.", "12", ("12", "12.", "12", "12")),
    ("p = .5", "0.5", ("5", ".5", "5", ".5")),
    ("1e3 grams", "1e3", ("3", "3", "3", "3")),
    ("1.5 × 10^3", "1.5e3", ("3", "3", "3", "3")),
    (r"$1.5 \times 10^{-3}$", "1.5e-3", ("-3", "-3", "3", "-3")),
    ("2·10⁻³", "2e-3", ("10", "10", "10", "10")),
    (r"\$9{,}500", "9500", ("500", "500", "500", "500")),
    (r"\boxed{9\,500}", "9500", ("500", "500", "500", "500")),
    ("9\u202f500 items", "9500", ("500", "500", "500", "500")),
    ("that is 1/2", "1/2", ("2", "2", "2", "2")),
    ("that is ½", "1/2", ("", "", "", "")),
    (r"\boxed{-\frac{3}{4}}", "-3/4", ("4", "4", "4", "4")),
    ("x = \u20115", "-5", ("5", "5", "5", "5")),
    ("答案：－5", "-5", ("5", "5", "5", "5")),
    ("a loss of -₹500", "-500", ("500", "500", "500", "500")),
    ("1'234'567 people", "1234567", ("567", "567", "567", "567")),
    ("₹12,34,567", "1234567", ("1234567", "1234567", "1234567", "1234567")),
    ("1.234.567 Euro", "1234567", ("1.234.567", "1.234.567", "567", ".567")),
    (r"\boxed{\frac12}", "1/2", ("12", "12", "12", "12")),
    (r"-\dfrac{-3}{4}", "3/4", ("4", "4", "4", "4")),
    (r"\cfrac{3}{4}", "3/4", ("4", "4", "4", "4")),
    ("2½ cups", "5/2", ("2", "2", "2", "2")),
    (r"2\frac{1}{2}", "5/2", ("2", "2", "2", "2")),
    ("9.81 m/s2", "9.81", ("2", "2", "2", "2")),
    ("9.81 m/s^{2}", "9.81", ("2", "2", "2", "2")),
    (r"12 \text{ cm}^2", "12", ("2", "2", "2", "2")),
    ("between 10%-20%", "20", ("-20", "-20", "20", "-20")),
    ("5€–7€", "7", ("7", "7", "7", "7")),
    ("$3$-$5$", "5", ("-$5", "5", "5", "5")),
    ("$-5$", "-5", ("-5", "-5", "5", "-5")),
    ("1/2km", "1/2", ("2", "2", "2", "2")),
    ("4 and5", "5", ("5", "5", "5", "5")),
    ("12\nAnswer7", "7", ("7", "7", "7", "7")),
    ("8 kg/m3", "8", ("3", "3", "3", "3")),
    ("3x5", "5", ("5", "5", "5", "5")),
    ("2^10", "10", ("10", "10", "10", "10")),
    ("50%", "50", ("50", "50", "50", "50")),
    ("on 12/05/2020", "2020", ("2020", "2020", "2020", "2020")),
    ("1,2", "2", ("12", "12", "12", "12")),
    ("version 1.2.3", "3", ("1.2.3", "1.2.3", "3", ".3")),
    ("1/0", "0", ("0", "0", "0", "0")),
    ("", None, ("", "", "", "")),
    ("٣", None, ("", "", "٣", "٣")),
]


@pytest.mark.parametrize(("text", "number", "others"), CASES)
def test_the_last_number(text: str, number: str | None, others: tuple[str, ...]) -> None:
    found = last_number(text)
    assert (found is None) == (number is None)
    if found is not None and number is not None:
        assert Fraction(found) == Fraction(number)
    assert tuple(grader(text) for grader in GRADERS) == others


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
