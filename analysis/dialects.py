"""What would another framework have logged for this run? `python -m ppo_repro.analysis.dialects RUN` prints it.

Each key of a framework is a formula over the recorded columns; `--definitions` prints the formulas. In formulas
g = rollout, p = old, n = new log-probs, r = exp(n - anchor), A = advantage. The formulas assume one process, one
micro-batch per minibatch, responses padded on the right to the longest of the iteration, and the framework's default
for a setting that our run does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.analysis.clipping.flags import ratios_of as exp
from ppo_repro.analysis.clipping.update_rows import (
    ClipRule,
    Float64,
    IterationRows,
    column,
    load_iterations,
    policy_rows,
    steps_of,
)
from ppo_repro.analysis.program import program
from ppo_repro.base.errors import UserError
from ppo_repro.base.latest import run_named
from ppo_repro.base.output import Parser, tell

# the tokens that a key is computed over; over several steps the mean is logged
Over = Literal["steps", "last step", "first epoch", "rollout", "value steps"]
DUAL_CLIP = 3.0  # verl: it always applies one
LOG_RATIO_LIMIT = 20.0  # verl, before exp
THRESHOLD = 2.0  # verl: C of rollout_corr
TIS_BOUNDS = (0.0, 2.0)  # slime
CAP = 2.0  # TRL: on importance ratios
MASK = 0.2  # prime-rl: on differences of probabilities, either way
INVALID_LOGPROB = 1.0  # what TRL writes at padding, in old and new log-probs alike
EPSILON = 1e-8  # NeMo-RL and verl add it to denominators


@dataclass(frozen=True)
class Rows:
    """Columns of the tokens of a step, an epoch or the rollout, as arrays [N]; an absent column is empty."""

    sequence: npt.NDArray[np.int64]  # response of each token, from 0
    g: Float64
    p: Float64
    ref: Float64
    n: Float64
    A: Float64
    H: Float64  # entropies of the new policy
    v: Float64  # new values
    v_old: Float64
    R: Float64  # returns
    width: int  # tokens of the longest response of the iteration
    rule: ClipRule

    @property
    def r(self) -> Float64:
        """Return the ratio to the trainer, exp(n - p)."""
        return exp(self.n - self.p)

    @property
    def r_rollout(self) -> Float64:
        """Return the ratio to the sampler, exp(n - g)."""
        return exp(self.n - self.g)

    @property
    def w(self) -> Float64:
        """Return the importance weight, exp(p - g)."""
        return exp(self.p - self.g)

    def clipped(self, ratios: Float64) -> Float64:
        """Return ratios clipped to the band."""
        return np.clip(ratios, 1.0 - self.rule.low, 1.0 + self.rule.high)

    def sums(self, values: Float64) -> Float64:
        """Return the sum of each response."""
        return np.asarray(np.bincount(self.sequence, values), np.float64)

    def means(self, values: npt.NDArray[np.generic]) -> Float64:
        """Return the token mean of each response."""
        return self.sums(np.asarray(values, np.float64)) / np.bincount(self.sequence)

    def padded(self, values: Float64) -> float:
        """Return sum / (responses × width): the mean over the padded matrix, which is 0 at padding."""
        return float(values.sum()) / (self.width * (int(self.sequence.max()) + 1))


@dataclass(frozen=True)
class Key:
    """One published key: its formula in words, its difference from our metric, and its function."""

    framework: str
    source: str  # repository, path and commit
    key: str
    over: Over
    formula: str
    difference: str
    value: Callable[[Rows], float]


def mean(values: npt.NDArray[np.generic]) -> float:
    """Return the mean of values per token or per response; NaN without values."""
    return float(values.mean())


def bounded(values: Float64) -> Float64:
    """Return log-ratios clipped to [-20, 20], as verl clips them before exp."""
    return np.clip(values, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def removed(x: Rows, ratios: Float64) -> npt.NDArray[np.bool_]:
    """Return a bool per token: whether max(-r A, -clip(r) A) has no gradient there."""
    return np.asarray(-x.clipped(ratios) * x.A > -ratios * x.A)


def dual_clipped(x: Rows) -> float:
    """Return verl's actor/pg_clipfrac_lower, the share with A < 0 and max(-r A, -clip(r) A) > -c A; c: dual clip."""
    limit, ratios = DUAL_CLIP if x.rule.dual is None else x.rule.dual, exp(bounded(x.n - x.p))
    return mean((np.maximum(-x.A * ratios, -x.A * x.clipped(ratios)) > -x.A * limit) & (x.A < 0))


