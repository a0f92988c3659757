"""An assertion for pytest on dumps of log-probs and recorded runs, and a check of losses.

The check needs torch, which its first use imports.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppo_repro.testing.dumps import Names
from ppo_repro.testing.guard import assert_mismatch_below

if TYPE_CHECKING:
    from ppo_repro.testing.losses import LossBatch, check_loss

__all__ = ["LossBatch", "Names", "assert_mismatch_below", "check_loss"]


def __getattr__(name: str) -> Any:
    if name not in ("LossBatch", "check_loss"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.losses"), name)
