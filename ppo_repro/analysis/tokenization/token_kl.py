"""Compute KL(policy || reference) and entropy of one iteration by token, word and response, and average them.

Per token, with x = old_logprobs - ref_logprobs in nats and float64: k1 = x, k3 = e^-x - 1 + x, abs_k1 = |k1|, and the
recorded ref_kl, the exact divergence over the vocabulary. The sum of k1 over the tokens of a word is
log p(word) / q(word), however the word is cut into tokens; sums of the other three depend on the cut into tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis.tokenization.words import Boundary, find_words, text_of
from ppo_repro.records.logprob_pairs import TOKEN_KEY
from ppo_repro.statistics.clusters import Floats, ratio_of_sums, segment_sums
from ppo_repro.statistics.kl import k3

OFFSETS = ["char_start", "char_end", "byte_start", "byte_end"]
KL_TOKEN_COLUMNS = [
    *TOKEN_KEY, "token_id", *OFFSETS, "sub_idx", "rollout_logprobs", "old_logprobs", "ref_logprobs", "entropies",
    "ref_kl",
]  # fmt: skip
SEQUENCE_COLUMNS = ["iteration", "sequence", "response"]
# summed over tokens, in nats
KL_METRICS = ["k1", "k3", "abs_k1", "ref_kl", "entropy"]
UNITS = {"token": "n_tokens", "word": "n_words", "char": "n_chars", "byte": "n_bytes"}


class TokenRow(NamedTuple):
    """A token of an iteration: a row of `token_table`; KL_METRICS in nats, float64.

    word_id, sub_idx and sub_len follow the convention for white space, not the recorded words.
    """

    iteration: int
    sequence: int
    position: int
    token_id: int
    char_start: int
    char_end: int
    byte_start: int
    byte_end: int
    word_id: int  # the fields of `Words`
    sub_idx: int
    sub_len: int
    is_special: bool
    straddles: bool
    k1: float
    k3: float
    abs_k1: float
    ref_kl: float
    entropy: float


class SummaryRow(NamedTuple):
    """A metric per unit by one reduction: a row of `summary_table`, whose first column is the iteration."""

    metric: str
    unit: str
    reduction: str
    value: float
    se: float
    n_units: int
    n_sequences: int
    n_undefined: int  # responses without the unit
    n_nonfinite: int  # responses whose sum is not finite


def estimators(old_logprobs: Floats, ref_logprobs: Floats) -> dict[str, Floats]:
    """Return k1, k3 and |k1| of KL(policy || reference) per token, nats, float64; the policy sampled the tokens."""
    x = np.asarray(old_logprobs, dtype=np.float64) - np.asarray(ref_logprobs, dtype=np.float64)
    return {"k1": x, "k3": k3(x), "abs_k1": np.abs(x)}


def token_table(tokens: pd.DataFrame, sequences: pd.DataFrame, *, boundary: Boundary) -> pd.DataFrame:
    """Return a `TokenRow` for each token of one iteration.

    `tokens` has KL_TOKEN_COLUMNS, and `sequences` has SEQUENCE_COLUMNS.
    """
    words = find_words(tokens, text_of(sequences), boundary)
    columns = {
        **{name: tokens[name].to_numpy() for name in [*TOKEN_KEY, "token_id", *OFFSETS]},
        **vars(words),
        **estimators(tokens["old_logprobs"].to_numpy(), tokens["ref_logprobs"].to_numpy()),
        "ref_kl": tokens["ref_kl"].to_numpy(np.float64),
        "entropy": tokens["entropies"].to_numpy(np.float64),
    }
    return pd.DataFrame(columns, columns=TokenRow._fields)


def word_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per word of a `token_table`.

    Returns:
        The columns iteration, sequence, word_id, is_special, and

        n_tokens, n_chars, n_bytes: size of the word
        n_straddling: number of its tokens with characters of two words
        NAME for each of KL_METRICS: sum over its tokens, nats; k1 is log p(word) / q(word)
        NAME_first for each of KL_METRICS: of its first token, nats
    """
    starts = np.flatnonzero(table["sub_idx"].to_numpy() == 0)
    first_tokens = table.iloc[starts]
    last_tokens = table.iloc[np.append(starts, len(table))[1:] - 1]
    words = first_tokens[["iteration", "sequence", "word_id", "is_special"]].reset_index(drop=True)
    words["n_tokens"] = first_tokens["sub_len"].to_numpy()
    for unit in ("char", "byte"):
        words[UNITS[unit]] = last_tokens[f"{unit}_end"].to_numpy() - first_tokens[f"{unit}_start"].to_numpy()
    words["n_straddling"] = segment_sums(table["straddles"].to_numpy().astype(np.float64), starts).astype(np.int64)
    for name in KL_METRICS:
        words[name] = segment_sums(table[name].to_numpy(), starts)
        words[f"{name}_first"] = first_tokens[name].to_numpy()
    return words


