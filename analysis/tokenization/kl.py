"""KL(policy || reference) and entropy of one iteration by token, word and response, from the recorded columns.

Per token, with x = old_logprobs - ref_logprobs in nats and float64: k1 = x, k2 = x^2 / 2, k3 = expm1(-x) + x
(Schulman, 2020), |k1|, and the recorded divergence over the whole distribution, `exact`. The sum of k1 over the tokens
of a word is log p(word) / q(word), whatever its segmentation; sums of the others depend on it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.tokenization.credit import terminal_weights
from analysis.tokenization.words import Boundary, find_words, sequence_starts, span_classes, span_texts, text_of

KEY = ["iteration", "sequence", "position"]
OFFSETS = ["char_start", "char_end", "byte_start", "byte_end"]
TOKEN_COLUMNS = [
    *KEY,
    "token_id",
    *OFFSETS,
    "sub_idx",
    "old_logprobs",
    "ref_logprobs",
    "entropies",
    "ref_kl",
    "kl_penalties",
    "rewards",
    "advantages",
]
SEQUENCE_COLUMNS = ["iteration", "sequence", "prompt_key", "response", "scores"]
# summed over tokens, in nats
METRICS = ["kl_k1", "kl_k2", "kl_k3", "kl_abs_k1", "kl_exact", "entropy"]
Floats = npt.NDArray[np.float64]


def estimators(old_logprobs: Floats, ref_logprobs: Floats) -> dict[str, Floats]:
    """k1, k2, k3 and |k1| of KL(policy || reference) per token, nats, float64; tokens drawn from the policy."""
    x = np.asarray(old_logprobs, dtype=np.float64) - np.asarray(ref_logprobs, dtype=np.float64)
    return {"kl_k1": x, "kl_k2": 0.5 * x * x, "kl_k3": np.expm1(-x) + x, "kl_abs_k1": np.abs(x)}


def token_table(
    tokens: pd.DataFrame,
    sequences: pd.DataFrame,
    *,
    boundary: Boundary,
    gamma: float | None,
    gae_lambda: float | None,
) -> pd.DataFrame:
    """`tok_token`: one row per token of one iteration; METRICS in nats, float64.

    `tokens` has TOKEN_COLUMNS, `sequences` SEQUENCE_COLUMNS. word_id, sub_idx and sub_len follow `boundary`, not the
    recorded words. `reward_kl` is the KL's share of the token's reward, `reward_score` the rest of it,
    `terminal_weight` is (gamma lambda)^(T-1-t), NaN where `gamma` is None (advantages without GAE).
    """
    text = text_of(sequences)
    words = find_words(tokens, text, boundary)
    first = sequence_starts(tokens)
    sequence = tokens["sequence"].to_numpy(np.int64)
    start, end = (text.starts[sequence] + tokens[name].to_numpy(np.int64) for name in ("char_start", "char_end"))
    lengths = np.diff(np.append(first, len(tokens)))
    weights = np.full(len(tokens), np.nan)
    if gamma is not None and gae_lambda is not None:
        weights = terminal_weights(lengths, gamma, gae_lambda)
    old, ref = (tokens[name].to_numpy(np.float64) for name in ("old_logprobs", "ref_logprobs"))
    columns = {
        **{name: tokens[name].to_numpy() for name in [*KEY, "token_id", *OFFSETS]},
        "word_id": words.word_id.astype(np.int32),
        "sub_idx": words.sub_idx.astype(np.int32),
        "sub_len": words.sub_len.astype(np.int32),
        "is_word_start": words.sub_idx == 0,
        "is_special": words.is_special,
        "straddles": words.straddles,
        "text_class": span_classes(text, start, end, words.is_special),
        "old_logprobs": old,
        "ref_logprobs": ref,
        **estimators(old, ref),
        "kl_exact": tokens["ref_kl"].to_numpy(np.float64),
        "entropy": tokens["entropies"].to_numpy(np.float64),
        "advantages": tokens["advantages"].to_numpy(np.float64),
        "reward_kl": -tokens["kl_penalties"].to_numpy(np.float64),
        "reward_score": tokens["rewards"].to_numpy(np.float64) + tokens["kl_penalties"].to_numpy(np.float64),
        "terminal_weight": weights,
    }
    return pd.DataFrame(columns)


def word_table(table: pd.DataFrame, sequences: pd.DataFrame) -> pd.DataFrame:
    """`tok_word`: one row per word of a `token_table`; METRICS are sums over the word's tokens, nats.

    `<metric>_first` is that of the word's first token, the rest is the continuation. `kl_k1` is
    log p(word)/q(word). `freq_rank` is 1 for the commonest text of the iteration; ties share a rank.
    """
    starts = np.flatnonzero(table["is_word_start"].to_numpy())
    last = np.append(starts, len(table))[1:] - 1
    first_rows, last_rows = table.iloc[starts], table.iloc[last]
    text = text_of(sequences)
    sequence = first_rows["sequence"].to_numpy(np.int64)
    special = first_rows["is_special"].to_numpy()
    words = pd.DataFrame({name: first_rows[name].to_numpy() for name in ("iteration", "sequence", "word_id")})
    first_bytes = text.byte_starts[sequence] + first_rows["byte_start"].to_numpy(np.int64)
    words["text"] = span_texts(text, first_bytes).to_pandas().to_numpy(object)
    words["text_class"] = span_classes(
        text,
        text.starts[sequence] + first_rows["char_start"].to_numpy(np.int64),
        text.starts[sequence] + last_rows["char_end"].to_numpy(np.int64),
        special,
    )
    words["is_special"] = special
    words["n_tok"] = np.diff(np.append(starts, len(table))).astype(np.int64)
    for unit, name in (("n_char", "char"), ("n_byte", "byte")):
        words[unit] = last_rows[f"{name}_end"].to_numpy(np.int64) - first_rows[f"{name}_start"].to_numpy(np.int64)
    counts = words.groupby("text", sort=False)["text"].transform("size")
    words["freq_rank"] = counts.rank(method="dense", ascending=False).astype(np.int64)
    words["n_straddling"] = sums(table["straddles"].to_numpy().astype(np.float64), starts).astype(np.int64)
    for name in ["old_logprobs", "ref_logprobs", *METRICS]:
        words[name] = sums(table[name].to_numpy(), starts)
    for name in METRICS:
        words[f"{name}_first"] = first_rows[name].to_numpy()
    words["advantage_mean"] = sums(table["advantages"].to_numpy(), starts) / words["n_tok"]
    return words


def sequence_table(table: pd.DataFrame, sequences: pd.DataFrame, decay: float) -> pd.DataFrame:
    """`tok_seq`: one row per response; METRICS are sums, and `<metric>_per_<unit>` those over tok, word, char, byte.

    NaN where a response has none of the unit. Words are words of text: the end token is in the sums but is not a word.
    `lambda_eff_char` is decay^(n_tok / n_char), the decay of a terminal reward per character; `decay` = gamma lambda.
    """
    starts = np.flatnonzero(table["position"].to_numpy() == 0)
    text = text_of(sequences)
    by_sequence = sequences[["iteration", "sequence", "prompt_key", "scores"]].reset_index(drop=True)
    by_sequence["n_tok"] = np.diff(np.append(starts, len(table)))
    is_word = (table["is_word_start"] & ~table["is_special"]).to_numpy()
    by_sequence["n_word"] = sums(is_word.astype(np.float64), starts).astype(np.int64)
    by_sequence["n_char"], by_sequence["n_byte"] = np.diff(text.starts), np.diff(text.byte_starts)
    for name in METRICS:
        by_sequence[name] = sums(table[name].to_numpy(), starts)
        for unit in ("tok", "word", "char", "byte"):
            by_sequence[f"{name}_per_{unit}"] = ratio(
                by_sequence[name].to_numpy(), by_sequence[f"n_{unit}"].to_numpy(np.float64)
            )
    fertility = ratio(by_sequence["n_tok"].to_numpy(np.float64), by_sequence["n_char"].to_numpy(np.float64))
    # numpy gives 1 for 1 to the power of NaN
    by_sequence["lambda_eff_char"] = np.where(np.isnan(fertility), np.nan, decay**fertility)
    return by_sequence


def sums(values: npt.NDArray[np.float64], starts: npt.NDArray[np.int64]) -> Floats:
    """Sums of the consecutive runs that begin at `starts`, float64; every run has at least one element."""
    return np.add.reduceat(values, starts) if len(starts) else np.zeros(0)


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """numerator / denominator, NaN where the denominator is 0."""
    out = np.full(len(numerator), np.nan)
    np.divide(numerator, denominator, out=out, where=denominator != 0)
    return out
