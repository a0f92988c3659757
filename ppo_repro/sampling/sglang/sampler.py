"""Sample with SGLang servers: keep their weights current, divide requests between them, check their answers.

A server receives the digest of the weights as their version, and returns the version with every response. In
deterministic numerics the server also computes the digest of its weights, by the trainer's function. Stock SGLang
cannot compute the digest, and silently skips a tensor with an unknown name.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel

from ppo_repro.base.errors import PromiseBroken, UserError
from ppo_repro.base.files import atomic_write, whole_folder
from ppo_repro.config.rollout import SGLangServers
from ppo_repro.config.run import RunConfig
from ppo_repro.models.folders import write_sampled
from ppo_repro.numerics.families import routers
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.sampler import Completion, Request, Sampling
from ppo_repro.sampling.responses import UncutSampling
from ppo_repro.sampling.sglang.client import Call, ask
from ppo_repro.sampling.sglang.command import (
    RETURN_ROUTES,
    SPARE_CONTEXT,
    Needs,
    look_into,
    server_arguments,
    server_environment,
)
from ppo_repro.sampling.sglang.messages import Batch, generate_body, read_completions, routed_layers
from ppo_repro.sampling.sglang.plugin.names import ARCHITECTURES, ATTENTION_BACKEND, DIGEST
from ppo_repro.sampling.sglang.server import Server, Waiting, death, end, free_port, start, wait_until_ready

NOTES = "servers.json"
# the settings of a server that a run records, because they can change a number or explain a speed
RECORDED = (
    *("version", "launch_command", "attention_backend", "sampling_backend", "dtype", "kv_cache_dtype", "quantization"),
    *("enable_deterministic_inference", "rl_on_policy_target", "device", "tp_size", "context_length", "page_size"),
    *("max_total_num_tokens", "max_running_requests", "chunked_prefill_size", "disable_radix_cache"),
    *("disable_overlap_schedule", "speculative_algorithm", "json_model_override_args"),
)


def check_server(url: str, needs: Needs) -> dict[str, Any]:
    """Return the settings of a server. Raises UserError if the server lacks one of the run's needs."""
    engine, numerics = needs.engine, needs.numerics
    info, model = ask(url, "/server_info", engine.timeout_s), ask(url, "/model_info", engine.timeout_s)
    if "version" not in info or "is_generation" not in model:
        raise UserError(f"{url}: does not answer like an SGLang server")
    if info.get("enable_deterministic_inference") is not True:
        raise UserError(
            f"{url}: runs without --enable-deterministic-inference, so SGLang ignores every seed; start it with that"
        )
    if needs.routes and info.get("enable_return_routed_experts") is not True:
        raise UserError(
            f"{url}: runs without {RETURN_ROUTES}, and records.level = deep and ppo.replay_routes need the routes of a "
            "mixture of experts; start it with that"
        )
    required: dict[str, Any] = {"sampling_backend": "pytorch", "speculative_algorithm": None}
    if engine.numerics == "deterministic":
        required |= {"attention_backend": ATTENTION_BACKEND, "dtype": "float32"}
        wanted = [ARCHITECTURES[numerics.precision]]
        if model.get("architectures") != wanted:
            raise UserError(
                f"{url}: serves {model.get('architectures')}; rollout.engine.numerics = deterministic needs the "
                f"plugin's {wanted} for numerics.precision = {numerics.precision}"
            )
    for name, value in required.items():
        if info.get(name) != value:
            raise UserError(f"{url}: has {name} = {info.get(name)!r}; must be {value!r}")
    context, least = info.get("context_length"), numerics.max_context + SPARE_CONTEXT
    if isinstance(context, int) and context < least:
        raise UserError(
            f"{url}: has --context-length {context}; must be at least numerics.max_context + {SPARE_CONTEXT} "
            f"= {least}, because SGLang reserves some of it"
        )
    return {name: info.get(name) for name in RECORDED} | {"architectures": model.get("architectures")}


def confirm(url: str, digest: str, deterministic: bool, timeout: float) -> None:
    """Check that a server has the weights that the run sent, whose version is their digest.

    Raises UserError for another version. If `deterministic`, the server computes the digest too: raises PromiseBroken
    for another digest.
    """
    version = ask(url, "/model_info", timeout).get("weight_version")
    if version != digest:
        raise UserError(f"{url}: has weights {version!r} after an update to {digest!r}; somebody else updates it")
    if not deterministic:
        return
    answer = Call(url, "/get_weights_by_name", timeout, {"name": DIGEST}).json()
    try:
        server_digest = bytes(int(code) for code in answer).decode("ascii")
    except (TypeError, ValueError) as error:
        raise UserError(f"{url}: its digest of the weights is {answer!r}; is it a server of this package?") from error
    if server_digest != digest:
        raise PromiseBroken(f"{url}: has weights of digest {server_digest} after an update to {digest}")


