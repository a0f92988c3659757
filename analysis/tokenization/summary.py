"""KL and entropy of one iteration in every unit, averaged in both ways, with cluster standard errors."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.tokenization.kl import METRICS, ratio
from ppo_repro.errors import UserError

Cluster = Literal["sequence", "prompt"]
UNITS = {"token": "n_tok", "word": "n_word", "char": "n_char", "byte": "n_byte"}
SUMMARY_COLUMNS = ["metric", "unit", "reduction", "value", "se", "n_units", "n_sequences", "n_undefined", "n_nonfinite"]
Floats = npt.NDArray[np.float64]


def ratio_of_sums(numerator: Floats, denominator: Floats, cluster: npt.NDArray[np.int64]) -> tuple[float, float]:
    """R = sum y / sum x and its standard error by linearisation over clusters g = 0..G-1.

    se = sqrt(G/(G-1) sum_g (Y_g - R X_g)^2) / sum x, with Y_g and X_g the sums of a cluster. R is NaN where sum x is 0
    or not finite; se is NaN then, and for one cluster. Means are the case x = 1. Cochran, Sampling Techniques, 1977,
    6.3.
    """
    total = float(denominator.sum())
    if total == 0.0 or not np.isfinite(total):
        return float("nan"), float("nan")
    value = float(numerator.sum()) / total
    clusters = int(cluster.max()) + 1
    if clusters < 2 or not np.isfinite(value):
        return value, float("nan")
    residuals = np.bincount(cluster, weights=numerator - value * denominator, minlength=clusters)
    return value, float(np.sqrt(clusters / (clusters - 1) * np.sum(residuals * residuals))) / abs(total)


def cluster_codes(sequence_table: pd.DataFrame, cluster: Cluster) -> npt.NDArray[np.int64]:
    """The cluster of each response, 0..G-1: the response itself, or its prompt. UserError on another cluster."""
    if cluster == "sequence":
        return np.arange(len(sequence_table))
    if cluster == "prompt":
        return np.unique(sequence_table["prompt_key"].to_numpy(str), return_inverse=True)[1].astype(np.int64)
    raise UserError(f"cluster = {cluster!r}: must be one of sequence, prompt; tokens of a response are not independent")


def summary_table(sequence_table: pd.DataFrame, word_table: pd.DataFrame, *, cluster: Cluster) -> pd.DataFrame:
    """`tok_summary` of one iteration: METRICS in nats per sequence, token, word, char and byte; shares; fertility.

    reduction: `seq_mean_token_sum` for unit sequence; `ratio_of_sums` is the sum over all responses / the number of
    units (for tokens: token_mean); `mean_of_ratios` is the mean of that ratio per response (for tokens:
    seq_mean_token_mean), over responses that have the unit; `n_undefined` counts the others. Sums that are not finite
    are included; `n_nonfinite` counts the responses that have them.

    `<metric>_first_share` is the share of the first tokens of words in the sum over all words of text; for k1, whose
    terms cancel, it is NaN where the sum is below 3 standard errors. UserError on another cluster.
    """
    codes = cluster_codes(sequence_table, cluster)
    text_words = word_table[~word_table["is_special"].to_numpy(bool)]
    rows = [row for name in METRICS for row in _in_units(sequence_table, name, codes)]
    rows += [_first_share(sequence_table, text_words, name, codes) for name in METRICS]
    pairs = (("tokens", "n_tok", "char"), ("tokens", "n_tok", "word"), ("chars", "n_char", "word"))
    rows += [_over(sequence_table, label, column, unit, codes) for label, column, unit in pairs]
    rows += [
        _over_words(sequence_table, text_words, "straddling_words", text_words["n_straddling"] > 0, codes),
        _over_words(sequence_table, text_words, "single_token_words", text_words["n_tok"] == 1, codes),
        _over_words(sequence_table, text_words, "kl_abs_k1_of_words", text_words["kl_k1"].abs(), codes),
    ]
    table = pd.DataFrame(rows, columns=SUMMARY_COLUMNS)
    table.insert(0, "iteration", int(sequence_table["iteration"].iloc[0]))
    return table


def _row(
    label: str, unit: str, reduction: str, y: Floats, x: Floats, codes: npt.NDArray[np.int64], undefined: int
) -> tuple[object, ...]:
    n_units = int(x.sum()) if unit != "share" else len(y)
    estimate = ratio_of_sums(y, x, codes)
    return (label, unit, reduction, *estimate, n_units, len(y), undefined, int((~np.isfinite(y)).sum()))


def _in_units(table: pd.DataFrame, name: str, codes: npt.NDArray[np.int64]) -> list[tuple[object, ...]]:
    total, ones = table[name].to_numpy(np.float64), np.ones(len(table))
    rows = [_row(name, "sequence", "seq_mean_token_sum", total, ones, codes, 0)]
    for unit, column in UNITS.items():
        count = table[column].to_numpy(np.float64)
        present = count > 0
        without = int((~present).sum())
        rows.append(_row(name, unit, "ratio_of_sums", total, count, codes, without))
        own = (
            ratio(total, count)[present],
            ones[present],
            np.unique(codes[present], return_inverse=True)[1].astype(np.int64),
        )
        rows.append(_row(name, unit, "mean_of_ratios", *own, without))
    return rows


def _over(table: pd.DataFrame, label: str, column: str, unit: str, codes: npt.NDArray[np.int64]) -> tuple[object, ...]:
    count = table[UNITS[unit]].to_numpy(np.float64)
    y = table[column].to_numpy(np.float64)
    return _row(label, unit, "ratio_of_sums", y, count, codes, int((count == 0).sum()))


def _first_share(
    table: pd.DataFrame, words: pd.DataFrame, name: str, codes: npt.NDArray[np.int64]
) -> tuple[object, ...]:
    first, total = (_by_sequence(table, words, words[column]) for column in (f"{name}_first", name))
    row = _row(f"{name}_first_share", "share", "ratio_of_sums", first, total, codes, _without(table, words))
    mean, se = ratio_of_sums(total, np.ones(len(table)), codes)
    if name == "kl_k1" and not abs(mean) >= 3.0 * se:
        return (*row[:3], float("nan"), float("nan"), *row[5:])
    return row


def _over_words(
    table: pd.DataFrame, words: pd.DataFrame, label: str, values: pd.Series, codes: npt.NDArray[np.int64]
) -> tuple[object, ...]:
    total = _by_sequence(table, words, values.astype(np.float64))
    count = _by_sequence(table, words, pd.Series(np.ones(len(words)), index=words.index))
    return _row(label, "word", "ratio_of_sums", total, count, codes, _without(table, words))


def _without(table: pd.DataFrame, words: pd.DataFrame) -> int:
    return int((np.bincount(words["sequence"], minlength=len(table)) == 0).sum())


def _by_sequence(table: pd.DataFrame, words: pd.DataFrame, values: pd.Series) -> Floats:
    weights = values.to_numpy(np.float64)
    sums = np.bincount(words["sequence"].to_numpy(np.int64), weights=weights, minlength=len(table))
    return np.asarray(sums, dtype=np.float64)
