"""Servers of the first process of a run that sample for all of its processes.

They get the requests of one process alone, in its order, so not even a stock server's batches show how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from ppo_repro.config.engine import SGLangServers
from ppo_repro.numerics.optim.optimizer import weights_digest
from ppo_repro.numerics.sharding.model_folder import lend_model
from ppo_repro.numerics.sharding.parts import parts_of, whole_parameters
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Completion, Dialogue, Request, Sampling
from ppo_repro.rollout.sglang.engine import SGLangEngine
from ppo_repro.rollout.sglang.weights import FILE_BYTES


class Giving:
    """The place of the servers in another process: gives the first one its parts of the policy, where it divides it."""

    def __init__(self, policy: PreTrainedModel, settings: SGLangServers) -> None:
        self.policy = policy
        self._folder_digest = ""  # of the weights in the first process's folder
        self._divides = parts_of(policy).divides
        if self._divides:
            digest = weights_digest(whole_parameters(policy))
            if not settings.urls:  # servers start on the folder
                self._give(digest)

    def generate(self) -> None:
        """Give what the first process asks for before it samples."""
        if self._divides:
            self._give(weights_digest(whole_parameters(self.policy)))

    def _give(self, digest: str) -> None:
        if digest != self._folder_digest:
            lend_model(self.policy, FILE_BYTES)
            self._folder_digest = digest


class SharedEngine:
    """Samples for all processes of a run with the servers of the first; the others have a `Giving` in their place."""

    def __init__(self, ranks: Ranks, servers: SGLangEngine | Giving) -> None:
        self.ranks, self.servers = ranks, servers

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        batches = self.ranks.gather([list(requests)])  # one of each process, or of each group that has one model
        place = self.ranks.mine(len(batches), ()).start
        start = sum(len(batch) for batch in batches[:place])

        def sampled() -> list[Completion]:
            assert isinstance(self.servers, SGLangEngine)
            return self.servers.generate([request for batch in batches for request in batch], sampling, dialogue)

        if isinstance(self.servers, Giving):
            self.servers.generate()
        return self.ranks.first(sampled)[start : start + len(requests)]