def value_clipped(x: Rows) -> float:
    """Return verl's critic/vf_clipfrac, the share with (v_clip - R)^2 > (v - R)^2; NaN without a value clip."""
    if x.rule.value_range is None:
        return float("nan")
    clipped = np.clip(x.v, x.v_old - x.rule.value_range, x.v_old + x.rule.value_range)
    return mean((clipped - x.R) ** 2 > (x.v - x.R) ** 2)


def explained_variance(x: Rows) -> float:
    """Return CleanRL's explained variance, 1 - Var(R - v_old) / Var(R); NaN if the returns do not vary."""
    spread = float(np.var(x.R))
    return 1.0 - float(np.var(x.R - x.v_old)) / spread if spread else float("nan")


def correlation(x: Rows) -> float:
    """Return Pearson's correlation of exp(p) and exp(g); NaN if one of them does not vary."""
    a, b = exp(x.p), exp(x.g)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else float("nan")


def effective_size(x: Rows) -> float:
    """Return verl's effective sample size, 1 / mean((w / mean w)^2), with w clamped to [1/C, C]."""
    weights = np.clip(exp(bounded(x.p - x.g)), 1.0 / THRESHOLD, THRESHOLD)
    return 1.0 / mean((weights / (mean(weights) + EPSILON)) ** 2)


def mixture(x: Rows) -> float:
    """Return NeMo-RL's js_divergence_error: mean of (k3(p - m) + k3(g - m)) / 2 with m = log((e^p + e^g) / 2)."""
    middle = np.log(0.5 * np.exp(x.p) + 0.5 * np.exp(x.g))
    return nemo_mean(sum(0.5 * (exp(a) - a - 1.0) for a in (x.p - middle, x.g - middle)))


def nemo_mean(values: Float64) -> float:
    """Return sum / (tokens + 1e-8), the mean of NeMo-RL."""
    return float(values.sum()) / (len(values) + EPSILON)


def symmetric(value: Callable[[Rows], float]) -> Callable[[Rows], float]:
    """Return a key's function that gives NaN for an asymmetric clip range, which the framework does not have."""
    return lambda x: value(x) if x.rule.low == x.rule.high else float("nan")


def masked(x: Rows, sign: int) -> npt.NDArray[np.bool_]:
    """Return a bool per token: whether prime-rl masks it, which is sign A > 0 and sign (e^n - e^g) > MASK."""
    return (sign * x.A > 0) & (sign * (exp(x.n) - exp(x.g)) > MASK)


Row = tuple[str, Over, str, str, Callable[[Rows], float]]
BAND = "band_out whatever the sign of A; NaN if the range is asymmetric, which it does not have"
UNEVEN = "responses count alike, whatever their length"
SIGNED = "k1 of KL(old || new), any sign"
PROBABILITIES = "of probabilities: small where probabilities are small"


def _keys(framework: str, source: str, *rows: Row) -> tuple[Key, ...]:
    return tuple(Key(framework, source, *row) for row in rows)


