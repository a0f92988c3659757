"""Read the log-prob pairs of a recorded run, with every column that a diagnosis can use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.analysis.pairs.lag_turn_route import LAG
from ppo_repro.analysis.pairs.run_pairs import own_iterations, rollout_and_old
from ppo_repro.records import reader
from ppo_repro.records.folder import load_recorded_config

_TOKEN = ["sequence", "position"]
_SEQUENCES = ["sequence", "prompt_length", "response_length", "is_as_sampled"]
_UPDATES = [*_TOKEN, "epoch", "minibatch", "new_logprobs"]


def run_evidence(
    run_dir: Path | str, iterations: Sequence[int] | None = None, allow_incomplete: bool = False
) -> Iterator[pd.DataFrame]:
    """Yield the pairs `rollout_vs_old` of each own iteration of a language run, with every column of `diagnose_chunks`.

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
        own = np.bool_(True) if as_sampled.isna().all() else np.concatenate(as_sampled.to_list()) == 1
        padding = np.maximum(faults.padding_leak - sequences["prompt_length"].to_numpy(), 0)
        first = updates[(updates["epoch"] == 0) & (updates["minibatch"] == 0)]
        again = pairs[_TOKEN].merge(first[[*_TOKEN, "new_logprobs"]], on=_TOKEN, how="left", validate="1:1")
        yield pairs.assign(
            logprobs_b_again=again["new_logprobs"].to_numpy(),
            # the trainer's ids; -1 stands for the token that was sampled in place of such an id
            token_id_b=ids,
            token_id=np.where(own, ids, np.int32(-1)),
            pad_length=np.repeat(padding, sequences["response_length"].to_numpy()).astype(np.int32),
            steps_since_sync=pairs[LAG] if LAG in pairs else np.int32(0),
            prompt_differs=np.int32(bool(faults.prompt_before or faults.prompt_after)),
        )
