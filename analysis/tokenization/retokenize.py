"""Do the sampled ids survive decoding and encoding again? Pipelines that pass texts on train on the new ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.tokenization.summary import ratio_of_sums
from analysis.tokenization.tokenizer import RecordedTokenizer
from ppo_repro.errors import UserError

AUDIT_COLUMNS = ["iteration", "sequence", "response", "response_ids", "finish_reason", "episode_ids"]


def edit_operations(a: Sequence[int], b: Sequence[int]) -> int:
    """Insertions, deletions and substitutions in the best alignment of two sequences. Levenshtein, 1966."""
    target = np.asarray(b, dtype=np.int64)
    columns = np.arange(len(target) + 1)
    row = columns.copy()
    for i, token in enumerate(a, 1):
        best = np.empty_like(row)
        best[0] = i
        best[1:] = np.minimum(row[:-1] + (target != token), row[1:] + 1)
        # insertions: min over k <= j of best[k] + (j - k)
        row = np.minimum.accumulate(best - columns) + columns
    return int(row[-1])


def encoded_again(sequences: pd.DataFrame, tokenizer: RecordedTokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """(ids, encode(decode(ids))) of each response of `sequences` (AUDIT_COLUMNS).

    The end token of a response that stopped is in neither. UserError where the decoded text is not the recorded one:
    then the tokenizer is not the run's.
    """
    if "episode_ids" in sequences and sequences["episode_ids"].notna().any():
        raise UserError(
            "task.max_turns: the run has episodes in which an environment speaks, whose text no tokenizer encodes as "
            "it was; the audit is for runs of one turn"
        )
    ids = [list(map(int, row)) for row in sequences["response_ids"]]
    stopped = (sequences["finish_reason"] == "stop").to_numpy(bool)
    # a stop text ends a response too, and belongs to it
    ended = [stop and row[-1] in tokenizer.special_ids for row, stop in zip(ids, stopped, strict=True)]
    text_ids = [row[:-1] if end else row for row, end in zip(ids, ended, strict=True)]
    texts = tokenizer.decode(text_ids)
    for text, recorded, sequence in zip(texts, sequences["response"], sequences["sequence"], strict=True):
        if text != recorded:
            raise UserError(
                f"tokenizer: decodes response {sequence} as {text!r}, recorded is {recorded!r}; restore the run's"
            )
    return text_ids, tokenizer.encode(texts)


def retokenization(sequences: pd.DataFrame, tokenizer: RecordedTokenizer) -> pd.DataFrame:
    """`tok_drift`: one row per response of `sequences` (AUDIT_COLUMNS): encode(decode(ids)) against ids.

    The end token of a response that stopped is left out; any other special token is drift, because no text contains
    it. `drifted`, `edits` (see `edit_operations`), `first_drift_pos` (NaN without drift), `len_delta` (new tokens
    minus old ones), `n_tok`. UserError as `encoded_again`.
    """
    text_ids, again = encoded_again(sequences, tokenizer)
    pairs = list(zip(text_ids, again, strict=True))
    drifted = [a != b for a, b in pairs]
    table = sequences[["iteration", "sequence"]].reset_index(drop=True)
    table["n_tok"] = [len(a) for a in text_ids]
    table["drifted"] = drifted
    table["edits"] = [edit_operations(a, b) if differ else 0 for (a, b), differ in zip(pairs, drifted, strict=True)]
    table["first_drift_pos"] = [
        _first_difference(a, b) if differ else np.nan for (a, b), differ in zip(pairs, drifted, strict=True)
    ]
    table["len_delta"] = [len(b) - len(a) for a, b in pairs]
    return table


def noncanonical_words(word_table: pd.DataFrame, token_ids: pd.Series, tokenizer: RecordedTokenizer) -> pd.Series:
    """Whether each word of one iteration (`kl.word_table`) is cut differently from its text encoded alone; bool.

    `token_ids` [N] in the order of the tokens; special tokens are never noncanonical.
    """
    starts = np.append(np.cumsum(word_table["n_tok"].to_numpy(np.int64)) - word_table["n_tok"], len(token_ids))
    ids = token_ids.to_numpy(np.int64)
    cuts = [ids[a:b].tobytes() for a, b in zip(starts[:-1].astype(int), starts[1:].astype(int), strict=True)]
    texts = word_table["text"].to_list()
    distinct = sorted(set(texts))
    encoded = tokenizer.encode(distinct)
    canonical = {t: np.asarray(row, dtype=np.int64).tobytes() for t, row in zip(distinct, encoded, strict=True)}
    differs = np.array([cut != canonical[text] for cut, text in zip(cuts, texts, strict=True)], dtype=bool)
    return pd.Series(differs & ~word_table["is_special"].to_numpy(bool), index=word_table.index)


def drift_summary(drift: pd.DataFrame, word_table: pd.DataFrame, noncanonical: pd.Series) -> dict[str, float]:
    """drift_seq_frac, drift_token_frac (edits / tokens), noncanonical_word_frac, each with `_se` by response.

    `noncanonical_seq_frac` is another name of drift_seq_frac. noncanonical_word_frac is NaN where a response without
    drift has such a word: then this tokenizer does not encode words one by one, and the term has no meaning.
    """
    each = np.arange(len(drift))
    ones = np.ones(len(drift))
    drifted = drift["drifted"].to_numpy(np.float64)
    by_seq = ratio_of_sums(drifted, ones, each)
    by_token = ratio_of_sums(drift["edits"].to_numpy(np.float64), drift["n_tok"].to_numpy(np.float64), each)
    inside = ~word_table["is_special"].to_numpy(bool)
    sequence = word_table["sequence"].to_numpy(np.int64)[inside]
    flags = noncanonical.to_numpy(np.float64)[inside]
    words = np.bincount(sequence, minlength=len(drift)).astype(np.float64)
    cut_otherwise = np.bincount(sequence, weights=flags, minlength=len(drift)).astype(np.float64)
    by_word = ratio_of_sums(cut_otherwise, words, each)
    if (cut_otherwise[drifted == 0] > 0).any():
        by_word = float("nan"), float("nan")
    return {
        "drift_seq_frac": by_seq[0],
        "drift_seq_frac_se": by_seq[1],
        "noncanonical_seq_frac": by_seq[0],
        "drift_token_frac": by_token[0],
        "drift_token_frac_se": by_token[1],
        "noncanonical_word_frac": by_word[0],
        "noncanonical_word_frac_se": by_word[1],
    }


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length where one is a prefix of the other."""
    shared = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:shared]) != np.asarray(b[:shared]))
    return int(differs[0]) if len(differs) else shared