# key, over, formula, difference from ours, value
# fmt: off
KEYS: tuple[Key, ...] = (
    *_keys("CleanRL", "vwxyzjn/cleanrl cleanrl/ppo.py 020cf0e5",
        ("losses/approx_kl", "last step", "mean((r - 1) - log r), r to rollout", "k3, of the last minibatch alone",
         lambda x: mean(x.r_rollout - 1.0 - (x.n - x.g))),
        ("losses/clipfrac", "steps", "mean(|r - 1| > clip_coef), r to rollout", BAND,
         symmetric(lambda x: mean(np.abs(x.r_rollout - 1.0) > x.rule.low))),
        ("losses/entropy", "last step", "mean(entropy)", "of the last minibatch alone", lambda x: mean(x.H)),
        ("losses/explained_variance", "rollout", "1 - var(returns - values) / var(returns)", "none",
         explained_variance),
    ),
    *_keys("TRL PPO", "huggingface/trl trl/experimental/ppo/ppo_trainer.py 0062ee10",
        ("policy/approxkl_avg", "steps", "0.5 mean((n - g)^2)", "k2; padding counts as 0",
         lambda x: 0.5 * x.padded((x.n - x.g) ** 2)),
        ("policy/clipfrac_avg", "steps", "mean(-clip(r) A > -r A), r to rollout", "NaN if the range is asymmetric",
         symmetric(lambda x: mean(removed(x, x.r_rollout)))),
        ("objective/kl", "rollout", "mean over responses of sum_t(g - ref)", "k1 of KL(policy || reference)",
         lambda x: mean(x.sums(x.g - x.ref))),
        ("objective/entropy", "rollout", "mean over responses of sum_t(-g)", "minus 1 for every padded position",
         lambda x: mean(x.sums(-x.g) - INVALID_LOGPROB * (x.width - np.bincount(x.sequence)))),
    ),
    *_keys("TRL GRPO", "huggingface/trl trl/trainer/grpo_trainer.py d2b69d76",
        ("clip_ratio/low_mean", "steps", "mean(r < 1 - eps_low and A < 0)", "clip_low",
         lambda x: mean((x.r < 1 - x.rule.low) & (x.A < 0))),
        ("clip_ratio/high_mean", "steps", "mean(r > 1 + eps_high and A > 0)", "clip_high",
         lambda x: mean((x.r > 1 + x.rule.high) & (x.A > 0))),
        ("clip_ratio/region_mean", "steps", "mean(either)", "grad_zero without dual clip",
         lambda x: mean(removed(x, x.r))),
        ("sampling/sampling_logp_difference/mean", "rollout", "mean |p - g|", "nats",
         lambda x: mean(np.abs(x.p - x.g))),
        ("sampling/sampling_logp_difference/max", "rollout", "max |p - g|", "nats",
         lambda x: float(np.abs(x.p - x.g).max())),
        ("sampling/importance_sampling_ratio/mean", "rollout", f"mean(min(exp(p - g), {CAP:g}))",
         "after truncation: what was cut off cannot be seen", lambda x: mean(np.minimum(x.w, CAP))),
    ),
    *_keys("verl", "verl-project/verl verl/trainer/ppo/core_algos.py 018f23b5",
        ("actor/pg_clipfrac", "steps", "mean(-clip(r) A > -r A)", "grad_zero without dual clip",
         lambda x: mean(removed(x, exp(bounded(x.n - x.p))))),
        ("actor/pg_clipfrac_lower", "steps", "mean(max(-r A, -clip(r) A) > -c A and A < 0)",
         f"dual_zero; c = {DUAL_CLIP:g} where the run has no dual clip", dual_clipped),
        ("actor/ppo_kl", "steps", "mean(p - n)", SIGNED, lambda x: mean(-bounded(x.n - x.p))),
        ("critic/vf_clipfrac", "value steps", "mean((v_clip - R)^2 > (v - R)^2)", "vf_grad_zero", value_clipped),
    ),
    *_keys("verl", "volcengine/verl verl/utils/debug/metrics.py 123d7444",
        ("training/rollout_probs_diff_max", "rollout", "max |exp(p) - exp(g)|", PROBABILITIES,
         lambda x: float(np.abs(exp(x.p) - exp(x.g)).max())),
        ("training/rollout_probs_diff_mean", "rollout", "mean |exp(p) - exp(g)|", PROBABILITIES,
         lambda x: mean(np.abs(exp(x.p) - exp(x.g)))),
        ("training/rollout_actor_probs_pearson_corr", "rollout", "correlation of exp(p) and exp(g)",
         "dominated by tokens near 0 and 1", correlation),
    ),
    *_keys("verl", "volcengine/verl verl/trainer/ppo/rollout_corr_helper.py e1904109",
        ("rollout_corr/kl", "rollout", "mean(g - p)", "k1 of KL(rollout || old), any sign", lambda x: mean(x.g - x.p)),
        ("rollout_corr/k3_kl", "rollout", "mean(exp(x) - x - 1), x = p - g", "k3; in float32 noise for small x",
         lambda x: mean(x.w - (x.p - x.g) - 1.0)),
        ("rollout_corr/training_ppl", "rollout", "mean over responses of exp(-mean_t p)", "mean of perplexities",
         lambda x: mean(exp(-x.means(x.p)))),
        ("rollout_corr/log_ppl_abs_diff", "rollout", "mean over responses of |mean_t(g - p)|",
         "errors cancel within a response", lambda x: mean(np.abs(x.means(x.g - x.p)))),
        ("rollout_corr/chi2_token", "rollout", "mean(w^2) - 1, w = exp(p - g)", "may be negative in a sample",
         lambda x: mean(exp(bounded(x.p - x.g)) ** 2) - 1.0),
        ("rollout_corr/chi2_seq", "rollout", "mean over responses of exp(2 sum_t(p - g)), minus 1",
         "may be negative in a sample", lambda x: mean(exp(2.0 * bounded(x.sums(x.p - x.g)))) - 1.0),
        ("rollout_corr/rollout_is_mean", "rollout", "mean(w)", "before truncation",
         lambda x: mean(exp(bounded(x.p - x.g)))),
        ("rollout_corr/rollout_is_max", "rollout", "max(w)", "before truncation",
         lambda x: float(exp(bounded(x.p - x.g)).max())),
        ("rollout_corr/rollout_is_eff_sample_size", "rollout", "1 / mean((v / mean v)^2), v = clip(w, 1/C, C)",
         "ess_tok on clamped weights: optimistic", effective_size),
    ),
    *_keys("slime", "THUDM/slime slime/backends/megatron_utils/loss.py 00c2d6db",
        ("train/pg_clipfrac", "steps", "mean(-clip(r) A > -r A)", f"grad_zero; {UNEVEN}",
         lambda x: mean(x.means(removed(x, x.r)))),
        ("train/ppo_kl", "steps", "mean(p - n)", f"{SIGNED}; {UNEVEN}", lambda x: mean(x.means(x.p - x.n))),
        ("train/train_rollout_logprob_abs_diff", "steps", "mean |p - g|", f"nats; {UNEVEN}",
         lambda x: mean(x.means(np.abs(x.p - x.g)))),
        ("train/tis", "steps", "mean(exp(p - g))", f"before truncation; {UNEVEN}", lambda x: mean(x.means(x.w))),
        ("train/tis_clipfrac", "steps", f"mean(clip(w, {TIS_BOUNDS[0]:g}, {TIS_BOUNDS[1]:g}) != w)", UNEVEN,
         lambda x: mean(x.means(np.clip(x.w, *TIS_BOUNDS) != x.w))),
    ),
    *_keys("OpenRLHF", "OpenRLHF/OpenRLHF openrlhf/models/loss.py f5b3f08a",
        ("ppo_clip_ratio", "steps", "mean(clip(r) A < r A)", "grad_zero without dual clip, also with one",
         lambda x: mean(removed(x, x.r))),
        ("ppo_kl", "steps", "mean(p - n)", SIGNED, lambda x: mean(x.p - x.n)),
        ("vllm_kl", "steps", "mean(g - p)", "k1 of KL(rollout || old); only with the importance correction",
         lambda x: mean(x.g - x.p)),
    ),
    *_keys("NeMo-RL", "NVIDIA-NeMo/RL nemo_rl/algorithms/loss_functions.py 005a098a",
        ("probs_ratio", "steps", "mean(r)", "none but 1e-8 on the count", lambda x: nemo_mean(x.r)),
        ("probs_ratio_clamped", "steps", "mean(clip(r))", "instead of a clip fraction",
         lambda x: nemo_mean(x.clipped(x.r))),
        ("token_mult_prob_error", "steps", "mean(exp |g - p|)", "mult_err",
         lambda x: nemo_mean(exp(np.abs(x.p - x.g)))),
        ("gen_kl_error", "steps", "mean(exp(x) - 1 - x), x = p - g", "k3 of KL(rollout || old)",
         lambda x: nemo_mean(x.w - 1.0 - (x.p - x.g))),
        ("policy_kl_error", "steps", "mean(exp(-x) - 1 + x), x = p - g",
         "called KL(train || generation), but the tokens are the sampler's",
         lambda x: nemo_mean(exp(x.g - x.p) - 1.0 + (x.p - x.g))),
        ("js_divergence_error", "steps", "mean of k3 to the mixture", "no divergence: only the sampler's tokens",
         mixture),
    ),
    *_keys("tinker-cookbook", "thinking-machines-lab/tinker-cookbook tinker_cookbook/rl/metrics.py 1f656115",
        ("optim/kl_sample_train_v1", "first epoch", "mean(g - n)", "k1 of mismatch and movement together",
         lambda x: mean(x.g - x.n)),
        ("optim/kl_sample_train_v2", "first epoch", "0.5 mean((g - n)^2)", "k2 of the same",
         lambda x: 0.5 * mean((x.g - x.n) ** 2)),
    ),
    *_keys("prime-rl", "PrimeIntellect-ai/prime-rl src/prime_rl/trainer/rl/loss.py 008468c1",
        ("mismatch_kl", "steps", "mean(exp(x) - x - 1), x = n - g", "includes the update's movement",
         lambda x: mean(x.r_rollout - (x.n - x.g) - 1.0)),
        ("importance_ratio", "steps", "mean(exp(n - g))", "none", lambda x: mean(x.r_rollout)),
        ("prob_delta", "steps", "mean(exp(n) - exp(g))", "positive and negative cancel",
         lambda x: mean(exp(x.n) - exp(x.g))),
        ("is_masked_high", "steps", f"mean(A > 0 and prob_delta > {MASK:g})", "a bound on probabilities, no ratio",
         lambda x: mean(masked(x, 1))),
        ("is_masked_low", "steps", f"mean(A < 0 and prob_delta < -{MASK:g})", "a bound on probabilities, no ratio",
         lambda x: mean(masked(x, -1))),
    ),
)
# fmt: on


