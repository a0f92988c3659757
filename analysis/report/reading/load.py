"""One iteration as the report reads it: its tables, with updates joined to their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.errors import UserError
from ppo_repro.records import reader

SEQUENCE_COLUMNS = ["iteration", "sequence", "prompt_key", "response", "response_length", "scores", "is_correct"]
TOKEN_COLUMNS = [
    "iteration", "sequence", "position", "rollout_logprobs", "old_logprobs", "entropies", "ref_kl", "advantages",
    "word_id", "sub_idx", "char_start", "char_end",
]  # fmt: skip
UPDATE_COLUMNS = ["iteration", "epoch", "minibatch", "sequence", "position", "ratios", "clip_flag"]


@dataclass(frozen=True)
class IterationRecords:
    """One iteration; `token_rows[i]` is the row of `tokens` that belongs to row i of `updates`."""

    iteration: int
    sequences: pd.DataFrame
    tokens: pd.DataFrame
    updates: pd.DataFrame
    token_rows: npt.NDArray[np.int64]


def summary_tables(run_dir: Path, iterations: Sequence[int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables `iterations` and `steps` of these iterations; raises UserError on anything missing or damaged."""
    return (
        reader.read_iterations(run_dir, iterations=iterations, allow_incomplete=True),
        reader.read_steps(run_dir, iterations=iterations, allow_incomplete=True),
    )


def iterations_of(run_dir: Path, iterations: Sequence[int]) -> Iterator[IterationRecords]:
    """These iterations of a run, one at a time; raises UserError on anything missing or damaged."""
    for iteration in iterations:
        only = [iteration]
        sequences = reader.read_sequences(run_dir, iterations=only, columns=SEQUENCE_COLUMNS, allow_incomplete=True)
        tokens = reader.read_tokens(run_dir, iterations=only, columns=TOKEN_COLUMNS, allow_incomplete=True)
        updates = reader.read_updates(run_dir, iterations=only, columns=UPDATE_COLUMNS, allow_incomplete=True)
        rows = token_rows(tokens, updates, f"{run_dir}: iteration {iteration}")
        yield IterationRecords(iteration, sequences, tokens, updates, rows)


def token_rows(tokens: pd.DataFrame, updates: pd.DataFrame, where: str) -> npt.NDArray[np.int64]:
    """The row of `tokens` for every row of `updates`; raises UserError where there is none."""
    width = 1 + int(np.max(np.concatenate([tokens["position"].to_numpy(), updates["position"].to_numpy()]), initial=0))
    have = tokens["sequence"].to_numpy(np.int64) * width + tokens["position"].to_numpy(np.int64)
    want = updates["sequence"].to_numpy(np.int64) * width + updates["position"].to_numpy(np.int64)
    order = np.argsort(have, kind="stable")
    index = np.minimum(np.searchsorted(have, want, sorter=order), len(have) - 1)
    rows = order[index]
    if not np.array_equal(have[rows], want):
        raise UserError(f"{where}: the updates name tokens that are not in the tokens table; the records are damaged")
    return np.asarray(rows, dtype=np.int64)
