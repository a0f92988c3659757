"""The engine of the loop over SGLang servers: weights in step, requests shared out, answers checked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from ppo_repro.config.engine import SGLangServers
from ppo_repro.config.run import RunConfig
from ppo_repro.numerics.optim.optimizer import weights_digest
from ppo_repro.output import say
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.sglang import weights
from ppo_repro.rollout.sglang.client import Call, ServerGone
from ppo_repro.rollout.sglang.fleet import Fleet
from ppo_repro.rollout.sglang.messages import generate_body, read_completions
from ppo_repro.rollout.sglang.server import Waiting
from ppo_repro.shares import share_ranges


class SGLangEngine:
    """Samples from the live weights of `policy`, which it brings to the servers when they have changed.

    Requests are cut into one run of consecutive ones per server, so that the samples of a prompt share its cache.
    """

    def __init__(self, policy: PreTrainedModel, stop_ids: frozenset[int], max_context: int, fleet: Fleet) -> None:
        self.policy, self.stop_ids, self.max_context, self.fleet = policy, stop_ids, max_context, fleet
        self._written = ""  # digest of the weights in the model folder
        self._held: dict[str, str] = {}  # and of those that a server is known to hold, by URL
        self._groups: dict[str, dist.ProcessGroup] = {}  # of weight_sync = distributed

    def open(self) -> None:
        """Start the servers, or look at those that run already."""
        digest = weights_digest(self.policy.named_parameters())
        if not self.fleet.engine.urls:
            self._write(digest)
        self.fleet.open(digest)

    def close(self) -> None:
        """Leave process groups, end servers of the run, remove the weights written for them."""
        try:
            for url, group in self._groups.items():
                weights.leave_group(url, group, self.fleet.engine.timeout_s)
        finally:
            self.fleet.end()
            shutil.rmtree(self.fleet.model_folder, ignore_errors=True)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        digest = weights_digest(self.policy.named_parameters())
        cuts = share_ranges(len(requests), [1] * len(self.fleet.servers))
        shares = {index: requests[cut.start : cut.stop] for index, cut in enumerate(cuts) if cut}
        size = self.policy.config.vocab_size
        bodies = {
            index: generate_body(some, sampling, self.stop_ids, size, self.max_context)
            for index, some in shares.items()
        }
        answers, gone = self._ask(bodies, digest)
        if gone:
            for index, error in gone.items():
                self._replace(index, error, digest)
            more, still_gone = self._ask({index: bodies[index] for index in gone}, digest)
            for index, error in still_gone.items():
                raise self.fleet.explain(index, error)
            answers |= more
        return [
            completion
            for index, some in shares.items()
            for completion in read_completions(
                answers[index], some, sampling, self.stop_ids, size, digest, self.fleet.servers[index].url
            )
        ]

    def _ask(self, bodies: Mapping[int, dict[str, Any]], digest: str) -> tuple[dict[int, Any], dict[int, ServerGone]]:
        """The answers by server, which all work at the same time, and what became of servers that gave none."""
        calls: dict[int, Call] = {}
        answers: dict[int, Any] = {}
        gone: dict[int, ServerGone] = {}
        try:
            for index, body in bodies.items():
                try:
                    self._bring_weights(index, digest)
                    url = self.fleet.servers[index].url
                    calls[index] = Call(url, "POST", "/generate", body, self.fleet.engine.timeout_s)
                except ServerGone as error:
                    gone[index] = error
            for index, call in calls.items():
                try:
                    answers[index] = call.json()
                except ServerGone as error:
                    gone[index] = error
        finally:
            for call in calls.values():
                call.close()
        return answers, gone

    def _replace(self, index: int, error: ServerGone, digest: str) -> None:
        """Another server for one that is gone, where that changes no bit: exact numerics, and the run's own server."""
        lost = self.fleet.servers[index]
        reason = self.fleet.explain(index, error)
        if self.fleet.engine.numerics != "exact" or lost.process is None:
            raise reason
        say(f"{reason}; starting another one, which changes no result")
        self._groups.pop(lost.url, None)
        self._held.pop(lost.url, None)
        self._write(digest)
        self.fleet.replace(index, digest)

    def _write(self, digest: str) -> None:
        if self._written != digest:
            weights.write_folder(self.policy, self.stop_ids, self.fleet.model_folder)
            self._written = digest

    def _bring_weights(self, index: int, digest: str) -> None:
        found, engine = self.fleet.servers[index], self.fleet.engine
        if self._held.get(found.url) == digest:
            return
        timeout = engine.timeout_s
        first = found.url not in self._held
        self._held[found.url] = ""
        if first and found.started_with == digest:
            pass  # it has loaded these itself
        elif engine.weight_sync == "disk":
            self._write(digest)
            weights.from_disk(found.url, self.fleet.model_folder, digest, timeout)
        elif engine.weight_sync == "tensor":
            weights.from_tensor(found.url, self.policy, digest, timeout)
        else:
            if found.url not in self._groups:
                self._groups[found.url] = weights.join_group(found.url, self.policy.device.type, timeout)
            weights.from_distributed(found.url, self.policy, self._groups[found.url], digest, timeout)
        weights.confirm(found.url, digest, engine.numerics == "exact", timeout)
        self._held[found.url] = digest


@contextmanager
def sglang_engine(
    config: RunConfig,
    engine: SGLangServers,
    policy: PreTrainedModel,
    stop_ids: frozenset[int],
    folder: Path,
    waiting: Waiting,
) -> Iterator[SGLangEngine]:
    """The engine with its servers, which end with the block. `folder` is for logs, notes and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    opened = SGLangEngine(policy, stop_ids, config.numerics.max_context, Fleet(config, engine, folder, waiting))
    try:
        opened.open()
        yield opened
    finally:
        opened.close()