class SGLangSampler:
    """Samples with SGLang servers, and sends them the weights of `policy` whenever they have changed.

    Each server gets a range of consecutive requests, so that the samples of a prompt share its cache.
    """

    def __init__(self, config: RunConfig, policy: PreTrainedModel, stop_ids: frozenset[int], folder: Path) -> None:
        """Prepare a sampler whose servers are not started yet. `folder` is for logs, notes and weights."""
        settings = config.rollout.engine
        assert isinstance(settings, SGLangServers)
        self.settings, self.policy, self.stop_ids, self.folder = settings, policy, stop_ids, folder
        self._routed = routed_layers(policy) if config.asks_for_routes and routers(policy) else None
        self._needs = Needs(settings, config.layout, config.numerics, routes=self._routed is not None)
        self.model_folder, self._is_deterministic = folder / "model", settings.numerics == "deterministic"
        self.servers: list[Server] = []
        self._folder_digest = ""  # digest of the weights in the model folder
        self._server_digests: dict[str, str] = {}  # digest of each server's weights, by URL

    @contextmanager
    def running(self, waiting: Waiting) -> Iterator[Self]:
        """Start the servers, which end with the block. `waiting` is called while a server starts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # a short prefix, because the path of a socket is limited to 107 characters
        with tempfile.TemporaryDirectory(prefix="ppo-sglang-", ignore_cleanup_errors=True) as temporary:
            try:
                self._open(waiting, Path(temporary))
                yield self
            finally:
                for server in self.servers:
                    end(server)
                shutil.rmtree(self.model_folder, ignore_errors=True)

    def _open(self, waiting: Waiting, temporary: Path) -> None:
        """Start servers with the policy's weights, or use the servers given by URL; check and record their settings.

        Raises UserError if a server does not start or does not have the settings that the run needs.
        """
        interpreter = None
        if self.settings.urls:
            self.servers = [Server(url.rstrip("/")) for url in self.settings.urls]
        else:
            interpreter = look_into(self.settings)
            digest = weights_digest(self.policy.named_parameters())
            self._write(digest)
            for index in range(self.settings.servers):
                self.servers.append(self._start(index, digest, temporary))
        notes = []
        for server in self.servers:
            if server.process is not None:
                wait_until_ready(server, self.settings.timeout_s, waiting)
            has = check_server(server.url, self._needs)
            notes.append({"url": server.url, "server": has, "interpreter": interpreter and asdict(interpreter)})
        text = json.dumps(notes, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        atomic_write(self.folder / NOTES, text.encode())

    def _start(self, index: int, digest: str, temporary: Path) -> Server:
        port = free_port()
        arguments = server_arguments(self._needs, self.model_folder, port, digest)
        environment = {**server_environment(os.environ, self._needs.layout.threads), "TMPDIR": str(temporary)}
        command = [self.settings.python or sys.executable, "-m", "sglang.launch_server", *arguments]
        return start(command, environment, self.folder / f"server-{index}.log", port)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        digest = weights_digest(self.policy.named_parameters())
        wanted = UncutSampling(
            temperature=sampling.temperature,
            max_response_tokens=sampling.max_response_tokens,
            end_ids=tuple(sorted(self.stop_ids)),
            vocab_size=self.policy.config.vocab_size,
        )
        routed = self._routed if sampling.routes else None
        edges = [index * len(requests) // len(self.servers) for index in range(len(self.servers) + 1)]
        batches = [Batch(requests[start:end], sampling, wanted, routed) for start, end in pairwise(edges)]
        work = [(server, batch) for server, batch in zip(self.servers, batches, strict=True) if batch.requests]
        bodies = [generate_body(batch, self._needs.numerics.max_context) for _, batch in work]
        answers = self._ask([server for server, _ in work], bodies, digest)
        return [
            completion
            for (server, batch), answer in zip(work, answers, strict=True)
            for completion in read_completions(answer, batch, digest, server.url)
        ]

    def _ask(self, servers: Sequence[Server], bodies: Sequence[Mapping[str, Any]], digest: str) -> list[Any]:
        """Return the answer of each server to its request. All servers work at the same time."""
        calls: list[Call] = []
        answers: list[Any] = []
        try:
            for asked, body in zip(servers, bodies, strict=True):
                self._send_weights(asked, digest)
                calls.append(Call(asked.url, "/generate", self.settings.timeout_s, body))
            for call in calls:
                answers.append(call.json())
        except UserError as error:
            lost = servers[len(answers) if len(calls) == len(servers) else len(calls)]
            raise UserError(death(lost) or str(error)) from error
        finally:
            for call in calls:
                call.close()
        return answers

    def _write(self, digest: str) -> None:
        """Write the model folder for the servers, unless the folder already has the weights with this digest."""
        if self._folder_digest != digest:
            with whole_folder(self.model_folder) as temporary:  # names as published, with a tensor for each expert
                write_sampled(self.policy, self.stop_ids, temporary, original_format=not self._is_deterministic)
            self._folder_digest = digest

    def _send_weights(self, server: Server, digest: str) -> None:
        if self._server_digests.get(server.url) == digest:
            return
        self._server_digests[server.url] = ""
        self._write(digest)
        # a server on another machine must see the folder at the same path
        body = {"model_path": str(self.model_folder), "weight_version": digest, "flush_cache": True}
        ask(server.url, "/update_weights_from_disk", self.settings.timeout_s, body)
        confirm(server.url, digest, self._is_deterministic, self.settings.timeout_s)
        self._server_digests[server.url] = digest
