"""The servers of one run: start or find them, check and record their settings, replace and end them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppo_repro.config.engine import SGLangServers
from ppo_repro.config.run import NumericsConfig, RunConfig
from ppo_repro.errors import UserError
from ppo_repro.files import atomic_write
from ppo_repro.rollout.sglang import server
from ppo_repro.rollout.sglang.client import ServerGone, get
from ppo_repro.rollout.sglang.command import (
    RETURN_ROUTES,
    SPARE_CONTEXT,
    Interpreter,
    look_into,
    server_arguments,
    server_environment,
)
from ppo_repro.rollout.sglang.server import Process, Waiting
from ppo_repro.sglang_plugin.names import ARCHITECTURE, ATTENTION_BACKEND

# recorded of a server: everything that can change a number or explain a speed
RECORDED = (
    *("version", "launch_command", "attention_backend", "sampling_backend", "dtype", "kv_cache_dtype", "quantization"),
    *("enable_deterministic_inference", "rl_on_policy_target", "device", "tp_size", "context_length", "page_size"),
    *("max_total_num_tokens", "max_running_requests", "chunked_prefill_size", "disable_radix_cache"),
    *("disable_overlap_schedule", "speculative_algorithm", "json_model_override_args"),
)


def check_server(
    url: str, engine: SGLangServers, numerics: NumericsConfig, timeout: float, routes: bool = False
) -> dict[str, Any]:
    """The server's settings to record; UserError where it would not sample as the run needs it."""
    info = get(url, "/server_info", timeout)
    model = get(url, "/model_info", timeout)
    if "version" not in info or "is_generation" not in model:
        raise UserError(f"{url}: does not answer like an SGLang server")
    if info.get("enable_deterministic_inference") is not True:
        raise UserError(
            f"{url}: runs without --enable-deterministic-inference, so SGLang ignores every seed; start it with that"
        )
    if routes and info.get("enable_return_routed_experts") is not True:
        raise UserError(
            f"{url}: runs without {RETURN_ROUTES}, and records.level = deep and ppo.replay_routes need the routes of a "
            "mixture of experts; start it with that"
        )
    required: dict[str, Any] = {"sampling_backend": "pytorch", "speculative_algorithm": None}
    if engine.numerics == "deterministic":
        required |= {"attention_backend": ATTENTION_BACKEND, "dtype": "float32"}
        if model.get("architectures") != [ARCHITECTURE]:
            raise UserError(
                f"{url}: serves {model.get('architectures')}; rollout.engine.numerics = deterministic needs the plugin"
            )
    for name, value in required.items():
        if info.get(name) != value:
            raise UserError(f"{url}: has {name} = {info.get(name)!r}; must be {value!r}")
    context, max_context = info.get("context_length"), numerics.max_context
    if isinstance(context, int) and context < max_context + SPARE_CONTEXT:
        raise UserError(
            f"{url}: has --context-length {context}; must be at least numerics.max_context + {SPARE_CONTEXT} "
            f"= {max_context + SPARE_CONTEXT}, because SGLang reserves some of it"
        )
    return {name: info.get(name) for name in RECORDED} | {"architectures": model.get("architectures")}


NOTES = "servers.json"
_DYING_SECONDS = 5.0  # how long a process may take to end after its connection broke


@dataclass(frozen=True)
class Server:
    """One server."""

    url: str
    process: Process | None  # None for a server given by URL
    started_with: str  # digest of the weights it loaded at its start; empty for a server given by URL


class Fleet:
    """The servers of a run, in the order in which they get requests. `routes`: they are to return routes."""

    def __init__(
        self, config: RunConfig, engine: SGLangServers, folder: Path, waiting: Waiting, routes: bool = False
    ) -> None:
        self.config, self.engine, self.folder, self.waiting, self.routes = config, engine, folder, waiting, routes
        self.servers: list[Server] = []
        self._interpreter: Interpreter | None = None

    @property
    def model_folder(self) -> Path:
        """The folder with the weights for servers."""
        return self.folder / "model"

    def open(self, digest: str) -> None:
        """Start the servers on the model folder, whose weights have this digest, or check those given by URL.

        UserError where one does not start or does not have the settings that the run needs; call `end` then too.
        """
        if self.engine.urls:
            self.servers = [Server(url.rstrip("/"), None, "") for url in self.engine.urls]
        else:
            self._interpreter = look_into(self.engine)
            for index in range(self.engine.servers):
                self.servers.append(self._start(index, digest))
        for each in self.servers:
            self._wait_and_check(each)

    def _start(self, index: int, digest: str) -> Server:
        reserved = server.reserve_port()
        port = reserved.getsockname()[1]
        arguments = server_arguments(self.config, self.engine, self.model_folder, port, digest, self.routes)
        environment = server_environment(os.environ, self.config.layout.threads)
        command = [self.engine.python or sys.executable, "-m", "sglang.launch_server", *arguments]
        process = server.start(command, environment, self.folder / f"server-{index}.log", reserved)
        return Server(f"http://127.0.0.1:{port}", process, digest)

    def _wait_and_check(self, started: Server) -> None:
        """Wait until a server is ready if the run started it, check its settings, and record them."""
        timeout = self.engine.timeout_s
        if started.process is not None:
            server.wait_until_ready(started.url, started.process, timeout, self.waiting)
            version = get(started.url, "/model_info", timeout).get("weight_version")
            if version != started.started_with:  # another server answers
                raise UserError(f"{started.url}: another program took this port; start the run again")
        path = self.folder / NOTES
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        entry = {
            "url": started.url,
            "started_with": started.started_with,
            "server": check_server(started.url, self.engine, self.config.numerics, timeout, self.routes),
            "interpreter": None if self._interpreter is None else asdict(self._interpreter),
        }
        text = json.dumps([*before, entry], indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        atomic_write(path, text.encode())

    def explain(self, index: int, error: ServerGone) -> UserError:
        """The error to report for a server that is gone."""
        process = self.servers[index].process
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.guard.wait(_DYING_SECONDS)
                return UserError(server.death(process))
        return error

    def replace(self, index: int, digest: str) -> None:
        """Start another server instead of one that is gone, on the current model folder."""
        process = self.servers[index].process
        assert process is not None
        server.end(process)
        self.servers[index] = self._start(index, digest)
        self._wait_and_check(self.servers[index])

    def end(self) -> None:
        """End every server that the run has started. A second Ctrl-C meanwhile kills them all at once."""
        processes = [each.process for each in self.servers if each.process is not None]
        try:
            for process in processes:
                server.end(process)
        except BaseException:
            for process in processes:
                server.kill_now(process)
            raise
