"""Notice the end of any process of a run, on any machine, and end the others.

Each process has a TCP connection to the first process, and sends over it why it ends. If a connection closes without
such a message, its process was killed. The kernel closes the connection to a machine that answers no keepalive. A
process that computes, scores or waits for hours still answers. A process also ends when its torchrun ends.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from typing import Protocol

from ppo_repro.base import interrupts
from ppo_repro.base.errors import RankLost, UserError
from ppo_repro.base.output import say_anyway, say_here

JOINING = 120.0  # seconds in which all processes must have started
SILENCE = 15  # seconds without an answer after which a machine is lost
HELLO = 10.0  # seconds in which a process that has connected says its name
GRACE = 10.0  # seconds that the main thread has to write what it must and to end
KILLED = "was killed, or its machine is gone"
NO_LAUNCHER = "its torchrun was killed"
LOOK = 1.0  # seconds between two looks at the parent process
_DONE = "done"
if sys.platform == "darwin":
    IDLE = socket.TCP_KEEPALIVE
else:
    IDLE = socket.TCP_KEEPIDLE


class Store(Protocol):
    """The part of torch's key-value store that the processes of a run need to find each other."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class Peers:
    """The connections of this process to other processes of a run."""

    def __init__(self, rank: int, hosts: list[str], connections: dict[int, socket.socket]) -> None:
        """Listen to the connections: the first process has one to each other process, which has one to the first."""
        self.rank, self.hosts, self.connections = rank, hosts, connections
        self._first_word = threading.Lock()  # of one rank: what comes later follows from it
        for other in connections:
            threading.Thread(target=self._listen, args=(other,), daemon=True).start()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=self._end_with_launcher, args=(os.getppid(),), daemon=True).start()

    def name(self, rank: int) -> str:
        """Return a rank with its host as text."""
        return f"rank {rank} on {self.hosts[rank]}"

    def tell(self, text: str) -> None:
        """Tell the other processes why this one ends."""
        self._pass_on(self.rank, text)

    def leave(self) -> None:
        """Tell the other processes that this one has done its part."""
        self._pass_on(self.rank, _DONE)

    def _pass_on(self, rank: int, text: str) -> bool:
        """Send on how a rank ended, if that is the first word of an end; return whether it is."""
        if not self._first_word.acquire(blocking=False):
            return False
        for other, connection in self.connections.items():
            if other != rank:
                _send(connection, [rank, text])
        return True

    def _listen(self, other: int) -> None:
        line = _receive(self.connections[other])
        rank, text = line if isinstance(line, list) else (other, KILLED)
        if text != _DONE:
            self._stop(rank, text)

    def _end_with_launcher(self, launcher: int) -> None:
        while os.getppid() == launcher:
            time.sleep(LOOK)
        self._stop(self.rank, NO_LAUNCHER)

    def _stop(self, rank: int, text: str) -> None:
        """End this process because a rank ended, unless an end has been heard of before."""
        if not self._pass_on(rank, text):
            return
        error = RankLost(f"{self.name(rank)}: {text}")
        interrupts.stop_main(error)
        time.sleep(GRACE)
        say_here(f"stopped: {error}")  # a call of the main thread does not return
        os._exit(RankLost.EXIT_CODE)


def connect(rank: int, size: int, store: Store, first_host: str) -> Peers:
    """Connect the processes of a run.

    Args:
        rank: of this process.
        size: number of processes.
        store: has the port and the token by which processes know each other; raises RuntimeError after JOINING seconds.
        first_host: address of the first process.

    Raises:
        UserError: some processes did not start.
    """
    return _accept(size, store) if rank == 0 else _call(rank, store, first_host)


def _accept(size: int, store: Store) -> Peers:
    token, dual = secrets.token_hex(16), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    hosts, connections = {0: socket.gethostname()}, dict[int, socket.socket]()
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as server:
        store.set("peers", json.dumps([server.getsockname()[1], token]))
        end = time.monotonic() + JOINING
        while len(hosts) < size:
            server.settimeout(max(0.1, end - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(size) if rank not in hosts)
                raise UserError(f"rank {missing}: did not start within {JOINING:.0f} s; start every machine") from None
            match _receive(connection, HELLO):
                case [given, int(rank), str(host)] if given == token:
                    hosts[rank], connections[rank] = host, connection
                    _watch(connection)
                case _:
                    connection.close()  # no process of this run
    in_order = [hosts[rank] for rank in range(size)]
    for connection in connections.values():
        _send(connection, in_order)
    return Peers(0, in_order, connections)


def _call(rank: int, store: Store, first_host: str) -> Peers:
    try:
        port, token = json.loads(store.get("peers"))
    except RuntimeError:  # the store's; it waits for JOINING seconds
        raise _alone(rank, f"rank 0 did not start within {JOINING:.0f} s, or has ended; start every machine") from None
    try:
        connection = socket.create_connection((first_host, port), timeout=JOINING)
    except OSError as error:
        raise _alone(rank, f"cannot connect to rank 0 at {first_host}:{port} ({error.strerror or error})") from error
    _watch(connection)
    _send(connection, [token, rank, socket.gethostname()])
    hosts = _receive(connection)
    if not isinstance(hosts, list):
        raise UserError(f"rank {rank}: rank 0 at {first_host} ended before all processes had started; see its output")
    return Peers(rank, hosts, {0: connection})


def _alone(rank: int, text: str) -> UserError:
    """Print why a rank cannot join, because the first one, which prints for all, does not know it."""
    say_anyway(f"error: rank {rank}: {text}")
    return UserError(f"rank {rank}: {text}")


def _watch(connection: socket.socket) -> None:
    """Let the kernel close a connection whose other end does not answer for SILENCE seconds."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((IDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, (SILENCE - 5) // 2)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if sys.platform == "linux":  # the same for bytes that are not acknowledged
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE * 1000)


def _send(connection: socket.socket, value: object) -> None:
    try:
        connection.sendall(json.dumps(value).encode() + b"\n")
    except OSError:
        return  # the other end is gone, and whoever listens to it hears that


def _receive(connection: socket.socket, seconds: float | None = None) -> object:
    """Return the next value; None if the connection closes first, or if the value takes more than some seconds."""
    received, end = bytearray(), None if seconds is None else time.monotonic() + seconds
    try:
        while not received.endswith(b"\n"):
            if end is not None:  # of the whole value: whoever sends a byte now and then would keep the others waiting
                if (left := end - time.monotonic()) <= 0:
                    return None
                connection.settimeout(left)
            if not (part := connection.recv(1)):  # one: more would be of the next value
                return None
            received += part
        return json.loads(received)
    except (OSError, ValueError):
        return None
