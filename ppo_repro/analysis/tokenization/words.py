"""Find the word of each recorded token, under a convention for the white space between words.

`boundary="leading"`: white space belongs to the word after it, as in most byte-level vocabularies; `"trailing"`: to the
word before it. A token belongs to one word only. So a token such as " cat" keeps its space under both conventions and
counts as straddling under `trailing`: dividing its probability at the border would need the whole distribution, which
is not recorded (Pimentel and Meister, 2024; Oh and Schuler, 2024).

Unlike the recorded `word_id`, words here depend on the text and the convention, not on how the text was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.statistics.clusters import Ints

Boundary = Literal["leading", "trailing"]
BOUNDARIES: tuple[Boundary, ...] = ("leading", "trailing")
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Text:
    """Concatenated text of the responses of one iteration."""

    codes: npt.NDArray[np.uint32]  # [C] code points
    starts: Ints  # [B + 1] where each response starts, characters
    byte_lengths: Ints  # [B] of each response in UTF-8


@dataclass(frozen=True)
class Words:
    """Word of every token: arrays [N] in the order of the tokens."""

    word_id: Ints  # within the response, from 0
    sub_idx: Ints  # token within the word, from 0
    sub_len: Ints  # tokens of the word
    is_special: Bools  # the end token, or another token without text that is a word of its own
    straddles: Bools  # has characters of more than one word, so that the convention cannot be followed


def text_of(sequences: pd.DataFrame) -> Text:
    """Return the text of the column `response` of one iteration's sequences."""
    responses = list(sequences["response"])
    octets = np.array([len(response.encode()) for response in responses], dtype=np.int64)
    codes = np.frombuffer("".join(responses).encode("utf-32-le"), dtype="<u4")
    return Text(codes, _offsets([len(response) for response in responses]), octets)


def find_words(tokens: pd.DataFrame, text: Text, boundary: Boundary) -> Words:
    """Return the words of one iteration's tokens.

    A word is a longest sequence of characters that are not white space. It includes the white space before it (leading)
    or after it (trailing). White space without such a neighbour is a word of its own.

    A token belongs to the word of its last character that is not white space. A token of white space alone belongs to
    the word of the white space. A token that ends inside a character belongs to the word of the character.

    `tokens` has the columns iteration, sequence, position, char_start, char_end and sub_idx. Raises UserError on
    another boundary.
    """
    if boundary not in BOUNDARIES:
        raise UserError(f"boundary = {boundary!r}: must be one of {', '.join(BOUNDARIES)}")
    first_tokens = _first_tokens(tokens)
    sequence = tokens["sequence"].to_numpy(np.int64)
    start, end = (text.starts[sequence] + tokens[name].to_numpy(np.int64) for name in ("char_start", "char_end"))
    has_text = end > start
    is_first = np.zeros(len(tokens), dtype=bool)
    is_first[first_tokens] = True
    is_in_empty_response = text.starts[sequence] == text.starts[sequence + 1]
    is_special = _has_own_word(tokens["sub_idx"].to_numpy(np.int64), ~has_text, is_first) | is_in_empty_response

    space = _is_space(text)
    character_words = _character_words(text, space, boundary)
    last = np.where(has_text, _last_character(space, start, end), start)
    # a token without text at the end of the whole text starts behind the last character
    inside = np.minimum(last, len(character_words) - 1)
    token_words = character_words[inside] if len(character_words) else np.zeros(len(tokens), np.int64)
    begins = is_first | is_special
    begins[1:] |= is_special[:-1] | (token_words[1:] != token_words[:-1])
    straddles = np.zeros(len(tokens), dtype=bool)
    straddles[has_text] = character_words[start[has_text]] != character_words[end[has_text] - 1]
    return _numbered(begins, first_tokens, is_special, straddles)


def _first_tokens(tokens: pd.DataFrame) -> Ints:
    """Return the index of each response's first token.

    Raises ValueError unless rows are one iteration's tokens in order.
    """
    sequence, position = tokens["sequence"].to_numpy(np.int64), tokens["position"].to_numpy(np.int64)
    starts = np.flatnonzero(position == 0)
    expected = np.arange(len(tokens)) - starts[sequence] if len(starts) > sequence.max(initial=-1) else None
    if tokens["iteration"].nunique() > 1 or expected is None or (expected != position).any():
        raise ValueError("tokens must be those of one iteration, in their recorded order")
    return starts


def _is_space(text: Text) -> Bools:
    """Return a bool [C]: whether each character is white space (`str.isspace`)."""
    unique, inverse = np.unique(text.codes, return_inverse=True)
    return np.array([chr(code).isspace() for code in unique], dtype=bool)[inverse] if len(unique) else np.zeros(0, bool)


def _offsets(lengths: list[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64)


def _has_own_word(recorded_sub_idx: Ints, without_text: Bools, is_first: Bools) -> Bools:
    """Return which tokens without text share no recorded word with the next token.

    A token that ends inside a character shares its recorded word with the next token; a special token does not.
    """
    next_is_apart = np.ones(len(without_text), dtype=bool)
    next_is_apart[:-1] = (recorded_sub_idx[1:] == 0) | is_first[1:]
    return np.asarray(without_text & next_is_apart)


def _character_words(text: Text, space: Bools, boundary: Boundary) -> Ints:
    """Return the word index of every character, counted over the whole text."""
    begins = np.zeros(len(space), dtype=bool)
    has_text = text.starts[:-1] < text.starts[1:]
    begins[text.starts[:-1][has_text]] = True
    opens = space if boundary == "leading" else ~space
    begins[1:] |= opens[1:] & ~opens[:-1]
    return np.cumsum(begins) - 1


def _last_character(space: Bools, start: Ints, end: Ints) -> Ints:
    """Return the index of each span's last character that is not white space, or of its last character if all are."""
    if not len(space):
        return start
    last_text = np.maximum.accumulate(np.where(space, -1, np.arange(len(space))))
    last = last_text[np.maximum(end - 1, 0)]
    return np.where(last >= start, last, end - 1)


def _numbered(begins: Bools, first_tokens: Ints, is_special: Bools, straddles: Bools) -> Words:
    """Return the words, from which tokens begin one."""
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, len(begins)))
    word = np.cumsum(begins) - 1  # counted over all responses
    tokens_by_response = np.diff(np.append(first_tokens, len(begins)))
    return Words(
        word_id=word - np.repeat(word[first_tokens], tokens_by_response),
        sub_idx=np.arange(len(begins)) - starts[word],
        sub_len=lengths[word],
        is_special=is_special,
        straddles=straddles,
    )
