"""Check whether decoding and encoding change the sampled ids. A pipeline that passes texts on trains on the new ids."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ppo_repro.analysis.tokenization.recorded_tokenizer import RecordedTokenizer
from ppo_repro.base.errors import UserError
from ppo_repro.statistics.clusters import mean

DRIFT_COLUMNS = ["iteration", "sequence", "response", "response_ids", "finish_reason", "episode_ids"]


def encoded_again(sequences: pd.DataFrame, tokenizer: RecordedTokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Return ids and encode(decode(ids)) of each response of `sequences` (DRIFT_COLUMNS), without the end token.

    Raises UserError if a decoded text differs from the recorded text, because the tokenizer is not the run's.
    """
    if "episode_ids" in sequences and sequences["episode_ids"].notna().any():
        raise UserError(
            "task.max_turns: the run has episodes in which an environment speaks, whose text no tokenizer encodes as "
            "it was; analyse tokenization is for runs of one turn"
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
    """Return one row per response, which compares encode(decode(ids)) with ids.

    The columns are iteration, sequence, and

        n_tokens: number of sampled tokens but for the end token
        drifted: whether the ids differ
        first_drift_position: index of the first token that differs; NaN without drift
        length_delta: number of new tokens minus n_tokens

    The end token is left out; any other special token is drift, because no text contains it. `sequences` has
    DRIFT_COLUMNS. Raises UserError if the tokenizer is not the run's.
    """
    table = sequences[["iteration", "sequence"]].reset_index(drop=True)
    pairs = list(zip(*encoded_again(sequences, tokenizer), strict=True))
    table["n_tokens"] = [len(a) for a, _ in pairs]
    table["drifted"] = [a != b for a, b in pairs]
    first = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))) for a, b in pairs
    ]
    table["first_drift_position"] = np.where(table["drifted"], first, np.nan)
    table["length_delta"] = [len(b) - len(a) for a, b in pairs]
    return table


def drift_summary(drift: pd.DataFrame) -> dict[str, float]:
    """Return frac_drifted, the share of responses that drifted, and its standard error."""
    share = mean(drift["drifted"].to_numpy(np.float64))
    return {"frac_drifted": share.value, "frac_drifted_se": share.se}
