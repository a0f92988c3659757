"""Processes of a run find each other, whoever else connects to their port."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppo_repro.base import peers
from tests.support.waiting import until


class Kept:
    """A key-value store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        until(lambda: key in self.values, "the value")
        return self.values[key].encode()


def test_a_stranger_that_sends_a_byte_now_and_then_is_left_out_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HELLO", 0.2)
    store, threads = Kept(), threading.active_count()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(peers.connect, 0, 2, store, "")
        port, token = json.loads(store.get("peers"))
        with socket.create_connection(("127.0.0.1", port)) as stranger, pytest.raises(ConnectionError):
            for _ in range(200):  # 4 seconds
                stranger.send(b"1")
                time.sleep(0.02)
        with socket.create_connection(("127.0.0.1", port)) as second:
            second.sendall(json.dumps([token, 1, "there"]).encode() + b"\n")
            found = first.result(10)
            assert found.hosts == [socket.gethostname(), "there"]
            second.sendall(b'[1, "done"]\n')
    until(lambda: threading.active_count() == threads, "the end of who listens")
    found.connections[1].close()
