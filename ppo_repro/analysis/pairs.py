"""Read pairs of log-probs of the same token from a recorded run, or from the dump of another stack.

A source is an iterator of chunks, one per iteration. A chunk is a frame of pairs (`testing.pairs`) with one row per
token, in the order of (iteration, sequence, position). Side `a` sampled the token or came first. If the source has
them, a chunk also has the columns

    entropies, log_kept_mass: float32, nats
    prob_sq_sums: float32, sums of the squared probabilities
    advantages: float32
    policy_lag: int32, how many iterations older the weights were that sampled the token
    turn: int32, of the model, from 0: how often the environment spoke before
    route: int32, an index into ROUTES: whether sampler and trainer chose the same experts

Chunks of a dump also have the other columns of `testing.dumps.EXTRA` that the dump has, in float32.

`chunk.attrs["masked"]` counts the tokens that a mask removed from the chunk, possibly all. Runs have no mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.folder import load_recorded_config
from ppo_repro.records.manifest import Manifest, require_responses
from ppo_repro.statistics.clusters import Floats
from ppo_repro.testing.dumps import FORMATS, Names, read_dump
from ppo_repro.testing.pairs import KEY, PAIR, tokens_of

PAIRS = ("rollout_vs_old", "old_vs_first_new")
NO_TOKEN = "there is no token to compare; give a run or a file with responses"
OPTIONAL = ["entropies", "prob_sq_sums", "log_kept_mass", "advantages"]
LAG, TURN, ROUTE = "policy_lag", "turn", "route"
# "flipped": sampler and trainer chose different experts; after that, their later tokens see different pasts
ROUTES = ("same", "same after a flip", "flipped")
_ROUTE_COLUMNS = ["rollout_routes", "policy_routes"]
_LAG_TURN_COLUMNS = ["sequence", "rollout_policy_versions", "is_forced"]
_TOKEN = ["sequence", "position"]
_SEQUENCES = ["sequence", "prompt_length", "response_length", "is_as_sampled"]
_UPDATES = [*_TOKEN, "epoch", "minibatch", "new_logprobs"]


def chosen_iterations(recorded: Manifest, iterations: Sequence[int] | None) -> Sequence[int]:
    """Return `iterations`, or all recorded iterations if None. Raises UserError for an empty list."""
    if iterations is not None and not len(iterations):
        raise UserError("iterations = []: names no iteration; leave it out for all iterations")
    return range(recorded.num_iterations) if iterations is None else iterations


def own_iterations(run_dir: Path | str, recorded: Manifest, iterations: Sequence[int] | None) -> Sequence[int]:
    """Return `iterations`; if None, all iterations that a language run computed itself, with its own settings.

    Raises UserError for a run without responses, for an empty list, and for an iteration of a fork's origin.
    """
    require_responses(run_dir, recorded)
    computed = recorded.own_iterations
    chosen = computed if iterations is None else chosen_iterations(recorded, iterations)
    if copied := [i for i in chosen if 0 <= i < computed.start]:
        whose = "is of the run that was forked, which has settings of its own; give the folder of that run"
        raise UserError(f"{run_dir}: iteration {copied[0]} {whose}")
    return chosen


def run_pairs(
    run_dir: Path | str,
    pair: str = "rollout_vs_old",
    *,
    iterations: Sequence[int] | None = None,
    allow_incomplete: bool = False,
) -> Iterator[pd.DataFrame]:
    """Yield the pairs of a recorded run, one iteration at a time.

    Args:
        pair: `rollout_vs_old`: rollout_logprobs against old_logprobs, sampler and trainer with the same weights.
            `old_vs_first_new`: old_logprobs against new_logprobs of the first epoch, without minibatches in which the
            policy took no step.
        iterations: the iterations to read; None for all that the run computed itself.
        allow_incomplete: also read a run that is not complete.

    Raises:
        UserError: another pair, a run without responses, an iteration of a fork's origin, or records that are missing,
            unknown or damaged.
    """
    if pair not in PAIRS:
        raise UserError(f"pair = {pair!r}: must be {' or '.join(PAIRS)}")
    read = rollout_and_old if pair == "rollout_vs_old" else _old_and_first_new
    recorded = reader.open_manifest(run_dir, allow_incomplete)
    return (read(run_dir, recorded, iteration) for iteration in own_iterations(run_dir, recorded, iterations))


def deltas(tokens: pd.DataFrame) -> Floats:
    """Return old_logprobs - rollout_logprobs of each row of the table `tokens`, nats, float64."""
    return tokens["old_logprobs"].to_numpy(np.float64) - tokens["rollout_logprobs"].to_numpy(np.float64)


def rollout_and_old(run_dir: Path | str, recorded: Manifest, iteration: int) -> pd.DataFrame:
    """Return the pairs `rollout_vs_old` of one iteration."""
    columns = [*KEY, "token_id", "rollout_logprobs", "old_logprobs", *OPTIONAL, *_ROUTE_COLUMNS]
    tokens = reader.read_tokens(run_dir, iterations=[iteration], columns=columns, recorded=recorded)
    sequences = reader.read_sequences(run_dir, iterations=[iteration], columns=_LAG_TURN_COLUMNS, recorded=recorded)
    renamed = tokens.rename(columns={"rollout_logprobs": "logprobs_a", "old_logprobs": "logprobs_b"})
    return with_lag_turn_route(renamed, sequences)


def _old_and_first_new(run_dir: Path | str, recorded: Manifest, iteration: int) -> pd.DataFrame:
    columns = [*KEY, "token_id", "old_logprobs", *OPTIONAL]
    tokens = reader.read_tokens(run_dir, iterations=[iteration], columns=columns, recorded=recorded)
    # clip_flag is null exactly where the policy takes no step; new_logprobs can also be a recorded NaN
    columns = [*KEY, "epoch", "new_logprobs", "clip_flag"]
    updates = reader.read_updates(run_dir, iterations=[iteration], columns=columns, recorded=recorded)
    first = updates[(updates["epoch"] == 0) & updates["clip_flag"].notna()][[*KEY, "new_logprobs"]]
    joined = tokens.merge(first, on=KEY, how="inner", validate="one_to_one").sort_values(KEY, ignore_index=True)
    renamed = joined.rename(columns={"old_logprobs": "logprobs_a", "new_logprobs": "logprobs_b"})
    return renamed[[*PAIR, *OPTIONAL]]


def turns_of(is_forced: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the turn of each sampled token of a response; `is_forced` is 1 for a token of the environment."""
    forced = np.asarray(is_forced, dtype=bool)
    begins = forced & ~np.concatenate([[False], forced[:-1]])
    return np.cumsum(begins)[~forced].astype(np.int32)


