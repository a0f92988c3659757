"""Check that sampler and trainer of this stack agree as well as when the limits were set."""

from pathlib import Path

from ppo_repro.testing import assert_mismatch_below

DUMP = Path(__file__).with_name("tokens.jsonl")  # written by the training run that this test follows


def test_log_probs_differ_by_rounding_only() -> None:
    # ten times the values of a good run: mean 8.3e-7, largest 2.9e-6 nats
    assert_mismatch_below(DUMP, abs_mean=1e-5, abs_max=3e-5)


def test_the_policies_are_one() -> None:
    assert_mismatch_below(DUMP, k3=1e-10)
