"""Tests that guard a training stack: assertions on runs and log-prob dumps, checks of losses, and a pytest plugin.

Installed with the package, so every pytest run has `golden_run` and `--update-golden`. The names about losses need
torch, which is loaded when one of them is first used. PYTEST_DONT_REWRITE
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppo_repro.testing.plugin import (
    assert_matches_golden,
    assert_mismatch_below,
    assert_on_policy,
    assert_same_run,
    golden_run,
    pytest_addoption,
    pytest_terminal_summary,
)

if TYPE_CHECKING:
    from ppo_repro.testing.advantages import AdvantageBatch, check_advantages
    from ppo_repro.testing.dumps import Names
    from ppo_repro.testing.losses import LossBatch, LossLayout, LossRollout, check_loss, rollout_of

__all__ = [
    "AdvantageBatch",
    "LossBatch",
    "LossLayout",
    "LossRollout",
    "Names",
    "assert_matches_golden",
    "assert_mismatch_below",
    "assert_on_policy",
    "assert_same_run",
    "check_advantages",
    "check_loss",
    "golden_run",
    "pytest_addoption",
    "pytest_terminal_summary",
    "rollout_of",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"Names": "dumps", "AdvantageBatch": "advantages", "check_advantages": "advantages"}.get(name, "losses")
    return getattr(import_module(f"{__name__}.{home}"), name)
