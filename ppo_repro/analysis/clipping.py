"""What did the clip do in a run, in each step and on which tokens? `ppo-repro analyse clipping RUN` prints it.

One iteration is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.buckets import DOUBLING, ENTROPIES, PROBABILITIES, bucket_of
from ppo_repro.analysis.clusters import Floats, effective_share
from ppo_repro.analysis.pairs import own_iterations
from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import Parser, tell
from ppo_repro.config.algorithm import ClipObjective, PredictedValue, clip_band
from ppo_repro.config.run import RunConfig
from ppo_repro.records import reader
from ppo_repro.records.folder import load_recorded_config
from ppo_repro.statistics.kl import k1, k3

Bool = npt.NDArray[np.bool_]

# objectives whose bounds the clip analyses do not count: they are not on the ratio of each token
NOT_BY_TOKEN = {
    "sequence_clip": "clips whole responses",
    "cispo": "bounds weights and clips nothing",
    "function": "has bounds of its own",
}

TOKEN = ["sequence", "position"]
STEP = ["epoch", "minibatch"]
TOKEN_COLUMNS = [
    *("iteration", "sequence", "position", "rollout_logprobs", "old_logprobs", "entropies"),
    *("values", "advantages", "returns"),
]

# five flags that never overlap and together are band_out
DISJOINT = ("clip_high", "clip_low", "wrong_high", "wrong_low", "out_without_advantage")
FLAGS = ("band_out", *DISJOINT, "dual_zero", "grad_zero")
VALUE_FLAGS = ("vf_band_out", "vf_grad_zero")
SUBSETS = ("all", "adv_pos", "adv_neg")
NAN = float("nan")
# the columns of clip_step with the estimates of KL
ESTIMATES = {"k1": "kl_k1", "k3": "kl_k3"}


@dataclass(frozen=True)
class ClipRule:
    """Clip range of one iteration. Ratios in [1 - low, 1 + high] are in the band."""

    anchor: str  # rollout or old: the denominator of the ratio
    low: float
    high: float
    dual: float | None  # where the advantage is negative, ratios above it have no gradient
    value_range: float | None  # of the value around its old prediction, reward units; None: not clipped


@dataclass(frozen=True)
class IterationRows:
    """Tables of one iteration: its tokens, its steps, and one row per step and token."""

    iteration: int
    rule: ClipRule
    tokens: pd.DataFrame  # TOKEN_COLUMNS
    steps: pd.DataFrame  # epoch, minibatch in order
    rows: pd.DataFrame  # rows of `updates` with the columns of their token, and float64 log_ratios


# one row for each token of each step


def clip_rule(config: RunConfig, iteration: pd.Series, band: tuple[float, float] | None = None) -> ClipRule:
    """Return the clip range of a row of the table `iterations`; `band` (low, high) replaces the run's range.

    Raises UserError if the objective does not clip token ratios and `band` is None, or for a wrong band.
    """
    objective, value = config.ppo.objective, config.value
    dual = objective.dual_clip if band is None and isinstance(objective, ClipObjective) else None
    found = band or clip_band(objective, float(iteration["clip_range"]))
    if found is None:
        what = NOT_BY_TOKEN.get(objective.kind, "clips nothing")
        raise UserError(
            f"ppo.objective.kind = {objective.kind} {what}, only clip and adaptive_clip clip by the token's ratio; "
            "give a clip range to see what it would have clipped"
        )
    low, high = found
    if not (0.0 < low < 1.0 and 0.0 < high < np.inf):
        raise UserError(f"clip range = {low:g}, {high:g}: the lower must be between 0 and 1, the upper above 0")
    value_range = None
    if isinstance(value, PredictedValue) and value.clip_range is not None:
        value_range = value.clip_range * (float(iteration["return_scale"]) if value.normalize_returns else 1.0)
    return ClipRule(config.ppo.ratio_anchor, low, high, dual, value_range)


def join_tokens(tokens: pd.DataFrame, updates: pd.DataFrame, anchor: str) -> pd.DataFrame:
    """Return the rows of `updates` with their token's columns and log_ratios = new_logprobs - anchor, float64 nats.

    The order of `updates` is kept. Raises UserError if a row has no token.
    """
    rows = updates.merge(tokens, on=TOKEN, how="inner", validate="many_to_one")
    if len(rows) != len(updates):
        raise UserError(f"{len(updates) - len(rows)} rows of updates have no row in tokens; the records are damaged")
    new = rows["new_logprobs"].to_numpy(np.float64)
    rows["anchor_logprobs"] = rows[f"{anchor}_logprobs"].to_numpy(np.float64)
    rows["log_ratios"] = new - rows["anchor_logprobs"].to_numpy()
    return rows


def load_iterations(
    run_dir: Path | str,
    *,
    iterations: Sequence[int] | None = None,
    band: tuple[float, float] | None = None,
) -> Iterator[IterationRows]:
    """Yield the iterations of a run; `band` (low, high) replaces the run's clip range.

    A fork begins with its first own iteration, because its configuration is not the origin's. Raises UserError for
    missing or damaged records, for an iteration of the origin, or if the run clips nothing and `band` is None.
    """
    recorded = reader.open_manifest(run_dir)
    overview = reader.read_iterations(
        run_dir, iterations=own_iterations(run_dir, recorded, iterations), recorded=recorded
    )
    config = load_recorded_config(run_dir)
    for _, row in overview.iterrows():
        index = int(row["iteration"])
        rule = clip_rule(config, row, band)
        one = [index]
        tokens = reader.read_tokens(run_dir, iterations=one, columns=TOKEN_COLUMNS, recorded=recorded)
        updates = reader.read_updates(run_dir, iterations=one, recorded=recorded).drop(columns="iteration")
        yield IterationRows(
            iteration=index,
            rule=rule,
            tokens=tokens,
            steps=reader.read_steps(run_dir, iterations=one, columns=STEP, recorded=recorded),
            rows=join_tokens(tokens, updates, rule.anchor),
        )


def policy_rows(item: IterationRows) -> pd.DataFrame:
    """Return the rows of the steps in which the policy was updated."""
    return item.rows[item.rows["clip_flag"].notna()]


def steps_of(rows: pd.DataFrame) -> dict[tuple[int, int], npt.NDArray[np.intp]]:
    """Return the indices of the rows of each step, by (epoch, minibatch)."""
    epochs, minibatches = (rows[name].to_numpy(np.int64) for name in STEP)
    present = np.unique(np.stack([epochs, minibatches]), axis=1).T.tolist()
    return {(e, m): np.flatnonzero((epochs == e) & (minibatches == m)) for e, m in present}


def column(rows: pd.DataFrame, name: str) -> Floats:
    """Return a column as a float64 array."""
    return rows[name].to_numpy(dtype=np.float64)


# definitions of "clipped", in float64 and with strict inequalities


def ratios_of(log_ratios: Floats) -> Floats:
    """Return the ratio r = exp(log_ratio), float64; infinite if the exponential overflows."""
    with np.errstate(over="ignore"):
        return np.exp(log_ratios)


def band_out(ratios: Floats, low: float, high: float) -> Bool:
    """Return which ratios [N] are below 1 - low or above 1 + high, bool [N], whatever the advantage."""
    return (ratios < 1.0 - low) | (ratios > 1.0 + high)


def flags_of_ratios(ratios: Floats, advantages: Floats, rule: ClipRule) -> dict[str, Bool]:
    """Return each flag of FLAGS, bool [N], from ratios and advantages [N]; a ratio of NaN has no flag.

    band_out: r < 1 - low or r > 1 + high. clip_high: A > 0 and r > 1 + high; clip_low: A < 0 and r < 1 - low;
    wrong_high: A < 0 and r > 1 + high; wrong_low: A > 0 and r < 1 - low; out_without_advantage: band_out and A = 0.
    dual_zero: A < 0 and r > c, only with a dual clip. grad_zero: clip_high, clip_low or dual_zero.
    """
    above, below = ratios > 1.0 + rule.high, ratios < 1.0 - rule.low
    up, down = advantages > 0, advantages < 0
    beyond = np.zeros(len(ratios), dtype=bool) if rule.dual is None else (ratios > rule.dual) & down
    return {
        "band_out": band_out(ratios, rule.low, rule.high),
        "clip_high": above & up,
        "clip_low": below & down,
        "wrong_high": above & down,
        "wrong_low": below & up,
        "out_without_advantage": (above | below) & (advantages == 0),
        "dual_zero": beyond,
        "grad_zero": above & up | below & down | beyond,
    }


def token_flags(rows: pd.DataFrame, rule: ClipRule) -> pd.DataFrame:
    """Return the columns FLAGS (bool) and `ratio` (float64) for rows of policy steps, with the index of `rows`."""
    ratios = ratios_of(column(rows, "log_ratios"))
    flags = flags_of_ratios(ratios, column(rows, "advantages"), rule)
    return pd.DataFrame({**flags, "ratio": ratios}, index=rows.index)


def clipped_at_start(rows: pd.DataFrame, rule: ClipRule) -> Bool:
    """Return grad_zero of each token before any step, at pi_old / anchor, bool [N]; false with the anchor `old`."""
    unmoved = ratios_of(column(rows, "old_logprobs") - column(rows, f"{rule.anchor}_logprobs"))
    return flags_of_ratios(unmoved, column(rows, "advantages"), rule)["grad_zero"]


def recorded_clipped(flags: pd.Series) -> Bool:
    """Return which flags of the column `clip_flag` say that the clip removed the gradient, bool [N]; null does not."""
    return flags.str.startswith("clip_").fillna(False).to_numpy(np.bool_)


def value_flags(rows: pd.DataFrame, rule: ClipRule) -> pd.DataFrame:
    """Return the columns vf_band_out and vf_grad_zero (bool) for rows of steps that the value model took.

    vf_band_out: |v - v_old| > range; vf_grad_zero: vf_band_out and (v_clip - R)^2 > (v - R)^2. All are false if values
    are not clipped.
    """
    new, old, returns = (column(rows, name) for name in ("new_values", "values", "returns"))
    reach = np.inf if rule.value_range is None else rule.value_range
    moved = new - old
    outside = np.abs(moved) > reach
    farther = (old + np.clip(moved, -reach, reach) - returns) ** 2 > (new - returns) ** 2
    return pd.DataFrame({"vf_band_out": outside, "vf_grad_zero": outside & farther}, index=rows.index)


# the tables of one iteration


def effective_samples(log_weights: Floats) -> float:
    """Return the effective sample size per sample for the weights exp(log_weights); NaN if one is not finite.

    The largest log-weight is first subtracted, which cancels in the quotient and prevents overflow.
    """
    if not len(log_weights) or not np.isfinite(log_weights).all():
        return NAN
    weights = np.exp(log_weights - log_weights.max())
    return effective_share(float(weights.sum()), float((weights**2).sum()), len(weights))


def kl_estimates(log_ratios: Floats) -> dict[str, float]:
    """Estimate KL(anchor || new) in nats by token means of k1 and k3; the anchor sampled the tokens, at least one."""
    with np.errstate(invalid="ignore"):  # infinities of both signs
        return {"kl_k1": float(k1(log_ratios).mean()), "kl_k3": float(k3(log_ratios).mean())}


def surrogate_mass(rows: pd.DataFrame) -> Floats:
    """Return w |r A| of each row of a policy step, float64, without the clip; NaN at the record level `lean`.

    w is the recorded weight of the token in the loss of its step, times its importance weight if the run has them.
    """
    weights = column(rows, "loss_weights") * rows["importance_weights"].astype(np.float64).fillna(1.0).to_numpy()
    return weights * np.abs(ratios_of(column(rows, "log_ratios")) * column(rows, "advantages"))


def _numbers(rows: pd.DataFrame, flags: pd.DataFrame, mass: Floats, rule: ClipRule) -> dict[str, float]:
    """Return the columns of one row of `clip_step` over these tokens; only n_tok if there are no tokens."""
    if not len(rows):
        return {"n_tok": 0}
    ratios, log_ratios = column(flags, "ratio"), column(rows, "log_ratios")
    shown = ratios if np.isfinite(ratios).all() else np.array([NAN])
    beyond = (ratios > 1.0 + 2.0 * rule.high) | (ratios < 1.0 - 2.0 * rule.low)
    total = float(mass.sum())
    return {
        "n_tok": len(rows),
        "n_nonfinite": int(np.count_nonzero(~np.isfinite(log_ratios))),
        **{name: float(flags[name].mean()) for name in FLAGS},
        **{"r_mean": shown.mean(), "r_min": shown.min(), "r_max": shown.max()},
        "beyond_twice": float(beyond.mean()),
        **kl_estimates(log_ratios),
        "ess_tok": effective_samples(log_ratios),
        "gm_clip": float(mass[flags["grad_zero"]].sum()) / total if total and np.isfinite(total) else NAN,
        "clip_floor": float(clipped_at_start(rows, rule).mean()),
    }


def clip_step(item: IterationRows) -> pd.DataFrame:
    """Return one row per step and subset of tokens: rates of flags, ratios, KL, effective sample size, gradient mass.

    The subsets are all tokens, tokens with A > 0 and tokens with A < 0. A rate is a share of the subset's tokens. It is
    NaN if the subset is empty or the policy took no step. Other columns are

        gm_clip: share of the sum of `surrogate_mass` that the clip removed
        beyond_twice: share of tokens beyond twice the clip range
        clip_floor: share of tokens in `clipped_at_start`
        kl_k1, kl_k3: `kl_estimates`
        vf_band_out, vf_grad_zero: `value_flags`
    """
    policy = policy_rows(item)
    flags, mass = token_flags(policy, item.rule), surrogate_mass(policy)
    moved = item.rows[item.rows["new_values"].notna()]
    values = value_flags(moved, item.rule)
    policy_steps, value_steps = steps_of(policy), steps_of(moved)
    table = []
    for inner, step in enumerate(zip(item.steps["epoch"], item.steps["minibatch"], strict=True)):
        of_policy, of_value = (steps.get(step, np.zeros(0, np.intp)) for steps in (policy_steps, value_steps))
        advantages = column(policy.iloc[of_policy], "advantages")
        advantages_of_value = column(moved.iloc[of_value], "advantages")
        for subset, sign in zip(SUBSETS, (0, 1, -1), strict=True):
            chosen = of_policy[(sign * advantages > 0) | (sign == 0)]
            stepped = of_value[(sign * advantages_of_value > 0) | (sign == 0)]
            key = {"iteration": item.iteration, "epoch": step[0], "minibatch": step[1], "step": inner, "subset": subset}
            numbers = _numbers(policy.iloc[chosen], flags.iloc[chosen], mass[chosen], item.rule)
            rates = {name: values[name].iloc[stepped].mean() for name in VALUE_FLAGS}
            table.append({**key, **numbers, "n_value_tok": len(stepped), **rates})
    return pd.DataFrame(table)


def clip_bucket(item: IterationRows) -> pd.DataFrame:
    """Return the rates of FLAGS by probability under the anchor, by entropy and by position, over all policy steps.

    Columns: iteration, kind (p_anchor, entropy, position), adv_sign (all, pos, neg), lo, hi (bins [lo, hi); the last
    bin includes hi), n, FLAGS. Bins without tokens have no row; a value of NaN has no bin.
    """
    rows = policy_rows(item)
    flags, advantages = token_flags(rows, item.rule)[list(FLAGS)], column(rows, "advantages")
    scopes = {"all": np.ones(len(rows), dtype=bool), "pos": advantages > 0, "neg": advantages < 0}
    kinds = {
        "p_anchor": (np.exp(column(rows, "anchor_logprobs")), PROBABILITIES),
        "entropy": (column(rows, "entropies"), ENTROPIES),
        "position": (column(rows, "position"), DOUBLING),
    }
    tables = []
    for kind, (values, edges) in kinds.items():
        codes, lows = bucket_of(values, edges), np.array(edges)
        for sign, scope in scopes.items():
            where = scope & (codes >= 0)
            groups = flags[where].groupby(codes[where])
            table = groups.mean()
            bins = table.index.to_numpy(np.int64)
            table = table.assign(iteration=item.iteration, kind=kind, adv_sign=sign, n=groups.size())
            tables.append(table.assign(lo=lows[bins], hi=lows[bins + 1]))
    names = ["iteration", "kind", "adv_sign", "lo", "hi", "n", *FLAGS]
    return pd.concat(tables, ignore_index=True)[names]


# the tables of a run, and the command


@dataclass(frozen=True)
class ClipTables:
    """Tables of `clip_step` and `clip_bucket` over all iterations."""

    clip_step: pd.DataFrame
    clip_bucket: pd.DataFrame


def clip_tables(
    run_dir: Path | str, *, iterations: Sequence[int] | None = None, band: tuple[float, float] | None = None
) -> ClipTables:
    """Return all tables of a run; `band` (low, high) replaces the run's own clip range.

    Raises UserError if records are missing, or if the run clips nothing and there is no band.
    """
    steps, buckets = [], []
    for item in load_iterations(run_dir, iterations=iterations, band=band):
        steps.append(clip_step(item))
        buckets.append(clip_bucket(item))
    return ClipTables(pd.concat(steps, ignore_index=True), pd.concat(buckets, ignore_index=True))


def early_stop(clip_step: pd.DataFrame, target_kl: float) -> pd.DataFrame:
    """Return the steps of each iteration up to an early stop, at the first step whose estimate exceeds `target_kl`.

    The frame has one row per iteration and estimate, from the rows `all` of `clip_step`. The estimates (nats) are k1 =
    mean(old - new) and k3. steps_taken includes the step that measured the estimate; without a stop it counts all
    recorded steps. The records cannot say what would have followed a stop. Raises UserError for a target that is not
    positive.
    """
    if not 0.0 < target_kl < np.inf:
        raise UserError(f"target_kl = {target_kl:g}: must be a positive number (nats per token)")
    whole = clip_step[(clip_step["subset"] == "all") & (clip_step["n_tok"] > 0)]
    table = []
    for iteration, group in whole.sort_values("step").groupby("iteration", sort=True):
        for estimate, name in ESTIMATES.items():
            above = np.flatnonzero(group[name].to_numpy() > target_kl)
            taken = int(above[0]) + 1 if len(above) else len(group)
            row = {"stopped": bool(len(above)), "steps_taken": taken, "steps": len(group)}
            table.append({"iteration": iteration, "estimate": estimate, **row})
    return pd.DataFrame(table)


def overview(tables: ClipTables, early_stop_kl: float | None = None) -> list[str]:
    """Return the printed lines: shares of clipped tokens, ratios, KL, and, if `early_stop_kl` is set, early stops.

    A run at the record level `lean` has no line about the surrogate mass.
    """
    steps = tables.clip_step[(tables.clip_step["subset"] == "all") & (tables.clip_step["n_tok"] > 0)]

    def mean(name: str) -> float:
        return float(np.average(steps[name], weights=steps["n_tok"]))

    mass = float(steps["gm_clip"].mean())
    lines = [
        f"token visits {steps['n_tok'].sum():,} in {len(steps)} steps of {steps['iteration'].nunique()} iterations",
        f"outside the band {mean('band_out'):.3%} = clip_high {mean('clip_high'):.3%} + clip_low {mean('clip_low'):.3%}"
        f" + wrong_high {mean('wrong_high'):.3%} + wrong_low {mean('wrong_low'):.3%}"
        f" + no advantage {mean('out_without_advantage'):.3%}",
        f"gradient removed {mean('grad_zero'):.3%} of tokens; of a step {steps['grad_zero'].min():.1%} to "
        f"{steps['grad_zero'].max():.1%}; without any step taken (clip_floor) {mean('clip_floor'):.3%}",
        *([f"gradient removed: {mass:.1%} of the surrogate mass (mean of steps)"] if not math.isnan(mass) else []),
        f"largest ratio {steps['r_max'].max():.3g}, smallest {steps['r_min'].min():.3g}; beyond twice the range "
        f"{mean('beyond_twice'):.3%}",
        f"KL(anchor || new) of a step, token mean: k1 {mean('kl_k1'):.2e}, k3 {mean('kl_k3'):.2e} nats",
    ]
    if early_stop_kl is not None:
        for estimate, group in early_stop(tables.clip_step, early_stop_kl).groupby("estimate", sort=False):
            lines.append(
                f"early stop at {early_stop_kl:g} by {estimate}: {group['stopped'].sum()} of {len(group)} iterations, "
                f"after {group['steps_taken'].mean():.1f} of {group['steps'].mean():.1f} steps"
            )
    return lines


def main(argv: Sequence[str]) -> None:
    """Print the overview of a run's clipping."""
    parser = Parser(prog="ppo-repro analyse clipping", description="What did the clip do in a run?")
    parser.add_argument("run", type=run_named, help="folder of a run")
    parser.add_argument("--clip-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="in place of the run's own")
    parser.add_argument("--early-stop-kl", type=float, help="where this target would have stopped, nats per token")
    arguments = parser.parse_args(argv)
    band = None if arguments.clip_range is None else (arguments.clip_range[0], arguments.clip_range[1])
    tell("\n".join(overview(clip_tables(arguments.run, band=band), arguments.early_stop_kl)))
