"""One run under every layout, variant of the kernels, number of processes and interruption has one fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.benchmarks.invariance import outcomes

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]


def test_every_condition_gives_one_fingerprint(tmp_path: Path) -> None:
    found = list(outcomes("deterministic", tmp_path))
    assert {outcome.condition for outcome in found if outcome.fingerprint != found[0].fingerprint} == set()
    # the first run is what the others are compared with
    assert len(found) >= 15
    assert sum(outcome.tokens for outcome in found[1:]) > 1_000_000


@pytest.mark.usefixtures("row_noise")
def test_native_gives_many(tmp_path: Path) -> None:
    # the layouts of this process alone; those started anew have stock layers
    assert len({outcome.fingerprint for outcome in outcomes("native", tmp_path)}) > 5
