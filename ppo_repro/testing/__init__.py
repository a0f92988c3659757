"""Tests that guard a training stack: assertions on recorded runs and log-prob dumps, and a pytest plugin.

Installed with the package, so every pytest run has `golden_run` and `--update-golden`. PYTEST_DONT_REWRITE
"""

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

__all__ = [
    "GoldenCheck",
    "assert_matches_golden",
    "assert_mismatch_below",
    "assert_on_policy",
    "assert_same_run",
    "golden_run",
    "pytest_addoption",
    "pytest_terminal_summary",
]
