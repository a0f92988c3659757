"""The server of `ppo-repro view` in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppo_repro.analysis.view.server import Server


@contextmanager
def served(*targets: Path) -> Iterator[Server]:
    """The page over these folders, whose responses it has read."""
    server = Server(targets, 0)
    thread = threading.Thread(target=server.serve, daemon=True)
    server.index.look()
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(20)
