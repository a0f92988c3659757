"""Servers of the first process of a run that sample for all of its processes.

They get the requests of one process alone, in its order, so not even a stock server's batches show how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Completion, Dialogue, Request, Sampling
from ppo_repro.rollout.sglang.engine import SGLangEngine


class SharedEngine:
    """Samples for all processes of a run with the servers of the first; the others have none."""

    def __init__(self, ranks: Ranks, servers: SGLangEngine | None) -> None:
        self.ranks, self.servers = ranks, servers

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        batches = self.ranks.everyone(list(requests))
        start = sum(len(batch) for batch in batches[: self.ranks.rank])

        def sampled() -> list[Completion]:
            assert self.servers is not None
            return self.servers.generate([request for batch in batches for request in batch], sampling, dialogue)

        return self.ranks.first(sampled)[start : start + len(requests)]
