"""Average KL and entropy of one iteration in every unit, in two ways, with standard errors by response."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from ppo_repro.analysis.stats.clusters import Floats, ratio_of_sums
from ppo_repro.analysis.tokenization.token_kl import METRICS

UNITS = {"token": "n_tok", "word": "n_word", "char": "n_char", "byte": "n_byte"}
Row = tuple[object, ...]  # SUMMARY_COLUMNS
SUMMARY_COLUMNS = ["metric", "unit", "reduction", "value", "se", "n_units", "n_sequences", "n_undefined", "n_nonfinite"]


def summary_table(table: pd.DataFrame, word_table: pd.DataFrame) -> pd.DataFrame:
    """Return the table `tok_summary` of one iteration, from its tables by response and by word.

    The table has METRICS in nats per sequence, token, word, char and byte, shares, and tokens per word and character.
    The reductions are

        seq_mean_token_sum: mean over responses of the sum over tokens; only for the unit sequence
        ratio_of_sums: sum over all responses / number of units in all responses; for tokens the token_mean
        mean_of_ratios: mean over responses of sum / number of units; for tokens the seq_mean_token_mean

    `n_undefined` counts responses without the unit; mean_of_ratios leaves them out. `n_nonfinite` counts responses
    whose sum is not finite; every reduction includes them.

    `<metric>_first_share` is the share of the words' first tokens in the sum over all words of text. Terms of k1 cancel
    out, so its share is NaN if the sum is below 3 standard errors.
    """
    words = word_table[~word_table["is_special"].to_numpy(bool)]
    rows = [*_of_units(table), *_first_shares(table, words), *_of_words(table, words)]
    summary = pd.DataFrame(rows, columns=SUMMARY_COLUMNS)
    summary.insert(0, "iteration", int(table["iteration"].iloc[0]))
    return summary


def _row(metric: str, unit: str, reduction: str, sums: Floats, counts: Floats, undefined: int) -> Row:
    """Return the ratio of `sums` to `counts`, which have one number per response, as a row of the table."""
    units = len(sums) if unit == "share" else int(counts.sum())
    nonfinite = int((~np.isfinite(sums)).sum())
    return (metric, unit, reduction, *ratio_of_sums(sums, counts), units, len(sums), undefined, nonfinite)


def _of_units(table: pd.DataFrame) -> Iterator[Row]:
    """Yield METRICS per sequence and per unit."""
    ones = np.ones(len(table))
    for name in METRICS:
        total = table[name].to_numpy(np.float64)
        yield _row(name, "sequence", "seq_mean_token_sum", total, ones, 0)
        for unit, column in UNITS.items():
            count = table[column].to_numpy(np.float64)
            has = count > 0
            undefined = int((~has).sum())
            yield _row(name, unit, "ratio_of_sums", total, count, undefined)
            yield _row(name, unit, "mean_of_ratios", total[has] / count[has], ones[has], undefined)


def _first_shares(table: pd.DataFrame, words: pd.DataFrame) -> Iterator[Row]:
    """Yield the share of the words' first tokens in each of METRICS."""
    without_words = int((table["n_word"] == 0).sum())
    for name in METRICS:
        first, total = (_by_response(table, words, words[column]) for column in (f"{name}_first", name))
        if name == "kl_k1":
            mean, se = ratio_of_sums(total, np.ones(len(table)))
            first = first if abs(mean) >= 3.0 * se else np.full(len(first), np.nan)
        yield _row(f"{name}_first_share", "share", "ratio_of_sums", first, total, without_words)


def _of_words(table: pd.DataFrame, words: pd.DataFrame) -> Iterator[Row]:
    """Yield lengths of words, and shares and means over words."""
    for label, column, unit in (("tokens", "n_tok", "char"), ("tokens", "n_tok", "word"), ("chars", "n_char", "word")):
        count = table[UNITS[unit]].to_numpy(np.float64)
        sums = table[column].to_numpy(np.float64)
        yield _row(label, unit, "ratio_of_sums", sums, count, int((count == 0).sum()))
    count = table["n_word"].to_numpy(np.float64)
    for label, values in (
        ("straddling_words", words["n_straddling"] > 0),
        ("single_token_words", words["n_tok"] == 1),
        ("kl_abs_k1_of_words", words["kl_k1"].abs()),
    ):
        sums = _by_response(table, words, values)
        yield _row(label, "word", "ratio_of_sums", sums, count, int((count == 0).sum()))


def _by_response(table: pd.DataFrame, words: pd.DataFrame, values: pd.Series) -> Floats:
    """Return the sum of the values of each response's words."""
    weights = values.to_numpy(np.float64)
    sums = np.bincount(words["sequence"].to_numpy(np.int64), weights=weights, minlength=len(table))
    return np.asarray(sums, np.float64)
