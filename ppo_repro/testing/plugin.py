"""Assertions on recorded runs and log-prob dumps, the fixture `golden_run` and its option. PYTEST_DONT_REWRITE"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ppo_repro.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from ppo_repro.testing.dumps import Names

GoldenCheck = Callable[[Path | str, Path | str], None]
_WRITTEN = pytest.StashKey[list[str]]()


def assert_on_policy(run: Path | str) -> None:
    """Assert that sampler and trainer of a run agree on every bit, and all ratios of first minibatches are exactly 1.

    AssertionError names the first token that differs; UserError where the run is incomplete or damaged.
    """
    __tracebackhide__ = True
    import numpy as np

    from ppo_repro.records import reader
    from ppo_repro.testing import mismatch

    pairs = mismatch.run_pairs(run)
    wrong = np.flatnonzero(mismatch.unequal_bits(pairs["sampler"], pairs["trainer"]) | ~np.isfinite(pairs["sampler"]))
    if wrong.size:
        raise AssertionError(
            f"{run}: {wrong.size} of {len(pairs)} tokens have other old_logprobs (trainer) than rollout_logprobs "
            f"(sampler); the first is {mismatch.token(pairs, int(wrong[0]))}; find the layer with `ppo-repro bisect "
            f"{run}`, or the cause with analysis.diagnosis.diagnose in a checkout"
        )
    columns = ["epoch", "minibatch", "sequence", "position", "ratios"]
    for iteration in range(len(reader.open_manifest(run).iterations)):
        rows = reader.read_updates(run, iterations=[iteration], columns=columns)
        # null after the policy's last step
        rows = rows[(rows["epoch"] == 0) & (rows["minibatch"] == 0) & rows["ratios"].notna()]
        wrong = np.flatnonzero(mismatch.unequal_bits(rows["ratios"], np.ones(len(rows))))
        if wrong.size:
            row = rows.iloc[wrong[0]]
            raise AssertionError(
                f"{run}: {wrong.size} of {len(rows)} ratios of the first minibatch of iteration {iteration} are not 1; "
                f"the first is at sequence {row['sequence']:.0f}, position {row['position']:.0f}: "
                f"{row['ratios']!r} (bits {mismatch.bits(row['ratios'])}), expected 1.0 (bits {mismatch.bits(1.0)}); "
                "the update computes other log-probs than its anchor: compare batch layout and numerics of both"
            )


def assert_same_run(a: Path | str, b: Path | str) -> None:
    """Assert that two complete runs have the same bits in every table and the same final results.

    AssertionError names table, iteration, row, both values and their bits; UserError where a run is incomplete.
    """
    __tracebackhide__ = True
    from ppo_repro.records import reader
    from ppo_repro.records.diff import first_difference

    for run in (a, b):
        reader.open_manifest(run)
    difference = first_difference(a, b)
    if difference is not None:
        raise AssertionError(
            f"{a} (left) and {b} (right) differ: {difference.describe()}; "
            "compare their config.yaml and environment.json"
        )


def assert_mismatch_below(
    run_or_file: Path | str | pd.DataFrame,
    *,
    mean_abs: float | None = None,
    max_abs: float | None = None,
    k3: float | None = None,
    frac_unequal: float | None = None,
    nonfinite: int = 0,
    names: Names | None = None,
) -> None:
    """Assert that the log-probs of sampler and trainer differ by no more than each limit.

    `run_or_file`: a run folder, a dump in any format that `ppo-repro audit` reads (told from its columns, or `names`),
    or a data frame with one row per token. With delta = trainer - sampler in nats: `mean_abs` and `max_abs` of |delta|,
    `k3` the token mean of expm1(delta) - delta, which estimates KL(sampler || trainer), `frac_unequal` the share of
    tokens that differ in any bit, `nonfinite` the number of tokens that may have no finite pair. AssertionError names
    every limit that is exceeded and a token, and numbers that cannot be log-probs; UserError without a limit or
    without tokens.
    """
    __tracebackhide__ = True
    from ppo_repro.testing import mismatch

    options = {"mean_abs": mean_abs, "max_abs": max_abs, "k3": k3, "frac_unequal": frac_unequal}
    limits = {name: limit for name, limit in options.items() if limit is not None}
    if not limits:
        raise UserError(f"assert_mismatch_below: no limit is given; give one or more of {', '.join(options)}")
    for name, limit in limits.items():
        if not limit >= 0:
            raise UserError(f"assert_mismatch_below: {name} = {limit!r}: must be 0 or more")
    where: Path | str = run_or_file if isinstance(run_or_file, Path | str) else "the frame"
    if isinstance(run_or_file, Path | str) and Path(run_or_file).is_dir():
        if names is not None:
            raise UserError(f"{where}: is a run folder, whose names are fixed; leave names out")
        pairs = mismatch.run_pairs(run_or_file)
    else:
        pairs = mismatch.dump_pairs(run_or_file, names)
    if not len(pairs):
        raise UserError(f"{where}: has no token that counts; there is nothing to compare")
    if why := mismatch.suspicious(pairs):
        raise AssertionError(f"{where}: {why}")
    limits["nonfinite"] = nonfinite
    exceeded = [
        f"{name} is {value:.6g}, above {limits[name]:.6g} (as at {mismatch.token(pairs, row)})"
        for name, (value, row) in mismatch.measures(pairs).items()
        if name in limits and not value <= limits[name]  # NaN exceeds every limit
    ]
    if exceeded:
        raise AssertionError(
            f"{where}: of {len(pairs)} tokens {'; '.join(exceeded)}; if this is new, see what changed (weights sync, "
            "dtype, temperature, padding, token ids): `ppo-repro audit`"
        )


def assert_matches_golden(run: Path | str, golden_path: Path | str) -> None:
    """Assert that a run has the digests of a golden one, in every table of every iteration and in its final results.

    AssertionError names the first table and iteration that differ, and what has changed in the environment; UserError
    where the run is incomplete or damaged, or there is no golden file.
    """
    __tracebackhide__ = True
    from ppo_repro.testing import golden

    expected, now = golden.load(Path(golden_path)), golden.golden_of(Path(run))
    difference = golden.first_difference(expected, now)
    if not difference:
        return
    changes = golden.other_environment(expected, now)
    environment = f"the environment differs: {', '.join(changes)}" if changes else "the environment is the same"
    raise AssertionError(
        f"{run} is not the golden run {golden_path}: {difference}; {environment}; see the cell with `ppo-repro diff` "
        "against a run of the old code, or accept the new results with `pytest --update-golden`"
    )


@pytest.fixture
def golden_run(request: pytest.FixtureRequest) -> GoldenCheck:
    """`golden_run(run, golden_path)`: `assert_matches_golden`, or with `--update-golden` write the file instead.

    AssertionError and UserError as `assert_matches_golden`.
    """

    def check(run: Path | str, golden_path: Path | str) -> None:
        __tracebackhide__ = True
        if not request.config.getoption("--update-golden"):
            assert_matches_golden(run, golden_path)
            return
        from ppo_repro.testing import golden

        golden.save(Path(golden_path), golden.golden_of(Path(run)))
        request.config.stash.setdefault(_WRITTEN, []).append(str(golden_path))

    return check


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--update-golden`."""
    group = parser.getgroup("ppo_repro")
    group.addoption("--update-golden", action="store_true", help="write golden runs instead of comparing with them")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the files that were written, so that no golden run changes unnoticed."""
    for path in config.stash.get(_WRITTEN, []):
        terminalreporter.write_line(f"golden run written, not compared: {path}")
