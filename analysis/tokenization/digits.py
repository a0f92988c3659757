"""How are numbers cut into tokens, and what KL and entropy do their tokens carry?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.tokenization.kl import METRICS
from analysis.tokenization.words import Text, is_digit, is_space, text_of

DIGIT_COLUMNS = ["number", "segmentation", "n_tok", "n_digits", "n", *METRICS, "kl_k1_per_digit", "kl_exact_per_digit"]
Ints = npt.NDArray[np.int64]


def digit_table(token_table: pd.DataFrame, sequences: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Table `digit_table` of one iteration: one row per number and segmentation, commonest first; and numbers left out.

    A number is a longest run of 0 to 9 within a response. `segmentation` such as 20|24, `n` occurrences, METRICS
    summed over the number's tokens, mean over occurrences, nats. Numbers with a token that contains anything but
    digits, other than white space before them, are left out and counted.
    """
    text = text_of(sequences)
    first_digit, lengths = _numbers(text)
    tokens = _tokens_with_digits(token_table, text, first_digit)
    numbers = tokens.groupby("number").agg(
        cuts=("cut", tuple),
        n_tok=("cut", "size"),
        digits=("digits", "sum"),
        mixed=("mixed", "any"),
        **{name: (name, "sum") for name in METRICS},
    )
    # digits in a token of another number are missing from the sum
    whole = numbers[~numbers["mixed"] & (numbers["digits"] == lengths[numbers.index])].copy()
    whole = whole.reset_index(drop=True).assign(
        number=np.array(_texts(text, first_digit, lengths), object)[whole.index]
    )
    grouped = whole.groupby(["number", "cuts"], sort=False)
    table = grouped[["n_tok", *METRICS]].mean()
    table["n"] = grouped.size()
    table = table.reset_index()
    table["segmentation"] = [_cut(number, cuts) for number, cuts in zip(table["number"], table["cuts"], strict=True)]
    table["n_digits"] = table["number"].str.len().astype(np.int64)
    table["n_tok"] = table["n_tok"].astype(np.int64)
    for name in ("kl_k1", "kl_exact"):
        table[f"{name}_per_digit"] = table[name] / table["n_digits"]
    order = table.sort_values(["n", "number", "segmentation"], ascending=[False, True, True], ignore_index=True)
    return order[DIGIT_COLUMNS], len(lengths) - len(whole)


def _numbers(text: Text) -> tuple[Ints, Ints]:
    """First character and length of every number."""
    digit = is_digit(text)
    begins = digit.copy()
    begins[1:] &= ~digit[:-1]
    first = text.starts[:-1][text.starts[:-1] < len(digit)]
    begins[first] = digit[first]
    return np.flatnonzero(begins), np.bincount(np.cumsum(begins)[digit] - 1, minlength=int(begins.sum()))


def _tokens_with_digits(table: pd.DataFrame, text: Text, first_digit: Ints) -> pd.DataFrame:
    """For each token with a digit: the number of its last digit, where in it the token begins, digits in it, mixed."""
    sequence = table["sequence"].to_numpy(np.int64)
    start, end = (text.starts[sequence] + table[name].to_numpy(np.int64) for name in ("char_start", "char_end"))
    digits, spaces = (np.concatenate([[0], np.cumsum(of)]) for of in (is_digit(text), is_space(text)))
    rows = np.flatnonzero(digits[end] > digits[start])
    start, end = start[rows], end[rows]
    # the running count reaches its value at the token's end one character behind the token's last digit
    behind = np.searchsorted(digits, digits[end])
    number = np.searchsorted(first_digit, behind - 1, side="right") - 1
    begin = np.maximum(start, first_digit[number])
    columns = table.iloc[rows][METRICS].reset_index(drop=True)
    columns["number"] = number
    columns["cut"], columns["digits"] = begin - first_digit[number], behind - begin
    columns["mixed"] = (behind != end) | (spaces[begin] - spaces[start] != begin - start)
    return columns


def _cut(number: str, cuts: tuple[int, ...]) -> str:
    return "|".join(number[a:b] for a, b in zip(cuts, (*cuts[1:], len(number)), strict=True))


def _texts(text: Text, first_digit: Ints, lengths: Ints) -> list[str]:
    digits = text.codes.astype(np.uint8).tobytes().decode("latin-1")
    return [digits[a : a + n] for a, n in zip(first_digit.tolist(), lengths.tolist(), strict=True)]
