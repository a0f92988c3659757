"""A small HTTP server that speaks SGLang's dialect, and misbehaves on request: sockets and processes are real.

In a process of its own it is started like SGLang, by the stand-in for an interpreter that `fake_python` writes. What
it samples is a pure function of seed and position, and no model's.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

Fault = Callable[["FakeServer", str, Any], Any]  # given the path and the usual answer, what is answered; None: nothing


def token_of(seed: int, position: int, vocab_size: int) -> int:
    """What is sampled."""
    return hashlib.sha256(f"{seed} {position}".encode()).digest()[0] % vocab_size


class FakeServer(ThreadingHTTPServer):
    """State of one server; `faults` by path replace answers, `asked` keeps every request."""

    daemon_threads = True

    def __init__(
        self, port: int = 0, version: str = "default", deterministic: bool = False, vocab_size: int = 89
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.version, self.deterministic, self.vocab_size = version, deterministic, vocab_size
        self.faults: dict[str, Fault] = {}
        self.asked: list[tuple[str, Any]] = []
        self.info: dict[str, Any] = {
            "version": "0.5.21",
            "enable_deterministic_inference": True,
            "sampling_backend": "pytorch",
            "speculative_algorithm": None,
            "attention_backend": "ppo_repro" if deterministic else "torch_native",
            "dtype": "float32",
        }
        self.architecture = "PpoReproForCausalLM" if deterministic else "Qwen3ForCausalLM"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/health":
            return 200, None
        if path == "/server_info":
            return 200, self.info
        if path == "/model_info":
            architectures = [self.architecture]
            return 200, {"is_generation": True, "weight_version": self.version, "architectures": architectures}
        if path == "/get_weights_by_name":
            return 200, list(self.version.encode())
        if path == "/generate":
            return 200, [self.sampled(*pair) for pair in zip(body["input_ids"], body["sampling_params"], strict=True)]
        if path == "/update_weights_from_disk":
            self.version = body.get("weight_version", self.version)
            return 200, {"success": True, "message": "Success"}
        return 404, {"detail": "Not Found"}

    def sampled(self, ids: list[int], settings: dict[str, Any]) -> dict[str, Any]:
        stops, longest = set(settings["stop_token_ids"]), settings["max_new_tokens"]
        tokens: list[int] = []
        while len(tokens) < longest and not (tokens and tokens[-1] in stops):
            tokens.append(token_of(settings["sampling_seed"], len(ids) + len(tokens), self.vocab_size))
        # as SGLang does: the length counts before the token
        reason = {"type": "length", "length": longest} if len(tokens) == longest else {"type": "stop"}
        return {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": reason,
                "prompt_tokens": len(ids),
                "weight_version": self.version,
                "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
                "e2e_latency": len(tokens) / 64,
                "output_token_logprobs": [[-1.5 - token / 1024, token, None] for token in tokens],
            },
        }


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.serve(None)

    def do_POST(self) -> None:
        self.serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def serve(self, body: Any) -> None:
        self.server.asked.append((self.path, body))
        status, answer = self.server.answer(self.path, body)
        if self.path in self.server.faults:
            answer = self.server.faults[self.path](self.server, self.path, answer)
            if answer is None:
                return
            if isinstance(answer, tuple):
                status, answer = answer
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(**changes: Any) -> Iterator[FakeServer]:
    """A server in a thread of this process."""
    server = FakeServer(**changes)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def fake_python(folder: Path, numerics_of: Path, *misbehave: str) -> Path:
    """An executable that answers what an interpreter with SGLang would, and starts this file for the server.

    misbehave: `no sglang`, `no plugin`, `dies`, `dies in generate`, `never ready`, `port taken`, `has a child`.
    """
    has = {
        "python": "3.11.7",
        "packages": {"sglang": None if "no sglang" in misbehave else "0.5.21"},
        "plugins": [] if "no plugin" in misbehave else ["ppo_repro.sampling.sglang.plugin.register:register"],
        "ppo_repro": [str(numerics_of)],
    }
    script = folder / "python"
    script.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{json.dumps(has)}'; exit; fi\n"
        f"FAKE='{','.join(misbehave)}' FAKE_FOLDER={folder} exec {sys.executable} -S {__file__} \"$@\"\n"
    )
    script.chmod(0o755)
    return script


def main(arguments: list[str]) -> None:
    """Serve like `-m sglang.launch_server ARGUMENTS`."""
    misbehave, folder = os.environ["FAKE"].split(","), Path(os.environ["FAKE_FOLDER"])
    value = dict(pairwise(arguments))
    print("starting", flush=True)
    if "has a child" in misbehave:
        child = subprocess.Popen(["sleep", "600"])
        (folder / "child").write_text(str(child.pid))
    if "dies" in misbehave:
        print("RuntimeError: not enough memory for the pool of keys and values", flush=True)
        sys.exit(7)
    deterministic = value["--attention-backend"] == "ppo_repro"
    server = FakeServer(int(value["--port"]), value["--weight-version"], deterministic, vocab_size=20)
    if deterministic:
        [server.architecture] = json.loads(value["--json-model-override-args"])["architectures"]
    if "port taken" in misbehave:
        print("[Errno 98] error while attempting to bind on address: address already in use", flush=True)
    if "never ready" in misbehave or "port taken" in misbehave:
        server.faults["/health"] = lambda *_: (503, "")

    def die(*_: object) -> None:
        print("Fatal error: killed in generate", flush=True)
        os._exit(9)

    if "dies in generate" in misbehave:
        server.faults["/generate"] = die
    if "hangs in generate" in misbehave:
        server.faults["/generate"] = lambda *_: time.sleep(600)
    (folder / "serving").write_text(str(os.getpid()))
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