def response_table(table: pd.DataFrame, sequences: pd.DataFrame) -> pd.DataFrame:
    """Return one row per response of a `token_table`.

    Returns:
        The columns iteration, sequence, and

        n_tokens, n_words, n_chars, n_bytes: sizes of the response; the end token is not a word
        NAME for each of KL_METRICS: sum over its tokens, nats, with the end token
        NAME_per_UNIT for each of KL_METRICS and UNITS: the sum divided by the number of units; NaN if that is 0
    """
    starts = np.flatnonzero(table["position"].to_numpy() == 0)
    text = text_of(sequences)
    responses = sequences[["iteration", "sequence"]].reset_index(drop=True)
    responses["n_tokens"] = np.diff(np.append(starts, len(table)))
    begins_word = ((table["sub_idx"] == 0) & ~table["is_special"]).to_numpy()
    responses["n_words"] = segment_sums(begins_word.astype(np.float64), starts).astype(np.int64)
    responses["n_chars"] = np.diff(text.starts)
    responses["n_bytes"] = text.byte_lengths
    for name in KL_METRICS:
        responses[name] = segment_sums(table[name].to_numpy(), starts)
        for unit, count in UNITS.items():
            responses[f"{name}_per_{unit}"] = responses[name] / responses[count].replace(0, np.nan)
    return responses


def summary_table(responses: pd.DataFrame, words: pd.DataFrame) -> pd.DataFrame:
    """Return the averages of one iteration, from its tables by response and by word.

    The table has KL_METRICS, nats, per sequence, token, word, char and byte, shares, and tokens per word and character.
    The reductions are

        seq_mean_token_sum: mean over responses of the sum over tokens; only for the unit sequence
        ratio_of_sums: sum over all responses / number of units in all responses; for tokens the token_mean
        mean_of_ratios: mean over responses of sum / number of units; for tokens the seq_mean_token_mean

    `n_undefined` counts responses without the unit; mean_of_ratios leaves them out. `n_nonfinite` counts responses
    whose sum is not finite; every reduction includes them.

    `<metric>_first_share` is the share of the words' first tokens in the sum over all words of text. Terms of k1 cancel
    out, so its share is NaN if the sum is below 3 standard errors.
    """
    text_words = words[~words["is_special"].to_numpy(bool)]
    rows = [
        *_metrics_by_unit(responses),
        *_first_token_shares(responses, text_words),
        *_word_statistics(responses, text_words),
    ]
    summary = pd.DataFrame(rows, columns=SummaryRow._fields)
    summary.insert(0, "iteration", int(responses["iteration"].iloc[0]))
    return summary


def _row(metric: str, unit: str, reduction: str, sums: Floats, counts: Floats, undefined: int) -> SummaryRow:
    """Return the ratio of `sums` to `counts`, which have one number per response, as a row of the table."""
    value, se = ratio_of_sums(sums, counts)
    return SummaryRow(
        metric=metric,
        unit=unit,
        reduction=reduction,
        value=value,
        se=se,
        n_units=len(sums) if unit == "share" else int(counts.sum()),
        n_sequences=len(sums),
        n_undefined=undefined,
        n_nonfinite=int((~np.isfinite(sums)).sum()),
    )


def _metrics_by_unit(responses: pd.DataFrame) -> Iterator[SummaryRow]:
    """Yield KL_METRICS per sequence and per unit."""
    ones = np.ones(len(responses))
    for name in KL_METRICS:
        sums = responses[name].to_numpy(np.float64)
        yield _row(name, "sequence", "seq_mean_token_sum", sums, ones, 0)
        for unit, column in UNITS.items():
            counts = responses[column].to_numpy(np.float64)
            defined = counts > 0
            undefined = int((~defined).sum())
            yield _row(name, unit, "ratio_of_sums", sums, counts, undefined)
            yield _row(name, unit, "mean_of_ratios", sums[defined] / counts[defined], ones[defined], undefined)


def _first_token_shares(responses: pd.DataFrame, words: pd.DataFrame) -> Iterator[SummaryRow]:
    """Yield the share of the words' first tokens in each of KL_METRICS."""
    without_words = int((responses["n_words"] == 0).sum())
    for name in KL_METRICS:
        first_sums = _sums_over_words(responses, words, words[f"{name}_first"])
        sums = _sums_over_words(responses, words, words[name])
        if name == "k1":
            mean, se = ratio_of_sums(sums, np.ones(len(responses)))
            first_sums = first_sums if abs(mean) >= 3.0 * se else np.full(len(first_sums), np.nan)
        yield _row(f"{name}_first_share", "share", "ratio_of_sums", first_sums, sums, without_words)


def _word_statistics(responses: pd.DataFrame, words: pd.DataFrame) -> Iterator[SummaryRow]:
    """Yield lengths of words, and shares and means over words."""
    for metric, unit in (("n_tokens", "char"), ("n_tokens", "word"), ("n_chars", "word")):
        counts = responses[UNITS[unit]].to_numpy(np.float64)
        sums = responses[metric].to_numpy(np.float64)
        yield _row(metric, unit, "ratio_of_sums", sums, counts, int((counts == 0).sum()))
    counts = responses["n_words"].to_numpy(np.float64)
    for metric, values in (
        ("straddling_words", words["n_straddling"] > 0),
        ("single_token_words", words["n_tokens"] == 1),
        ("abs_k1_of_words", words["k1"].abs()),
    ):
        sums = _sums_over_words(responses, words, values)
        yield _row(metric, "word", "ratio_of_sums", sums, counts, int((counts == 0).sum()))


def _sums_over_words(responses: pd.DataFrame, words: pd.DataFrame, values: pd.Series) -> Floats:
    """Return the sum of the values of each response's words."""
    weights = values.to_numpy(np.float64)
    sums = np.bincount(words["sequence"].to_numpy(np.int64), weights=weights, minlength=len(responses))
    return np.asarray(sums, np.float64)