def routes_of(tokens: pd.DataFrame) -> npt.NDArray[np.int32]:
    """Return each token's index into ROUTES; `tokens` has whole responses of the table `tokens`, in order."""
    pairs = zip(*(tokens[name] for name in _ROUTE_COLUMNS), strict=True)
    flipped = pd.Series([list(a) != list(b) for a, b in pairs], index=tokens.index, dtype=bool)
    so_far = flipped.groupby([tokens["iteration"], tokens["sequence"]]).cummax()
    return np.where(flipped, 2, np.where(so_far, 1, 0)).astype(np.int32)


def with_lag_turn_route(tokens: pd.DataFrame, sequences: pd.DataFrame) -> pd.DataFrame:
    """Return the tokens of one iteration with the recorded columns LAG, TURN and ROUTE, but without _ROUTE_COLUMNS.

    `sequences` has the columns _LAG_TURN_COLUMNS of the same iteration.
    """
    columns, versions, forced = {}, sequences["rollout_policy_versions"], sequences["is_forced"]
    if versions.notna().any():
        columns[LAG] = (tokens["iteration"].to_numpy() - np.concatenate(versions.to_list())).astype(np.int32)
    if forced.notna().any():
        columns[TURN] = np.concatenate([turns_of(one) for one in forced])
    if tokens[_ROUTE_COLUMNS].notna().any(axis=None):
        columns[ROUTE] = routes_of(tokens)
    return tokens.drop(columns=_ROUTE_COLUMNS).assign(**columns)


