"""Frames of pairs: two log-probs of the same token in each row. Never imports torch.

A frame has the columns PAIR: the place of the token, its id, and its float32 log-probs (nats) by the sampler (a) and by
the trainer (b). `statistics.mismatch` measures how far apart they are.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ppo_repro.testing.dumps import DumpedResponse

KEY = ["iteration", "sequence", "position"]
PAIR = [*KEY, "token_id", "logprobs_a", "logprobs_b"]


def tokens_of(response: DumpedResponse, sequence: int) -> pd.DataFrame:
    """Return the pairs of the tokens that count, with EXTRA of `dumps`; token_id is -1 without tokens."""
    positions = np.flatnonzero(response.counts)
    ids = np.array(response.response_ids) if response.response_ids else np.full(len(response.counts), -1)
    lists = {"token_id": ids, "logprobs_a": response.sampler, "logprobs_b": response.trainer, **response.extra}
    columns = {name: values[positions] for name, values in lists.items()}
    return pd.DataFrame({"iteration": response.iteration, "sequence": sequence, "position": positions, **columns})