def _rows(frame: pd.DataFrame, item: IterationRows, width: int) -> Rows:
    names = {"g": "rollout_logprobs", "p": "old_logprobs", "ref": "ref_logprobs", "n": "new_logprobs"}
    names |= {"A": "advantages", "H": "new_entropies", "v": "new_values", "v_old": "values", "R": "returns"}
    sequence = np.unique(frame["sequence"].to_numpy(), return_inverse=True)[1].astype(np.int64)
    arrays = {short: column(frame, name) if name in frame else np.empty(0) for short, name in names.items()}
    return Rows(sequence, width=width, rule=item.rule, **arrays)


def evaluate(item: IterationRows) -> Iterator[dict[str, object]]:
    """Yield framework, key, iteration and value of every key in one iteration; NaN if it has no such step."""
    width = int(item.tokens.groupby("sequence").size().max())
    policy, moved = policy_rows(item), item.rows[item.rows["new_values"].notna()]
    steps = [policy.iloc[rows] for _, rows in sorted(steps_of(policy).items())]
    frames: dict[Over, list[pd.DataFrame]] = {
        "steps": steps,
        "last step": steps[-1:],
        "first epoch": [policy[policy["epoch"] == 0]] if steps else [],
        "rollout": [item.tokens],
        "value steps": [moved.iloc[rows] for _, rows in sorted(steps_of(moved).items())],
    }
    rows = {over: [_rows(frame, item, width) for frame in some] for over, some in frames.items()}
    for key in KEYS:
        values = [key.value(x) for x in rows[key.over]]
        value = float(np.mean(values)) if values else float("nan")
        yield {"framework": key.framework, "key": key.key, "iteration": item.iteration, "value": value}


