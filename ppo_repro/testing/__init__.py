"""Tests that guard a training stack: assertions on runs, log-prob dumps and losses, and a pytest plugin.

Installed with the package, so every pytest run has `golden_run` and `--update-golden`. The names about losses need
torch, which is loaded when one of them is first used. PYTEST_DONT_REWRITE
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppo_repro.testing.plugin import (
    GoldenCheck,
    assert_matches_golden,
    assert_mismatch_below,
    assert_on_policy,
    assert_same_run,
    golden_run,
    pytest_addoption,
    pytest_terminal_summary,
)

if TYPE_CHECKING:
    from ppo_repro.testing.advantages import AdvantageBatch, assert_advantages_conform, check_advantages
    from ppo_repro.testing.dumps import Names
    from ppo_repro.testing.losses import (
        Finding,
        LossBatch,
        LossLayout,
        LossResult,
        LossRollout,
        assert_loss_conforms,
        assert_loss_drift_below,
        check_loss,
        evaluate_loss,
        rollout_of,
    )
    from ppo_repro.testing.strategies import rollouts

_LOSSES = (
    *("Finding", "LossBatch", "LossLayout", "LossResult", "LossRollout", "assert_loss_conforms"),
    *("assert_loss_drift_below", "check_loss", "evaluate_loss", "rollout_of"),
)
_HOMES = {
    **dict.fromkeys(("AdvantageBatch", "assert_advantages_conform", "check_advantages"), "advantages"),
    **dict.fromkeys(_LOSSES, "losses"),
    "Names": "dumps",
    "rollouts": "strategies",
}
__all__ = [
    "AdvantageBatch",
    "Finding",
    "GoldenCheck",
    "LossBatch",
    "LossLayout",
    "LossResult",
    "LossRollout",
    "Names",
    "assert_advantages_conform",
    "assert_loss_conforms",
    "assert_loss_drift_below",
    "assert_matches_golden",
    "assert_mismatch_below",
    "assert_on_policy",
    "assert_same_run",
    "check_advantages",
    "check_loss",
    "evaluate_loss",
    "golden_run",
    "pytest_addoption",
    "pytest_terminal_summary",
    "rollout_of",
    "rollouts",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
