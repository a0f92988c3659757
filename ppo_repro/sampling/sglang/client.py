"""Send HTTP requests to an SGLang server and read the answers."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from ppo_repro.base.errors import UserError


class Call:
    """Request that has been sent. Only `json` waits for the answer, so several servers work at the same time."""

    def __init__(self, url: str, path: str, timeout: float, body: Any = None) -> None:
        """Send JSON data with POST, or GET if `body` is None. The answer begins within `timeout` seconds."""
        self.url, self.path, self.timeout = url, path, timeout
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
        data = None if body is None else json.dumps(body, allow_nan=False)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            self._connection.request("GET" if body is None else "POST", path, data, headers)
        except OSError as error:
            raise self._lost(error) from error

    def json(self) -> Any:
        """Wait for the answer and return its JSON data, None if the answer is empty.

        Raises UserError if no answer comes or the server refuses.
        """
        try:
            response = self._connection.getresponse()
            status, text = response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        finally:
            self.close()
        if status != 200:
            raise UserError(f"{self.url}{self.path}: refused with status {status}: {' '.join(text.split())[:300]}")
        try:
            return json.loads(text or "null")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.url}{self.path}: the answer is not JSON; is this an SGLang server?") from error

    def close(self) -> None:
        """Close the connection without waiting for the answer."""
        self._connection.close()

    def _lost(self, error: Exception) -> UserError:
        self.close()
        if isinstance(error, TimeoutError):
            return UserError(
                f"{self.url}{self.path}: no answer within rollout.engine.timeout_s = {self.timeout:g}; "
                "the server hangs, or needs more time"
            )
        return UserError(f"{self.url}{self.path}: no SGLang server answers there ({error!r})")


def ask(url: str, path: str, timeout: float, body: Any = None) -> dict[str, Any]:
    """Return the JSON object that a server answers to a `Call` with these arguments.

    Raises UserError for another answer.
    """
    answer = Call(url, path, timeout, body).json()
    if not isinstance(answer, dict):
        raise UserError(f"{url}{path}: the answer is not a JSON object; is this an SGLang server?")
    return answer