def definitions() -> pd.DataFrame:
    """Return one row per published key, with the columns framework, key, over, formula, difference, source."""
    names = ("framework", "key", "over", "formula", "difference", "source")
    return pd.DataFrame([{name: getattr(key, name) for name in names} for key in KEYS])


def long_table(
    run_dir: Path | str, *, iterations: Sequence[int] | None = None, band: tuple[float, float] | None = None
) -> pd.DataFrame:
    """Return one row per iteration and published key: framework, key, iteration, value.

    Raises UserError for damaged records, or if the objective has no clip and `band` is None.
    """
    items = load_iterations(run_dir, iterations=iterations, band=band)
    return pd.DataFrame([row for item in items for row in evaluate(item)])


@program
def main(argv: Sequence[str] | None) -> None:
    """Print each key's mean over the run, or the definitions of the keys."""
    parser = Parser(
        prog="python -m ppo_repro.analysis.dialects", description="a run under the published keys of other frameworks"
    )
    parser.add_argument("run", type=run_named, nargs="?", help="folder of a run")
    parser.add_argument("--definitions", action="store_true", help="what each key means, with its source")
    parser.add_argument("--clip-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="in place of the run's own")
    arguments = parser.parse_args(argv)
    if arguments.definitions == (arguments.run is not None):
        parser.error("give either a run or --definitions")
    if arguments.definitions:
        if arguments.clip_range is not None:
            raise UserError("--clip-range: changes no definition; leave it out, or give a run")
        tell(definitions().to_csv(index=False, sep="\t"), end="")
        return
    band = None if arguments.clip_range is None else (arguments.clip_range[0], arguments.clip_range[1])
    table = long_table(arguments.run, band=band)
    means = table.groupby(["framework", "key"], sort=False)["value"].agg(["first", "mean", "last"])
    tell(means.to_string(float_format=lambda x: f"{x:.4g}"))


if __name__ == "__main__":
    sys.exit(main())
