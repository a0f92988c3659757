"""Two log-probs of the same token, from runs, in the frame shape that every source of pairs has.

A source is an iterator of chunks. A chunk is a DataFrame with one row per token and the columns

    iteration, sequence, position, token_id   int32 or int64
    logprobs_a, logprobs_b                    float32, nats, the recorded bits

and, where the source has them, `entropies` and `log_kept_mass` (float32, nats), `advantages` (float32) and the places
of tokens (int32, `analysis.pairs.places`). `a` sampled the token or came first, and `b` is compared with it: delta =
logprobs_b - logprobs_a. Rows are in the order of (iteration, sequence, position). A chunk has whole sequences of one
iteration, so memory is bounded by one batch plus the longest sequence. `chunk.attrs["masked"]` counts the tokens that a
mask removed from the chunk (`masked_tokens` reads it), which may leave it without rows; runs have no mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.pairs.places import ROUTE_COLUMNS, Recorded, recorded_places, with_places
from ppo_repro.errors import UserError
from ppo_repro.records import reader

KEY = ["iteration", "sequence", "position"]
REQUIRED = [*KEY, "token_id", "logprobs_a", "logprobs_b"]
OPTIONAL = ["entropies", "log_kept_mass", "advantages"]
PAIRS = ("rollout_vs_old", "old_vs_first_new")
ROWS = 1 << 18


def run_pairs(
    run_dir: Path | str,
    pair: str = "rollout_vs_old",
    *,
    iterations: Sequence[int] | None = None,
    rows: int = ROWS,
    allow_incomplete: bool = False,
) -> Iterator[pd.DataFrame]:
    """The pairs of a recorded run, with entropies, log_kept_mass, advantages, and places where it has them.

    "rollout_vs_old": a = rollout_logprobs, b = old_logprobs: sampler against trainer, the same weights.
    "old_vs_first_new": a = old_logprobs, b = new_logprobs of the first epoch, without minibatches in which the policy
    took no step. It joins two tables, so one iteration is in memory whatever `rows` is.

    Raises UserError on another pair, and on anything missing, unknown or damaged in the records.
    """
    if pair not in PAIRS:
        raise UserError(f"pair = {pair!r}: must be {' or '.join(PAIRS)}")
    if pair == "old_vs_first_new":
        return _first_new(run_dir, iterations, allow_incomplete)
    places = recorded_places(run_dir)
    columns = [*KEY, "token_id", "rollout_logprobs", "old_logprobs", *OPTIONAL]
    columns += ROUTE_COLUMNS if places.routes else []
    chunks = reader.stream(
        run_dir,
        "tokens",
        columns=columns,
        iterations=iterations,
        rows=rows,
        allow_incomplete=allow_incomplete,
    )
    names = {"rollout_logprobs": "logprobs_a", "old_logprobs": "logprobs_b"}
    whole = whole_sequences(chunk.rename(columns=names) for chunk in chunks)
    return whole if places == Recorded() else with_places(run_dir, whole, places, allow_incomplete)


def _first_new(run_dir: Path | str, iterations: Sequence[int] | None, allow_incomplete: bool) -> Iterator[pd.DataFrame]:
    recorded = range(len(reader.open_manifest(run_dir, allow_incomplete).iterations))
    for iteration in recorded if iterations is None else iterations:
        only, names = [iteration], [*KEY, "token_id", "old_logprobs", *OPTIONAL]
        tokens = reader.read_tokens(run_dir, iterations=only, columns=names, allow_incomplete=allow_incomplete)
        # clip_flag is null exactly where the policy takes no step; new_logprobs can also be a recorded NaN
        names = [*KEY, "epoch", "new_logprobs", "clip_flag"]
        updates = reader.read_updates(run_dir, iterations=only, columns=names, allow_incomplete=allow_incomplete)
        first = updates[(updates["epoch"] == 0) & updates["clip_flag"].notna()][[*KEY, "new_logprobs"]]
        joined = tokens.merge(first, on=KEY, how="inner", validate="one_to_one").sort_values(KEY, ignore_index=True)
        renamed = {"old_logprobs": "logprobs_a", "new_logprobs": "logprobs_b"}
        yield joined.rename(columns=renamed)[[*REQUIRED, *OPTIONAL]]


def two_run_pairs(
    run_a: Path | str,
    run_b: Path | str,
    *,
    column: str = "old_logprobs",
    iterations: Sequence[int] | None = None,
    rows: int = ROWS,
) -> Iterator[pd.DataFrame]:
    """The same log-prob column of two runs that sampled the same tokens, with the entropies of the first.

    Chunks before a difference are yielded. Raises UserError that names the first token that differs, on different
    numbers of iterations unless `iterations` names some, and on anything wrong with the records.
    """
    if column not in ("rollout_logprobs", "old_logprobs", "ref_logprobs"):
        raise UserError(f"column = {column!r}: must be rollout_logprobs, old_logprobs or ref_logprobs")
    counts = [len(reader.open_manifest(run).iterations) for run in (run_a, run_b)]
    if iterations is None and counts[0] != counts[1]:
        raise UserError(f"{run_a} has {counts[0]} iterations, {run_b} has {counts[1]}; name the iterations to compare")
    columns = [*KEY, "token_id", column, "entropies", "log_kept_mass"]
    streams = [
        reader.stream(run, "tokens", columns=columns, iterations=iterations, rows=rows) for run in (run_a, run_b)
    ]
    return whole_sequences(_side_by_side(streams[0], streams[1], column, f"{run_a} and {run_b}"))


def _side_by_side(
    first: Iterator[pd.DataFrame], second: Iterator[pd.DataFrame], column: str, runs: str
) -> Iterator[pd.DataFrame]:
    identity = [*KEY, "token_id"]
    for a, b in zip_longest(first, second):
        if a is None or b is None:
            longer = b if a is None else a
            raise UserError(f"{runs}: only one has {_named(longer[identity].to_numpy()[0])}")
        rows = min(len(a), len(b))
        ids = [frame[identity].to_numpy()[:rows] for frame in (a, b)]
        different = np.flatnonzero((ids[0] != ids[1]).any(axis=1))
        if different.size:
            row_a, row_b = ids[0][different[0]], ids[1][different[0]]
            raise UserError(f"{runs}: the first differing token is {_named(row_a)} against {_named(row_b)}")
        if len(a) != len(b):
            longer = a if len(a) > len(b) else b
            raise UserError(f"{runs}: only one has {_named(longer[identity].to_numpy()[rows])}")
        yield a.rename(columns={column: "logprobs_a"}).assign(logprobs_b=b[column])[[*REQUIRED, *OPTIONAL[:2]]]


def _named(row: np.ndarray) -> str:
    return f"iteration {row[0]}, sequence {row[1]}, position {row[2]}: token {row[3]}"


def whole_sequences(chunks: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """The same rows in chunks that split no sequence and belong to one iteration each.

    Raises ValueError where rows are not in the order of (iteration, sequence).
    """
    waiting: list[pd.DataFrame] = []
    for chunk in chunks:
        if not len(chunk):
            continue
        keys = chunk[["iteration", "sequence"]].to_numpy()
        before = np.concatenate([waiting[-1][["iteration", "sequence"]].to_numpy()[-1:], keys]) if waiting else keys
        step = np.diff(before, axis=0)
        if ((step[:, 0] < 0) | ((step[:, 0] == 0) & (step[:, 1] < 0))).any():
            raise ValueError("rows are not in the order of iteration and sequence")
        # the first row of every sequence that begins in this chunk
        starts = np.flatnonzero(step.any(axis=1)) + (0 if waiting else 1)
        if not starts.size:
            waiting.append(chunk)
            continue
        yield from _by_iteration(_joined([*waiting, chunk.iloc[: starts[-1]]]))
        waiting = [chunk.iloc[starts[-1] :]]
    if waiting:
        yield from _by_iteration(_joined(waiting))


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    filled = [frame for frame in frames if len(frame)]
    joined = filled[0] if len(filled) == 1 else pd.concat(filled)
    return joined.reset_index(drop=True)


def _by_iteration(chunk: pd.DataFrame) -> Iterator[pd.DataFrame]:
    edges = np.flatnonzero(np.diff(chunk["iteration"].to_numpy())) + 1
    for start, end in zip([0, *edges], [*edges, len(chunk)], strict=True):
        yield chunk.iloc[start:end].reset_index(drop=True)


def masked_tokens(chunk: pd.DataFrame) -> int:
    """How many tokens a mask removed from this chunk."""
    return int(chunk.attrs.get("masked", 0))


def iteration_of(chunk: pd.DataFrame) -> int:
    """The iteration of a chunk, also where a mask left no row."""
    return int(chunk["iteration"].iloc[0] if len(chunk) else chunk.attrs["iteration"])
