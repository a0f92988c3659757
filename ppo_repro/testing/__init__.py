"""Assertions and a diagnosis of dumps of log-probs and recorded runs, and checks of losses and advantage estimators.

The first use of a name imports its file, and with it pandas or torch. So the command line, which lists the formats of
dumps, starts without them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_repro.testing.advantages import PaddedAdvantageBatch, check_advantages
    from ppo_repro.testing.diagnosis import Diagnosis, diagnose
    from ppo_repro.testing.dump_formats import Names
    from ppo_repro.testing.golden import assert_matches_golden
    from ppo_repro.testing.guard import assert_mismatch_below
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
_FILES = {
    "advantages": ("PaddedAdvantageBatch", "check_advantages"),
    "diagnosis": ("Diagnosis", "diagnose"),
    "dump_formats": ("Names",),
    "golden": ("assert_matches_golden",),
    "guard": ("assert_mismatch_below",),
    "losses": ("LossBatch", "check_loss"),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return import_module(f"{__name__}.{name}")
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