def run_evidence(
    run_dir: Path | str, iterations: Sequence[int] | None = None, allow_incomplete: bool = False
) -> Iterator[pd.DataFrame]:
    """Yield the pairs `rollout_vs_old` of each iteration that a run computed, with every column of `diagnose_chunks`.

    logprobs_b_again is new_logprobs of the first minibatch, before any step, and NaN for other tokens. The lag, the
    re-encoded ids, and the trainer's padding and prompts are the recorded values. Raises UserError on missing or
    damaged records, and on a run that is not complete unless `allow_incomplete`.
    """
    faults = load_recorded_config(run_dir).mismatch.trainer
    recorded = reader.open_manifest(run_dir, allow_incomplete)
    for iteration in own_iterations(run_dir, recorded, iterations):
        pairs = rollout_and_old(run_dir, recorded, iteration)
        sequences = reader.read_sequences(run_dir, iterations=[iteration], columns=_SEQUENCES, recorded=recorded)
        updates = reader.read_updates(run_dir, iterations=[iteration], columns=_UPDATES, recorded=recorded)
        ids, as_sampled = pairs["token_id"].to_numpy(), sequences["is_as_sampled"]
        is_sampled = np.bool_(True) if as_sampled.isna().all() else np.concatenate(as_sampled.to_list()) == 1
        padding = np.maximum(faults.padding_leak - sequences["prompt_length"].to_numpy(), 0)
        first = updates[(updates["epoch"] == 0) & (updates["minibatch"] == 0)]
        again = pairs[_TOKEN].merge(first[[*_TOKEN, "new_logprobs"]], on=_TOKEN, how="left", validate="1:1")
        yield pairs.assign(
            logprobs_b_again=again["new_logprobs"].to_numpy(),
            # the trainer's ids; -1 stands for the token that was sampled in place of such an id
            token_id_b=ids,
            token_id=np.where(is_sampled, ids, np.int32(-1)),
            pad_length=np.repeat(padding, sequences["response_length"].to_numpy()).astype(np.int32),
            steps_since_sync=pairs[LAG] if LAG in pairs else np.int32(0),
            prompt_differs=np.int32(bool(faults.prompt_before or faults.prompt_after)),
        )


def imported_pairs(
    paths: Path | str | Sequence[Path | str], names: Names | str | None = None
) -> Iterator[pd.DataFrame]:
    """Yield one chunk (`run_pairs`) for consecutive rows of the same iteration.

    `names` is a `Names`, one of FORMATS, or None to recognise the stack by its columns. The column sequence numbers the
    responses of all files; position is the index in the response, which counts masked tokens. Log-probs are in nats;
    null becomes NaN. Masked tokens are dropped and counted in `chunk.attrs["masked"]`, also padding after a response,
    unless a padding mask of the file is of the response too. Raises UserError, which names file and row.
    """
    if isinstance(names, str) and names not in FORMATS:
        raise UserError(f"columns = {names!r}: must be one of {', '.join(FORMATS)}, or Names(...)")
    files = [paths] if isinstance(paths, str | Path) else paths
    responses = enumerate(r for path in files for r in read_dump(Path(path), names))
    for iteration, group in groupby(responses, lambda item: item[1].iteration):
        members = list(group)
        frame = pd.concat([tokens_of(r, sequence) for sequence, r in members], ignore_index=True)
        frame.attrs.update(masked=sum(r.masked for _, r in members), iteration=iteration)
        yield frame


def masked_tokens(chunk: pd.DataFrame) -> int:
    """Return the number of tokens that a mask removed from a chunk."""
    return int(chunk.attrs.get("masked", 0))


def iteration_of(chunk: pd.DataFrame) -> int:
    """Return the iteration of a chunk, even if a mask removed every row."""
    return int(chunk["iteration"].iloc[0] if len(chunk) else chunk.attrs["iteration"])
