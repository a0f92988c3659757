"""Read the log-prob pairs of a recorded run, with every column that a diagnosis can use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.pairs.runs import KEY, chosen_iterations
from ppo_repro.records import reader
from ppo_repro.records.folder import load_recorded_config

_TOKENS = [*KEY, "token_id", "rollout_logprobs", "old_logprobs", "entropies", "prob_sq_sums", "log_kept_mass"]
_SEQUENCES = ["sequence", "prompt_length", "response_length", "rollout_policy_versions", "is_as_sampled"]
_UPDATES = ["epoch", "minibatch", "sequence", "position", "new_logprobs"]


def run_evidence(
    run_dir: Path | str, iterations: Sequence[int] | None = None, allow_incomplete: bool = False
) -> Iterator[pd.DataFrame]:
    """Yield one frame per iteration of a language run: rollout_logprobs, old_logprobs and every column of `diagnose`.

    logprobs_b_again is new_logprobs of the first minibatch, before any step, and NaN for other tokens. The lag, the
    re-encoded ids, and the trainer's padding and prompts are the recorded values. Raises UserError on missing or
    damaged records, and on a run that is not complete unless `allow_incomplete`.
    """
    faults = load_recorded_config(run_dir).mismatch.trainer
    for iteration in chosen_iterations(run_dir, iterations, allow_incomplete):
        one, allow = [iteration], allow_incomplete
        tokens = reader.read_tokens(run_dir, iterations=one, columns=_TOKENS, allow_incomplete=allow)
        sequences = reader.read_sequences(run_dir, iterations=one, columns=_SEQUENCES, allow_incomplete=allow)
        updates = reader.read_updates(run_dir, iterations=one, columns=_UPDATES, allow_incomplete=allow)
        ids = tokens["token_id"].to_numpy()
        versions = _by_token(sequences["rollout_policy_versions"], np.full(len(ids), iteration, np.int32))
        as_sampled = _by_token(sequences["is_as_sampled"], np.ones(len(ids), np.int32))
        padding = np.maximum(faults.padding_leak - sequences["prompt_length"].to_numpy(), 0)
        first = updates[(updates["epoch"] == 0) & (updates["minibatch"] == 0)]
        again = tokens.merge(
            first[["sequence", "position", "new_logprobs"]], on=["sequence", "position"], how="left", validate="1:1"
        )
        yield tokens.rename(columns={"rollout_logprobs": "logprobs_a", "old_logprobs": "logprobs_b"}).assign(
            logprobs_b_again=again["new_logprobs"].to_numpy(),
            # the trainer's ids; -1 stands for the token that was sampled in place of such an id
            token_id_b=ids,
            token_id=np.where(as_sampled == 1, ids, np.int32(-1)),
            pad_length=np.repeat(padding, sequences["response_length"].to_numpy()).astype(np.int32),
            steps_since_sync=iteration - versions,
            prompt_differs=np.int32(bool(faults.prompt_before or faults.prompt_after)),
        )


def _by_token(column: pd.Series, otherwise: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return a column of lists, one per response, as one value per token; `otherwise` if it was not recorded."""
    return otherwise if column.isna().all() else np.concatenate(column.to_list()).astype(np.int32)
