"""What of a response is the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.tasks.answers import extracted, is_answer


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("17 + 28 = 45", "45"),
        ("It is 1,234,567.50 in all.", "1234567.50"),
        ("3-2", "2"),
        ("x = -2", "-2"),
        ("(5) -7 degrees", "-7"),
        ("1,2", "2"),
        ("about 12.", "12"),
        ("none", None),
        ("", None),
        ("٣", None),
    ],
)
def test_the_last_number(response: str, number: str | None) -> None:
    assert extracted(response, "last_number") == number


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("<answer>6</answer> no: <answer>7\n</answer> so", "7\n"),
        ("<answer><answer>7</answer>", "7"),
        ("<answer>7", None),
        ("7</answer>", None),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_answer_tags(response: str, answer: str | None) -> None:
    assert extracted(response, "answer_tags") == answer


def test_numbers_are_compared_by_value_and_texts_by_letters() -> None:
    assert is_answer("so 85.0", "85", "last_number") and not is_answer("so 85.1", "85", "last_number")
    assert is_answer("85,000", "85000", "last_number") and not is_answer("85", "eighty-five", "last_number")
    assert not is_answer("85.0", "85", "exact") and is_answer(" 85\n", "85", "exact")
    assert is_answer("<answer> 85 </answer>", "85", "answer_tags") and not is_answer("85", "85", "answer_tags")


@given(st.text(max_size=40), st.integers(-(10**9), 10**9))
def test_a_number_after_any_text_and_a_space_is_the_last_one(text: str, number: int) -> None:
    assert is_answer(f"{text} {number}", str(number), "last_number")
    assert is_answer(f"{text} {number:,}", str(number), "last_number")
    assert is_answer(f"{text}<answer>{number}</answer>", str(number), "answer_tags")
