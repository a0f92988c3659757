"""HTTP with an SGLang server: one request, one answer. A server that is gone and one that hangs are told apart."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from ppo_repro.errors import UserError


class ServerGone(UserError):
    """The server cannot be reached, or closed the connection before it answered."""


class ServerSilent(UserError):
    """The server accepted the request and did not answer in time."""


class Call:
    """A request that has been sent. `reply` waits for the answer, so that several servers can work at once."""

    def __init__(self, url: str, method: str, path: str, body: Any, timeout: float) -> None:
        self.url, self.path, self.timeout = url, path, timeout
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            self._connection.request(method, path, data, headers)
        except TimeoutError as error:
            self.close()
            raise self._silent() from error
        except OSError as error:
            self.close()
            raise ServerGone(f"{url}: no SGLang server answers there ({error})") from error

    def reply(self) -> tuple[int, str]:
        """Wait for the answer: its status and its text."""
        try:
            response = self._connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        except TimeoutError as error:
            raise self._silent() from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(f"{self.url}: the server closed the connection during {self.path} ({error!r})") from error
        finally:
            self.close()

    def json(self) -> Any:
        """Wait for the answer and parse it; UserError where the server refuses or the answer is not JSON."""
        status, text = self.reply()
        if status != 200:
            raise UserError(f"{self.url}{self.path}: refused with status {status}: {' '.join(text.split())[:300]}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.url}{self.path}: the answer is not JSON; is this an SGLang server?") from error

    def close(self) -> None:
        """Close the connection without waiting for the answer."""
        self._connection.close()

    def _silent(self) -> ServerSilent:
        return ServerSilent(
            f"{self.url}{self.path}: no answer within rollout.engine.timeout_s = {self.timeout:g}; "
            "the server hangs, or needs more time"
        )


def get(url: str, path: str, timeout: float) -> dict[str, Any]:
    """The JSON object at a path; UserError where the answer is something else."""
    return _object(url, path, Call(url, "GET", path, None, timeout).json())


def post(url: str, path: str, body: Any, timeout: float) -> dict[str, Any]:
    """The JSON object in the answer to a POST; UserError where the server refuses."""
    return _object(url, path, Call(url, "POST", path, body, timeout).json())


def _object(url: str, path: str, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise UserError(f"{url}{path}: the answer is not a JSON object; is this an SGLang server?")
    return answer
