"""Cycles of objects that nobody holds any more, as safetensors and json leave behind with every checkpoint.

The collector goes through all objects only when there is a quarter more of them, or 70,000. That is thousands of
iterations away, and memory would grow until then.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_collections() -> Iterator[None]:
    """Keep what exists already out of the collector's sight while the body runs, so that `gc.collect` takes no time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
