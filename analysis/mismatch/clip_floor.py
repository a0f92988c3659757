"""How much of the clipped share is mismatch? The floor counts ratios outside the band before any step was taken.

With the anchor "rollout" the ratio before the first step is rho = exp(old - rollout), not 1. With the anchor "old"
it is 1 whatever the mismatch is, so the floor is 0 and the clipped share says nothing about mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.pairs.runs import KEY
from ppo_repro.config.objectives import AdaptiveClipObjective, ClipObjective
from ppo_repro.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config

Floats = npt.NDArray[np.float64]


def clip_floor_band(delta: Floats, low: float, high: float) -> float:
    """Share of tokens with rho = exp(delta) < 1 - low or > 1 + high; NaN without tokens. delta: nats, float64."""
    rho = _rho(delta)
    return float(((rho < 1.0 - low) | (rho > 1.0 + high)).mean()) if len(delta) else math.nan


def clip_floor(delta: Floats, advantages: Floats, low: float, high: float, dual: float | None = None) -> float:
    """Share of tokens whose gradient the clip would remove at the ratio rho = exp(delta).

    That is A > 0 and rho > 1 + high, or A < 0 and rho < 1 - low, or, with a dual clip, A < 0 and rho > dual. It is
    about half of the share outside the band where advantages do not depend on delta. NaN without tokens. delta in nats,
    float64 [N] like the advantages; `dual` is the ratio above which a dual clip cuts.
    """
    rho = _rho(delta)
    removed = ((advantages > 0) & (rho > 1.0 + high)) | ((advantages < 0) & (rho < 1.0 - low))
    if dual is not None:
        removed |= (advantages < 0) & (rho > dual)
    return float(removed.mean()) if len(delta) else math.nan


def gaussian_floor_band(sigma: float, low: float, high: float) -> float:
    """P(|rho - 1| outside the band) for delta ~ N(-sigma^2 / 2, sigma^2): 1.3e-4, 4.5 %, 31 % at 0.05, 0.1, 0.2."""
    if not sigma > 0.0:
        return 0.0 if sigma == 0.0 else math.nan
    mean = -0.5 * sigma * sigma
    above = math.erfc((math.log1p(high) - mean) / (sigma * math.sqrt(2.0))) / 2.0
    below = math.erfc((mean - math.log1p(-low)) / (sigma * math.sqrt(2.0))) / 2.0 if low < 1.0 else 0.0
    return above + below


def gaussian_rule(sigma: float, length: float) -> dict[str, float]:
    """The metrics for delta ~ N(-sigma^2 / 2, sigma^2), independent by token, in sequences of `length` tokens.

    k1 = k2 = k3 = sigma^2 / 2 (k2 up to sigma^4 / 8), E|delta| = sqrt(2 / pi) sigma, chi2 = e^(sigma^2) - 1,
    ESS of responses = e^(-length sigma^2).
    """
    half = 0.5 * sigma * sigma
    return {
        "k1": half,
        "k2": half,
        "k3": half,
        "abs_mean": math.sqrt(2.0 / math.pi) * sigma,
        "chi2_token": math.expm1(sigma * sigma),
        "ess_seq": math.exp(-length * sigma * sigma),
    }


def gaussian_comparison(update: pd.DataFrame) -> pd.DataFrame:
    """metric, measured, gaussian: the update table of one iteration or run beside `gaussian_rule` at its delta_std."""
    if "iteration" in update and update["iteration"].nunique() > 1:
        raise UserError("update: holds several iterations; give the rows of one, or the table of the whole run")
    first = update.drop_duplicates("metric").set_index("metric")["value"]
    rule = gaussian_rule(float(first["delta_std"]), float(first["n_tokens"] / first["n_sequences"]))
    return pd.DataFrame(
        {"metric": list(rule), "measured": [float(first[name]) for name in rule], "gaussian": list(rule.values())}
    )


def clip_steps(run_dir: Path | str, iterations: Sequence[int] | None = None) -> pd.DataFrame:
    """One row per policy step: what the clip removed, and how much of it mismatch alone explains.

    iteration, epoch, minibatch, tokens, clip_low, clip_high (the band is [1 - clip_low, 1 + clip_high]), clip_fraction
    (recorded), clip_floor_band, clip_floor, clip_excess = clip_fraction - clip_floor (what the optimizer caused; 0 at
    the first step of an iteration), sigma = std of delta = old - rollout, gaussian_floor_band, var_share_mismatch =
    Var(delta) / Var(new - rollout). With the anchor "old" the floors are 0. Non-finite pairs make their step NaN.

    Holds the tokens and updates of one iteration. Raises UserError where the objective has no clip, and as the reader
    does.
    """
    config = load_recorded_config(run_dir)
    objective = config.ppo.objective
    if not isinstance(objective, ClipObjective | AdaptiveClipObjective):
        raise UserError(
            f"{run_dir}: ppo.objective.kind = {objective.kind}: must be clip or adaptive_clip, which clip by token"
        )
    recorded = reader.read_iterations(run_dir, iterations=iterations, columns=["iteration", "clip_range"])
    rows = []
    for iteration, adapted in zip(recorded["iteration"], recorded["clip_range"], strict=True):
        low, high, dual = float(adapted), float(adapted), None
        if isinstance(objective, ClipObjective):
            low, high, dual = objective.clip_range, objective.high, objective.dual_clip
        steps = _steps(run_dir, int(iteration), low, high, dual, config.ppo.ratio_anchor)
        rows += [{"iteration": int(iteration), **row} for row in steps]
    return pd.DataFrame(rows)


def _steps(
    run_dir: Path | str, iteration: int, low: float, high: float, dual: float | None, anchor: str
) -> Iterator[dict[str, float]]:
    iterations = [iteration]
    tokens = reader.read_tokens(
        run_dir, iterations=iterations, columns=[*KEY, "rollout_logprobs", "old_logprobs", "advantages"]
    )
    updates = reader.read_updates(
        run_dir, iterations=iterations, columns=[*KEY, "epoch", "minibatch", "new_logprobs", "clip_flag"]
    )
    steps = reader.read_steps(run_dir, iterations=iterations, columns=["epoch", "minibatch", "clip_fraction"])
    # null where the policy takes no step
    joined = updates[updates["clip_flag"].notna()].merge(tokens, on=KEY, how="left", validate="many_to_one")
    for epoch, minibatch, fraction in zip(steps["epoch"], steps["minibatch"], steps["clip_fraction"], strict=True):
        rows = joined[(joined["epoch"] == epoch) & (joined["minibatch"] == minibatch)]
        if not len(rows):
            continue
        rollout = rows["rollout_logprobs"].to_numpy().astype(np.float64)
        delta = rows["old_logprobs"].to_numpy().astype(np.float64) - rollout
        moved = rows["new_logprobs"].to_numpy().astype(np.float64) - rollout
        start = delta if anchor == "rollout" else np.zeros_like(delta)
        finite = bool(np.isfinite(delta).all() and np.isfinite(moved).all())
        sigma = float(delta.std()) if finite else math.nan
        variance = float(moved.var()) if finite else math.nan
        floor = clip_floor(start, rows["advantages"].to_numpy(), low, high, dual) if finite else math.nan
        yield {
            "epoch": int(epoch),
            "minibatch": int(minibatch),
            "tokens": len(rows),
            "clip_low": low,
            "clip_high": high,
            "clip_fraction": float(fraction),
            "clip_floor_band": clip_floor_band(start, low, high) if finite else math.nan,
            "clip_floor": floor,
            "clip_excess": float(fraction) - floor,
            "sigma": sigma,
            "gaussian_floor_band": gaussian_floor_band(sigma, low, high) if anchor == "rollout" else 0.0,
            "var_share_mismatch": sigma * sigma / variance if variance > 0.0 else math.nan,
        }


def _rho(delta: Floats) -> Floats:
    # a ratio beyond float64 is infinite, and outside any band
    with np.errstate(over="ignore"):
        return np.exp(delta)
