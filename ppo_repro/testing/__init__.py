"""Assertions and a diagnosis of dumps of log-probs and recorded runs, and checks of losses and advantage estimators.

The checks need torch, which their first use imports.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppo_repro.testing.diagnosis import Diagnosis, diagnose
from ppo_repro.testing.dumps import Names
from ppo_repro.testing.golden import assert_matches_golden
from ppo_repro.testing.guard import assert_mismatch_below

if TYPE_CHECKING:
    from ppo_repro.testing.advantages import PaddedAdvantageBatch, check_advantages
    from ppo_repro.testing.losses import LossBatch, check_loss

__all__ = [
    "Diagnosis",
    "LossBatch",
    "Names",
    "PaddedAdvantageBatch",
    "assert_matches_golden",
    "assert_mismatch_below",
    "check_advantages",
    "check_loss",
    "diagnose",
]
_NEED_TORCH = {"advantages": ("PaddedAdvantageBatch", "check_advantages"), "losses": ("LossBatch", "check_loss")}


def __getattr__(name: str) -> Any:
    for home, names in _NEED_TORCH.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
