"""Define an engine for `rollout.engine`: a vLLM server with the OpenAI completions protocol.

Imports nothing of vLLM.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

AT_ONCE = 64  # requests


class Engine:
    """Engine that starts a vLLM server.

    `python`: the interpreter of an environment with vLLM; `arguments`: server options.

    With `reload` the running server reads later weights; otherwise each version gets a new server. vLLM 0.32 on a CPU
    then keeps the old last matrix of a model with tied embeddings; see README.md.
    """

    def __init__(
        self, python: str, dtype: str = "bfloat16", reload: bool = False, arguments: Sequence[str] = ()
    ) -> None:
        self.python, self.dtype, self.reload, self.arguments = python, dtype, reload, arguments
        self.server: subprocess.Popen[bytes] | None = None

    def load(self, folder: str) -> None:
        """Give the server the weights of a folder; later versions are in the same folder."""
        if self.server is None or not self.reload:
            self.end()
            self.start(folder)
        else:
            self.ask("/collective_rpc", {"method": "reload_weights"})
            self.ask("/reset_prefix_cache", {})  # its keys and values are of the old weights

    def end(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait()

    def start(self, folder: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = f"-m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port {port} --uvicorn-log-level error"
        words += f" --served-model-name policy --dtype {self.dtype}"
        # raw_logprobs, vLLM's default, are those of temperature 1
        words += " --logprobs-mode processed_logprobs"
        self.server = subprocess.Popen(
            [self.python, *words.split(), "--model", folder, *self.arguments],
            stdout=sys.stderr,
            env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, "VLLM_SERVER_DEV_MODE": "1"},  # for /collective_rpc
            preexec_fn=end_with_parent,
        )
        while not self.is_ready():
            if self.server.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {self.server.returncode}")
            time.sleep(0.5)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def generate(
        self, prompts: list[list[int]], sampling: Any, seeds: list[int]
    ) -> list[tuple[list[int], list[float], str]]:
        """Return (ids, log-probs in nats, "stop" or "length") for each prompt; each request has its own seed."""

        def sampled(prompt: list[int], seed: int) -> tuple[list[int], list[float], str]:
            body = {
                "model": "policy",
                "prompt": prompt,
                "seed": seed,
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_response_tokens,
                "stop_token_ids": list(sampling.end_ids),
                "logprobs": 0,  # of the sampled token alone
                "return_token_ids": True,
            }
            choice = self.ask("/v1/completions", body)["choices"][0]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(sampled, prompts, seeds))

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """POST a JSON object and return the parsed answer."""
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, kind)) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: status {error.code}: {error.read().decode(errors='replace')[:300]}") from error


def end_with_parent() -> None:
    """Let the system kill the server when this process ends for any reason."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
