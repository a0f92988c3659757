"""Check whether decoding and encoding change the sampled ids. A pipeline that passes texts on trains on the new ids."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import pandas as pd

from ppo_repro.analysis.tokenization.recorded_tokenizer import RecordedTokenizer
from ppo_repro.base.errors import UserError
from ppo_repro.statistics.clusters import mean

DRIFT_COLUMNS = ["iteration", "sequence", "response", "response_ids", "finish_reason", "episode_ids"]


class Drift(NamedTuple):
    """How encode(decode(ids)) of a response differs from its sampled ids: a row of `retokenization`."""

    iteration: int
    sequence: int
    n_tokens: int  # sampled tokens without the end token
    drifted: bool  # the ids differ
    first_drift_position: float  # index of the first id that differs; NaN without drift
    length_delta: int  # number of new ids minus n_tokens


class DriftSummary(NamedTuple):
    """The share of an iteration's responses that drifted, with its standard error: a row of `drift_by_iteration`."""

    iteration: int
    frac_drifted: float
    frac_drifted_se: float


def retokenization(sequences: pd.DataFrame, tokenizer: RecordedTokenizer) -> pd.DataFrame:
    """Return a `Drift` for each response of `sequences`, which has DRIFT_COLUMNS.

    The end token is left out; any other special token is drift, because no text contains it.

    Raises UserError if the run has several turns, or if a decoded text differs from the recorded text, because the
    tokenizer is not the run's.
    """
    if "episode_ids" in sequences and sequences["episode_ids"].notna().any():
        raise UserError(
            "task.max_turns: the run has episodes in which an environment speaks, whose text no tokenizer encodes as "
            "it was; analyse tokenization is for runs of one turn"
        )
    sampled_ids = _ids_without_end(sequences, tokenizer)
    texts = tokenizer.decode(sampled_ids)
    for text, recorded, sequence in zip(texts, sequences["response"], sequences["sequence"], strict=True):
        if text != recorded:
            raise UserError(
                f"tokenizer: decodes response {sequence} as {text!r}, recorded is {recorded!r}; restore the run's"
            )
    columns = (sequences["iteration"], sequences["sequence"], sampled_ids, tokenizer.encode(texts))
    rows = [
        Drift(iteration, sequence, len(ids), ids != new_ids, _first_difference(ids, new_ids), len(new_ids) - len(ids))
        for iteration, sequence, ids, new_ids in zip(*columns, strict=True)
    ]
    return pd.DataFrame(rows, columns=Drift._fields)


def _ids_without_end(sequences: pd.DataFrame, tokenizer: RecordedTokenizer) -> list[list[int]]:
    all_ids = [list(map(int, row)) for row in sequences["response_ids"]]
    return [
        # a stop text ends a response too, and belongs to it
        ids[:-1] if reason == "stop" and ids[-1] in tokenizer.special_ids else ids
        for ids, reason in zip(all_ids, sequences["finish_reason"], strict=True)
    ]


def _first_difference(ids: list[int], new_ids: list[int]) -> float:
    """Return the index of the first difference; NaN if there is none."""
    pairs = enumerate(zip_longest(ids, new_ids))
    return next((float(index) for index, (old, new) in pairs if old != new), math.nan)


def drift_summary(drift: pd.DataFrame) -> DriftSummary:
    """Return the share of drifted responses of one iteration, from its rows of `retokenization`."""
    share = mean(drift["drifted"].to_numpy(np.float64))
    return DriftSummary(int(drift["iteration"].iloc[0]), share.value, share.se)
