"""Assertions that guard a training stack in pytest: on dumps of log-probs and recorded runs; and `check_loss`.

`LossBatch` and `check_loss` need torch, which is loaded when one of them is first used.
"""

from typing import TYPE_CHECKING, Any

from ppo_repro.testing.dumps import Names
from ppo_repro.testing.guard import assert_matches_golden, assert_mismatch_below

if TYPE_CHECKING:
    from ppo_repro.testing.losses import LossBatch, check_loss

__all__ = ["LossBatch", "Names", "assert_matches_golden", "assert_mismatch_below", "check_loss"]


def __getattr__(name: str) -> Any:
    if name not in ("LossBatch", "check_loss"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ppo_repro.testing import losses

    return getattr(losses, name)
