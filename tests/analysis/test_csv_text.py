"""CSV: no text is computed by a spreadsheet, numbers stay numbers, and every text can be read back."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.analysis.csv_text import STARTS, cell, csv_text

COMPUTED = ["=1+1", "+x", "-x", "@x", "\tx", "\rx", "\nx", "＝x", "=", "-", "'=1", "-1e", "-1 "]


def read_back(text: str) -> pd.DataFrame:
    frame = pd.read_csv(io.StringIO(text), keep_default_na=False, dtype={"text": str})
    return frame.assign(text=frame["text"].str.removeprefix("'"))


@pytest.mark.parametrize("text", COMPUTED)
def test_a_text_that_a_spreadsheet_would_compute_begins_with_an_apostrophe(text: str) -> None:
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize(
    "value", ["-1", "+0.5", "-1e-3", "-inf", "1-1", "a=1", "", -1, -0.5, float("-inf"), None, True]
)
def test_numbers_and_harmless_texts_stay(value: object) -> None:
    assert cell(value) is value


def test_numeric_columns_keep_every_digit_and_names_are_cells_too() -> None:
    frame = pd.DataFrame({"=a": [-0.1, np.nextafter(-0.1, 0)], "n": [-1, 2], "text": ["=x", "-2"]})
    text = csv_text(frame)
    assert text == "'=a,n,text\n-0.1,-1,'=x\n-0.09999999999999999,2,-2\n"
    back = pd.read_csv(io.StringIO(text))
    assert back["'=a"].tolist() == frame["=a"].tolist()
    assert back["n"].tolist() == [-1, 2]


printed = st.text(st.sampled_from([*STARTS, "a", "1", '"', ",", " ", "é"]), max_size=6)


@given(st.lists(printed, min_size=1, max_size=5))
def test_every_text_can_be_read_back(texts: list[str]) -> None:
    frame = pd.DataFrame({"n": range(len(texts)), "text": pd.Series(texts, dtype=object)})
    assert read_back(csv_text(frame))["text"].tolist() == texts
