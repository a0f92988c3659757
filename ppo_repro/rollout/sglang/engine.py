"""An engine that samples with SGLang servers: keeps their weights current, divides requests, checks answers.

A server gets the digest of the weights as their version and returns it with every response. In deterministic numerics
it also computes the digest of its own weights, by the trainer's function. Stock SGLang cannot, and silently skips a
tensor whose name it does not know.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ppo_repro.config.engine import SGLangServers
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.files import whole_folder
from ppo_repro.models.folders import write_model
from ppo_repro.numerics.families import routers
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.output import say
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Completion, Dialogue, Request, Sampling
from ppo_repro.rollout.sglang.client import Call, ServerGone, get, post
from ppo_repro.rollout.sglang.fleet import Fleet
from ppo_repro.rollout.sglang.messages import generate_body, read_completions, routed_layers
from ppo_repro.rollout.sglang.server import Waiting
from ppo_repro.sglang_plugin.names import DIGEST


def write_folder(policy: PreTrainedModel, stop_ids: frozenset[int], folder: Path, deterministic: bool) -> None:
    """Write the policy as a folder for a server, with the run's end tokens. UserError where that fails.

    Deterministic servers take the names of the policy's parameters, stock ones those of published checkpoints: they
    differ in mixtures, whose experts are one parameter here and many tensors there.
    """
    with whole_folder(folder) as temporary:
        write_model(policy, temporary, original_format=not deterministic)
        path = temporary / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "eos_token_id": sorted(stop_ids)}, indent=1), encoding="utf-8")
        (temporary / "generation_config.json").unlink(missing_ok=True)  # it may have other end tokens


def confirm(url: str, digest: str, deterministic: bool, timeout: float) -> None:
    """Raise UserError unless the server has this weight version; in deterministic numerics also compare its own digest.

    PromiseBroken where the server's weights have another digest.
    """
    version = get(url, "/model_info", timeout).get("weight_version")
    if version != digest:
        raise UserError(f"{url}: has weights {version!r} after an update to {digest!r}; somebody else updates it")
    if not deterministic:
        return
    answer = Call(url, "POST", "/get_weights_by_name", {"name": DIGEST}, timeout).json()
    try:
        server_digest = bytes(int(code) for code in answer).decode("ascii")
    except (TypeError, ValueError) as error:
        raise UserError(f"{url}: its digest of the weights is {answer!r}; is it a server of this package?") from error
    if server_digest != digest:
        raise PromiseBroken(f"{url}: has weights of digest {server_digest} after an update to {digest}")


class SGLangEngine:
    """Samples with the current weights of `policy`, which it sends to the servers when they have changed.

    Each server gets a range of consecutive requests, so that the samples of a prompt share its cache.
    """

    def __init__(self, policy: PreTrainedModel, stop_ids: frozenset[int], max_context: int, fleet: Fleet) -> None:
        self.policy, self.stop_ids, self.max_context, self.fleet = policy, stop_ids, max_context, fleet
        self._routed = routed_layers(policy) if fleet.routes else None
        self._folder_digest = ""  # of the weights in the model folder
        self._server_digests: dict[str, str] = {}  # of the weights each server is known to have, by URL

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, dialogue: Dialogue | None = None
    ) -> list[Completion]:
        if dialogue is not None:
            raise UserError("rollout.engine.kind = sglang: samples one turn, which an end token ends; take kind torch")
        digest = weights_digest(self.policy.named_parameters())
        count = len(self.fleet.servers)
        edges = [server * len(requests) // count for server in range(count + 1)]
        shares = {i: requests[start:end] for i, (start, end) in enumerate(pairwise(edges)) if start < end}
        vocab_size = self.policy.config.vocab_size
        routed = self._routed if sampling.routes and self.fleet.routes else None
        bodies = {
            index: generate_body(share, sampling, self.stop_ids, vocab_size, self.max_context, routed is not None)
            for index, share in shares.items()
        }
        answers, gone = self._ask(bodies, digest)
        if gone:
            for index, error in gone.items():
                self._replace(index, error, digest)
            more, still_gone = self._ask({index: bodies[index] for index in gone}, digest)
            for index, error in still_gone.items():
                raise self.fleet.explain(index, error)
            answers |= more
        urls = {index: self.fleet.servers[index].url for index in shares}
        return [
            completion
            for index, share in shares.items()
            for completion in read_completions(
                answers[index], share, sampling, self.stop_ids, vocab_size, digest, urls[index], routed
            )
        ]

    def _ask(self, bodies: Mapping[int, dict[str, Any]], digest: str) -> tuple[dict[int, Any], dict[int, ServerGone]]:
        """(answers, errors of servers that are gone), each by server. All servers work at the same time."""
        calls: dict[int, Call] = {}
        answers: dict[int, Any] = {}
        gone: dict[int, ServerGone] = {}
        try:
            for index, body in bodies.items():
                try:
                    self._send_weights(index, digest)
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
        """Replace a server that is gone, where that changes no bit: one started here, in deterministic numerics."""
        lost = self.fleet.servers[index]
        reason = self.fleet.explain(index, error)
        if self.fleet.engine.numerics != "deterministic" or lost.process is None:
            raise reason
        say(f"{reason}; starting another one, which changes no result")
        self._server_digests.pop(lost.url, None)
        self.write(digest)
        self.fleet.replace(index, digest)

    def write(self, digest: str) -> None:
        """Write the model folder for servers unless it has the weights of this digest."""
        if self._folder_digest != digest:
            write_folder(
                self.policy, self.stop_ids, self.fleet.model_folder, self.fleet.engine.numerics == "deterministic"
            )
            self._folder_digest = digest

    def _send_weights(self, index: int, digest: str) -> None:
        server, engine = self.fleet.servers[index], self.fleet.engine
        if self._server_digests.get(server.url) == digest:
            return
        first = server.url not in self._server_digests
        self._server_digests[server.url] = ""
        if not (first and server.started_with == digest):  # else the server has loaded them at its start
            self.write(digest)
            # the folder must have the same path for the server
            body = {"model_path": str(self.fleet.model_folder), "weight_version": digest, "flush_cache": True}
            post(server.url, "/update_weights_from_disk", body, engine.timeout_s)
        confirm(server.url, digest, engine.numerics == "deterministic", engine.timeout_s)
        self._server_digests[server.url] = digest


@contextmanager
def sglang_engine(
    config: RunConfig,
    engine: SGLangServers,
    policy: PreTrainedModel,
    stop_ids: frozenset[int],
    folder: Path,
    waiting: Waiting,
) -> Iterator[SGLangEngine]:
    """The engine with its servers, which end with the block. Logs, notes and weights go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    routes = config.asks_for_routes and bool(routers(policy))
    fleet = Fleet(config, engine, folder, waiting, routes)
    opened = SGLangEngine(policy, stop_ids, config.numerics.max_context, fleet)
    try:
        digest = weights_digest(policy.named_parameters())
        if not engine.urls:
            opened.write(digest)
        fleet.open(digest)
        yield opened
    finally:
        fleet.end()
        shutil.rmtree(fleet.model_folder, ignore_errors=True)


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
