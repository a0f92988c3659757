"""The servers of one run: started or found, checked, noted in the run's folder, replaced when they die, ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppo_repro.config.engine import SGLangServers
from ppo_repro.config.run import RunConfig
from ppo_repro.disk.durable import atomic_write
from ppo_repro.errors import UserError
from ppo_repro.rollout.sglang import server
from ppo_repro.rollout.sglang.checks import check_server
from ppo_repro.rollout.sglang.client import ServerGone, get
from ppo_repro.rollout.sglang.command import Interpreter, look_into, server_arguments, server_environment
from ppo_repro.rollout.sglang.server import Process, Waiting

NOTES = "servers.json"
_DYING_SECONDS = 5.0  # between a connection that breaks and the end of the process


@dataclass(frozen=True)
class Server:
    """One server. `started_with`: digest of the weights it loaded when it started; empty for one that ran already."""

    url: str
    process: Process | None
    started_with: str


class Fleet:
    """The servers of a run, in the order in which requests are shared out."""

    def __init__(self, config: RunConfig, engine: SGLangServers, folder: Path, waiting: Waiting) -> None:
        self.config, self.engine, self.folder, self.waiting = config, engine, folder, waiting
        self.servers: list[Server] = []
        self._interpreter: Interpreter | None = None

    @property
    def model_folder(self) -> Path:
        """Where the weights for servers lie."""
        return self.folder / "model"

    def open(self, digest: str) -> None:
        """Start the servers on the model folder, whose weights have this digest, or look at those that run already.

        UserError where one does not start, or is not what the run needs; call `end` then too.
        """
        if self.engine.urls:
            self.servers = [Server(url.rstrip("/"), None, "") for url in self.engine.urls]
        else:
            self._interpreter = look_into(self.engine)
            for index in range(self.engine.servers):
                self.servers.append(self._start(index, digest))
        for found in self.servers:
            self._make_sure(found)

    def _start(self, index: int, digest: str) -> Server:
        reserved = server.reserve_port()
        port = reserved.getsockname()[1]
        arguments = server_arguments(self.config, self.engine, self.model_folder, port, digest)
        environment = server_environment(os.environ, self.engine, self.config.layout.threads)
        command = [self.engine.python or sys.executable, "-m", "sglang.launch_server", *arguments]
        process = server.start(command, environment, self.folder / f"server-{index}.log", reserved)
        return Server(f"http://127.0.0.1:{port}", process, digest)

    def _make_sure(self, found: Server) -> None:
        """Wait for a server of ours, check any, note what it is."""
        timeout = self.engine.timeout_s
        if found.process is not None:
            server.wait_until_ready(found.url, found.process, timeout, self.waiting)
            version = get(found.url, "/model_info", timeout).get("weight_version")
            if version != found.started_with:  # it is not ours that answers
                raise UserError(f"{found.url}: another program took this port; start the run again")
        self._note(found, check_server(found.url, self.engine, self.config.numerics, timeout))

    def _note(self, found: Server, said: dict[str, Any]) -> None:
        path = self.folder / NOTES
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        interpreter = None if self._interpreter is None else asdict(self._interpreter)
        entry = {"url": found.url, "started_with": found.started_with, "server": said, "interpreter": interpreter}
        text = json.dumps([*before, entry], indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        atomic_write(path, text.encode())

    def explain(self, index: int, error: ServerGone) -> UserError:
        """What is known of a server that is gone."""
        process = self.servers[index].process
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.guard.wait(_DYING_SECONDS)
                return UserError(server.death(process))
        return error

    def replace(self, index: int, digest: str) -> None:
        """Start another server in the place of one that is gone, on the model folder as it is now."""
        process = self.servers[index].process
        assert process is not None
        server.end(process)
        self.servers[index] = self._start(index, digest)
        self._make_sure(self.servers[index])

    def end(self) -> None:
        """End every server the run has started."""
        end_all([found.process for found in self.servers if found.process is not None])


def end_all(processes: Sequence[Process]) -> None:
    """End servers; a second Ctrl-C while that happens does not leave one behind."""
    try:
        for process in processes:
            server.end(process)
    except BaseException:
        for process in processes:
            server.kill_now(process)
        raise
