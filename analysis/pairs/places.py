"""Where a token stands in runs that have such places: how old its weights, which turn of a dialogue, which experts.

Each is a column of small integers beside the pairs of a run: `policy_lag`, `turn` and `route`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.records import reader
from ppo_repro.records.manifest import has_responses

LAG = "policy_lag"  # how many iterations older the weights were that sampled a token
TURN = "turn"  # of the model, from 0: how often the environment spoke before
ROUTE = "route"  # an index of ROUTES
PLACES = (LAG, TURN, ROUTE)
# experts of the sampler and of the trainer; after a flip a token sees another past
ROUTES = ("same", "same after a flip", "flipped")
ROUTE_COLUMNS = ["rollout_routes", "policy_routes"]
_VERSIONS, _FORCED = "rollout_policy_versions", "is_forced"

Places = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Recorded:
    """Which places a run has recorded."""

    lags: bool = False
    turns: bool = False
    routes: bool = False


def recorded_places(run_dir: Path | str) -> Recorded:
    """By the first iteration, as all have the same; nothing for a run without responses. Reads one batch of tokens."""
    manifest = reader.open_manifest(run_dir, allow_incomplete=True)
    if not has_responses(manifest) or not manifest.iterations:
        return Recorded()
    columns = [_VERSIONS, _FORCED]
    first = reader.read_sequences(run_dir, iterations=[0], columns=columns, allow_incomplete=True)
    names = ["token_id", *ROUTE_COLUMNS]
    tokens = reader.stream(run_dir, "tokens", columns=names, iterations=[0], rows=1, allow_incomplete=True)
    has = {name: bool(first[name].notna().any()) for name in columns}
    has_routes = any(bool(row[ROUTE_COLUMNS].notna().all(axis=None)) for row in islice(tokens, 1))
    return Recorded(has[_VERSIONS], has[_FORCED], has_routes)


def turns_of(is_forced: Sequence[int]) -> Places:
    """The turn of each sampled token of a response; `is_forced`: 1 where the environment put a token in."""
    forced = np.asarray(is_forced, dtype=bool)
    begins = forced & ~np.concatenate([[False], forced[:-1]])
    return np.cumsum(begins)[~forced].astype(np.int32)


def routes_of(tokens: pd.DataFrame) -> Places:
    """An index of ROUTES for each token, whose rows are whole responses in order; columns as in the table `tokens`."""
    pairs = zip(*(tokens[name] for name in ROUTE_COLUMNS), strict=True)
    flipped = pd.Series([list(a) != list(b) for a, b in pairs], index=tokens.index, dtype=bool)
    so_far = flipped.groupby([tokens["iteration"], tokens["sequence"]]).cummax()
    return np.where(flipped, 2, np.where(so_far, 1, 0)).astype(np.int32)


def with_places(
    run_dir: Path | str, chunks: Iterator[pd.DataFrame], has: Recorded, allow_incomplete: bool
) -> Iterator[pd.DataFrame]:
    """Chunks of whole sequences of one iteration with the places of their tokens, without the routes themselves."""
    iteration, sequences = -1, pd.DataFrame()
    for chunk in chunks:
        now = int(chunk["iteration"].iloc[0])
        if now != iteration and (has.lags or has.turns):
            iteration, columns = now, ["sequence", _VERSIONS, _FORCED]
            read = reader.read_sequences(
                run_dir, iterations=[iteration], columns=columns, allow_incomplete=allow_incomplete
            )
            sequences = read.set_index("sequence")
        yield _placed(chunk, sequences, has)


def _placed(chunk: pd.DataFrame, sequences: pd.DataFrame, has: Recorded) -> pd.DataFrame:
    found = {}
    if has.lags or has.turns:
        sequences = sequences.loc[chunk["sequence"].unique()]
    if has.lags:
        versions = np.concatenate(sequences[_VERSIONS].to_list())
        found[LAG] = np.asarray(chunk["iteration"].to_numpy() - versions, dtype=np.int32)
    if has.turns:
        found[TURN] = np.concatenate([turns_of(forced) for forced in sequences[_FORCED]])
    if has.routes:
        found[ROUTE] = routes_of(chunk)
    return chunk.drop(columns=ROUTE_COLUMNS, errors="ignore").assign(**found)
