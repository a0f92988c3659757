"""Assert limits on the mismatch of sampler and trainer, in a recorded run or a dump. Only a `.pt` dump loads torch.

Pairs are the frames of `records.logprob_pairs`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.logprob_pairs import TOKEN_KEY, pairs_of_iteration
from ppo_repro.statistics.draws import NONE, Draws, draws_of
from ppo_repro.statistics.mismatch_metrics import metric_values, mismatch_sums, with_mismatch
from ppo_repro.testing.dump_formats import Names
from ppo_repro.testing.dumps import impossible
from ppo_repro.testing.pairs import Source, imported_pairs, is_run

SIDES = {"sampler": "logprobs_a", "trainer": "logprobs_b"}
COLUMNS = [*TOKEN_KEY, *SIDES.values()]


def _bits(value: float) -> str:
    return f"{int(np.float32(value).view(np.uint32)):08x}"


def _token(pairs: pd.DataFrame, index: int) -> str:
    """Describe the token of a row, with both log-probs and their float32 bits."""
    iteration, sequence, position, *values = pairs.iloc[index][COLUMNS].tolist()
    sides = zip(SIDES, values, strict=True)
    both = ", ".join(f"{name} {float(value)!r} (bits {_bits(value)})" for name, value in sides)
    return f"iteration {iteration:.0f}, sequence {sequence:.0f}, position {position:.0f}: {both}"


def pairs_of(source: Source, names: Names | str | None = None) -> pd.DataFrame:
    """Return all pairs of a run folder or a dump in one frame. Raises UserError for names of a run's columns."""
    if is_run(source, names):
        recorded = reader.open_manifest(source)
        chunks = [pairs_of_iteration(source, recorded, number) for number in recorded.own_iterations]
    else:
        chunks = list(imported_pairs(source, names))
    return pd.concat(chunks or [pd.DataFrame(columns=COLUMNS)], ignore_index=True)


def mismatch_of(pairs: pd.DataFrame) -> dict[str, tuple[float, int]]:
    """Return each number that has a limit, with the row of its worst token; a mean of no token is NaN."""
    tokens = with_mismatch(pairs)
    metrics, finite = metric_values(mismatch_sums(tokens)), tokens["finite"]
    unequal = ~tokens["bitwise_equal"] & finite
    worst = int(np.argmax(tokens["abs_delta"].where(finite, -1.0))) if finite.any() else -1
    return {
        "abs_mean": (metrics["abs_mean", "token_mean"], worst),
        "abs_max": (metrics["abs_max", "token"], worst),
        "k3": (metrics["k3", "token_mean"], worst),
        # not 1 - frac_bitwise_equal, whose rounding may be above a limit that the share itself keeps
        "frac_unequal": (float(unequal[finite].mean()), int(np.argmax(unequal))),
        "n_nonfinite": (metrics["n_nonfinite", "count"], int(np.argmin(finite))),
    }


def _suspicious(pairs: pd.DataFrame, frac_zero: float) -> str:
    """Return the reason why numbers cannot be the log-probs of two sides, "" if they can be."""
    for name, column in SIDES.items():
        if why := impossible(pairs[column].to_numpy()):
            return f"{name}: {why}"
    zero = (pairs["logprobs_a"] == 0) & (pairs["logprobs_b"] == 0)
    if zero.mean() > frac_zero:
        return (
            f"both log-probs of {zero.sum()} of {len(zero)} tokens are exactly 0: is padding in it? name the mask; if "
            "the policy is sure of most tokens, give frac_zero=1.0"
        )
    return ""


def draws_of_pairs(pairs: pd.DataFrame) -> Draws:
    """Measure whether the tokens were drawn from the trainer's whole distributions, with their end tokens.

    Tokens of a dump without end tokens may look wrongly drawn. Without the trainer's entropies no token counts.
    """
    if "entropies" not in pairs:
        return NONE
    owner = pairs.groupby(["iteration", "sequence"]).ngroup().to_numpy()
    known = pairs["cumulative_probs"].to_numpy() if "cumulative_probs" in pairs else None
    return draws_of(pairs["logprobs_b"].to_numpy(), pairs["entropies"].to_numpy(), owner, known)


def assert_mismatch_below(
    run_or_file: Source,
    *,
    abs_mean: float | None = None,
    abs_max: float | None = None,
    k3: float | None = None,
    frac_unequal: float | None = None,
    n_nonfinite: int = 0,
    frac_zero: float = 0.5,
    draws: bool = True,
    names: Names | str | None = None,
) -> None:
    """Assert that the log-probs of sampler and trainer differ by no more than each limit, and that draws follow them.

    Below, delta is the trainer's log-prob minus the sampler's, in nats.

    Args:
        run_or_file: a run folder, a dump in any format that `ppo-repro audit` reads, or a data frame with one row per
            token.
        abs_mean: limit of the mean of |delta|, in nats.
        abs_max: limit of the largest |delta|, in nats.
        k3: limit of the token mean of expm1(delta) - delta, which estimates KL(sampler || trainer).
        frac_unequal: limit of the share of tokens that differ in any bit.
        n_nonfinite: limit of the number of tokens with a log-prob that is not finite.
        frac_zero: limit of the share of tokens whose log-probs are exactly 0 on both sides, as of padding. A policy
            that is sure of most tokens needs a higher limit.
        draws: whether to judge that tokens were drawn from the trainer's distributions; this needs its `entropies`, and
            finds smaller cuts with `cumulative_probs`. A dump whose responses lack the end tokens needs `draws=False`.
        names: the names of the columns, or a format of `dump_formats.FORMATS` such as "verl"; None: the dump has the
            columns of a known stack.

    Raises:
        AssertionError: a limit is exceeded, or numbers cannot be log-probs; the message names each limit and a token.
        UserError: no limit is given, or there are no tokens.
    """
    __tracebackhide__ = True
    options = {"abs_mean": abs_mean, "abs_max": abs_max, "k3": k3, "frac_unequal": frac_unequal}
    limits = {name: limit for name, limit in options.items() if limit is not None}
    if not limits:
        raise UserError(f"assert_mismatch_below: no limit is given; give one or more of {', '.join(options)}")
    for name, limit in limits.items():
        if not limit >= 0:
            raise UserError(f"assert_mismatch_below: {name} = {limit!r}: must be 0 or more")
    if not 0 <= frac_zero <= 1:  # NaN would allow everything
        raise UserError(f"assert_mismatch_below: frac_zero = {frac_zero!r}: must be from 0 to 1")
    limits["n_nonfinite"] = n_nonfinite
    where = "the frame" if isinstance(run_or_file, pd.DataFrame) else run_or_file
    pairs = pairs_of(run_or_file, names)
    if not len(pairs):
        raise UserError(f"{where}: has no token that counts; there is nothing to compare")
    if why := _suspicious(pairs, frac_zero):
        raise AssertionError(f"{where}: {why}")
    exceeded = [
        f"{name} is {value:.6g}, above {limits[name]:.6g} (as at {_token(pairs, row)})"
        for name, (value, row) in mismatch_of(pairs).items()
        if name in limits and not value <= limits[name]  # NaN exceeds every limit
    ]
    if exceeded:
        raise AssertionError(
            f"{where}: of {len(pairs)} tokens {'; '.join(exceeded)}; if this is new, see what changed (weights sync, "
            "dtype, temperature, padding, token ids): `ppo-repro audit`"
        )
    drawn = draws_of_pairs(pairs) if draws else NONE
    if drawn.is_wrong:
        raise AssertionError(f"{where}: {drawn.sentence()}")
