"""Compute KL(policy || reference) and entropy of one iteration by token, word and response.

Per token, with x = old_logprobs - ref_logprobs in nats and float64: k1 = x, k3 = e^-x - 1 + x, |k1|, and the recorded
divergence over the whole distribution, `exact`. The sum of k1 over the tokens of a word is log p(word) / q(word),
however the word is cut into tokens; sums of the other three depend on the cut into tokens.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ppo_repro.analysis.stats.clusters import Floats, segment_sums
from ppo_repro.analysis.tokenization.word_boundaries import Boundary, find_words, text_of
from ppo_repro.statistics.kl import k3
from ppo_repro.testing.pairs import KEY

OFFSETS = ["char_start", "char_end", "byte_start", "byte_end"]
TOKEN_COLUMNS = [
    *(*KEY, "token_id", *OFFSETS, "sub_idx"),
    *("rollout_logprobs", "old_logprobs", "ref_logprobs", "entropies", "ref_kl"),
]
SEQUENCE_COLUMNS = ["iteration", "sequence", "response"]
# summed over tokens, in nats
METRICS = ["kl_k1", "kl_k3", "kl_abs_k1", "kl_exact", "entropy"]


def estimators(old_logprobs: Floats, ref_logprobs: Floats) -> dict[str, Floats]:
    """Return k1, k3 and |k1| of KL(policy || reference) per token, nats, float64; the policy sampled the tokens."""
    x = np.asarray(old_logprobs, dtype=np.float64) - np.asarray(ref_logprobs, dtype=np.float64)
    return {"kl_k1": x, "kl_k3": k3(-x), "kl_abs_k1": np.abs(x)}


def token_table(tokens: pd.DataFrame, sequences: pd.DataFrame, *, boundary: Boundary) -> pd.DataFrame:
    """Return the table `tok_token`: one row per token of one iteration; METRICS in nats, float64.

    `tokens` has TOKEN_COLUMNS, and `sequences` has SEQUENCE_COLUMNS. word_id, sub_idx and sub_len follow `boundary`,
    not the recorded words.
    """
    text = text_of(sequences)
    words = find_words(tokens, text, boundary)
    columns = {
        **{name: tokens[name].to_numpy() for name in [*KEY, "token_id", *OFFSETS]},
        **{name: getattr(words, name) for name in ("word_id", "sub_idx", "sub_len", "is_special", "straddles")},
        **estimators(tokens["old_logprobs"].to_numpy(), tokens["ref_logprobs"].to_numpy()),
        "kl_exact": tokens["ref_kl"].to_numpy(np.float64),
        "entropy": tokens["entropies"].to_numpy(np.float64),
    }
    return pd.DataFrame(columns)


def word_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table `tok_word`: one row per word of a `token_table`; METRICS are sums over the word's tokens, nats.

    `<metric>_first` is the metric of the word's first token. `kl_k1` is log p(word) / q(word). n_tok, n_char, n_byte:
    size of the word; n_straddling: tokens with characters of two words.
    """
    starts = np.flatnonzero(table["sub_idx"].to_numpy() == 0)
    first, last = table.iloc[starts], table.iloc[np.append(starts, len(table))[1:] - 1]
    words = first[["iteration", "sequence", "word_id", "is_special"]].reset_index(drop=True)
    words["n_tok"] = first["sub_len"].to_numpy()
    for name in ("char", "byte"):
        words[f"n_{name}"] = last[f"{name}_end"].to_numpy() - first[f"{name}_start"].to_numpy()
    words["n_straddling"] = segment_sums(table["straddles"].to_numpy().astype(np.float64), starts).astype(np.int64)
    for name in METRICS:
        words[name] = segment_sums(table[name].to_numpy(), starts)
        words[f"{name}_first"] = first[name].to_numpy()
    return words


def sequence_table(table: pd.DataFrame, sequences: pd.DataFrame) -> pd.DataFrame:
    """Return the table `tok_seq`: one row per response; METRICS are sums over its tokens, nats.

    `<metric>_per_<unit>` is the sum divided by the number of units (tok, word, char, byte), NaN if that is 0. The end
    token is in the sums, but it is not a word.
    """
    starts = np.flatnonzero(table["position"].to_numpy() == 0)
    text = text_of(sequences)
    by_sequence = sequences[["iteration", "sequence"]].reset_index(drop=True)
    by_sequence["n_tok"] = np.diff(np.append(starts, len(table)))
    is_word = ((table["sub_idx"] == 0) & ~table["is_special"]).to_numpy()
    by_sequence["n_word"] = segment_sums(is_word.astype(np.float64), starts).astype(np.int64)
    by_sequence["n_char"], by_sequence["n_byte"] = np.diff(text.starts), text.byte_lengths
    for name in METRICS:
        by_sequence[name] = segment_sums(table[name].to_numpy(), starts)
        for unit in ("tok", "word", "char", "byte"):
            by_sequence[f"{name}_per_{unit}"] = by_sequence[name] / by_sequence[f"n_{unit}"].replace(0, np.nan)
    return by_sequence
