"""Read pairs of log-probs of the same token from a recorded run, without torch.

A chunk is a frame of pairs, of a run or of a dump (`testing.pairs`). It has one row per token, in the order of
TOKEN_KEY, and the columns PAIR: the place of the token, its id, and its float32 log-probs (nats) by the sampler (a) and
by the trainer (b). `statistics.mismatch_metrics` measures how far apart they are. If the source has them, a chunk also
has the columns

    entropies, log_kept_mass: float32, nats
    prob_sq_sums: float32, sums of the squared probabilities
    cumulative_probs: float32, of the tokens at least as likely, itself included
    advantages: float32
    policy_lag: int32, how many iterations older the weights were that sampled the token
    turn: int32, of the model, from 0: how often the environment spoke before
    route: int32, an index into ROUTES: whether sampler and trainer chose the same experts

A chunk of a dump has `attrs`: `masked`, the number of tokens that a mask removed, possibly all, and `iteration`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.records import reader
from ppo_repro.records.folder import load_recorded_config
from ppo_repro.records.manifest import Manifest, has_responses, require_responses
from ppo_repro.statistics.clusters import Floats

KEY_IN_ITERATION = ["sequence", "position"]
TOKEN_KEY = ["iteration", *KEY_IN_ITERATION]
PAIR = [*TOKEN_KEY, "token_id", "logprobs_a", "logprobs_b"]
OPTIONAL = ["entropies", "prob_sq_sums", "cumulative_probs", "log_kept_mass", "advantages"]
LAG, TURN, ROUTE = "policy_lag", "turn", "route"
# "flipped": sampler and trainer chose different experts; after that, their later tokens see different pasts
ROUTES = ("same", "same after a flip", "flipped")
_ROUTE_COLUMNS = ["rollout_routes", "policy_routes"]
_LAG_TURN_COLUMNS = ["sequence", "rollout_policy_versions", "is_forced"]
NO_TOKEN = "there is no token to compare; give a run or a file with responses"
_SEQUENCES = ["sequence", "prompt_length", "response_length", "is_as_sampled"]
_UPDATES = [*KEY_IN_ITERATION, "epoch", "minibatch", "new_logprobs"]


def masked_tokens(chunk: pd.DataFrame) -> int:
    """Return the number of tokens that a mask removed from a chunk; 0 for a run."""
    return int(chunk.attrs.get("masked", 0))


def iteration_of(chunk: pd.DataFrame) -> int:
    """Return the iteration of a chunk, even if a mask removed every row."""
    return int(chunk["iteration"].iloc[0] if len(chunk) else chunk.attrs["iteration"])


def deltas(tokens: pd.DataFrame) -> Floats:
    """Return old_logprobs - rollout_logprobs of each row of the table `tokens`, nats, float64."""
    return tokens["old_logprobs"].to_numpy(np.float64) - tokens["rollout_logprobs"].to_numpy(np.float64)


def pairs_of_iteration(run_dir: Path | str, recorded: Manifest, iteration: int) -> pd.DataFrame:
    """Return the pairs rollout_logprobs and old_logprobs of one recorded iteration.

    Actions of a control run have neither token_id nor other columns. Raises UserError on missing or damaged records.
    """
    has_ids = has_responses(recorded)
    beside = ["token_id", *OPTIONAL, *_ROUTE_COLUMNS] if has_ids else []
    columns = [*TOKEN_KEY, "rollout_logprobs", "old_logprobs", *beside]
    tokens = reader.read_tokens(run_dir, iterations=[iteration], columns=columns, recorded=recorded)
    renamed = tokens.rename(columns={"rollout_logprobs": "logprobs_a", "old_logprobs": "logprobs_b"})
    if not has_ids:
        return renamed
    sequences = reader.read_sequences(run_dir, iterations=[iteration], columns=_LAG_TURN_COLUMNS, recorded=recorded)
    return with_lag_turn_route(renamed, sequences)


def turns_of(is_forced: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the turn of each sampled token of a response. `is_forced` is 1 for a token of the environment."""
    forced = np.asarray(is_forced, dtype=bool)
    begins = forced & ~np.concatenate([[False], forced[:-1]])
    return np.cumsum(begins)[~forced].astype(np.int32)


def routes_of(tokens: pd.DataFrame) -> npt.NDArray[np.int32]:
    """Return each token's index into ROUTES. `tokens` has whole responses of the table `tokens`, in order."""
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


def run_evidence(run_dir: Path | str, recorded: Manifest) -> Iterator[pd.DataFrame]:
    """Yield the pairs of each iteration that a language run computed, with every column that the diagnosis reads.

    logprobs_b_again is new_logprobs of the first minibatch, before any step, and NaN for other tokens. The lag, the
    re-encoded ids, and the trainer's padding and prompts are the recorded values. Raises UserError for a run without
    responses, and on missing or damaged records.
    """
    require_responses(run_dir, recorded)
    faults = load_recorded_config(run_dir).mismatch.trainer
    for iteration in recorded.own_iterations:
        pairs = pairs_of_iteration(run_dir, recorded, iteration)
        sequences = reader.read_sequences(run_dir, iterations=[iteration], columns=_SEQUENCES, recorded=recorded)
        updates = reader.read_updates(run_dir, iterations=[iteration], columns=_UPDATES, recorded=recorded)
        ids, as_sampled = pairs["token_id"].to_numpy(), sequences["is_as_sampled"]
        is_sampled = np.bool_(True) if as_sampled.isna().all() else np.concatenate(as_sampled.to_list()) == 1
        padding = np.maximum(faults.padding_leak - sequences["prompt_length"].to_numpy(), 0)
        first = updates[(updates["epoch"] == 0) & (updates["minibatch"] == 0)]
        new = first[[*KEY_IN_ITERATION, "new_logprobs"]]
        again = pairs[KEY_IN_ITERATION].merge(new, on=KEY_IN_ITERATION, how="left", validate="1:1")
        yield pairs.assign(
            logprobs_b_again=again["new_logprobs"].to_numpy(),
            # the records have the trainer's ids; where the sampler drew another token, its id is unknown: -1
            token_id_b=ids,
            token_id=np.where(is_sampled, ids, np.int32(-1)),
            pad_length=np.repeat(padding, sequences["response_length"].to_numpy()).astype(np.int32),
            steps_since_sync=pairs[LAG] if LAG in pairs else np.int32(0),
            prompt_differs=np.int32(bool(faults.prompt_before or faults.prompt_after)),
        )
