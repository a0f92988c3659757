"""Each framework's keys against its published formula, written again slowly on padded matrices in NumPy."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_repro.analysis.clipping.flags import token_flags
from ppo_repro.analysis.clipping.update_rows import IterationRows, load_iterations
from ppo_repro.analysis.dialects import definitions, evaluate, long_table
from ppo_repro.records import reader
from tests.analysis.clipping.rows import RULE
from tests.analysis.padded_rows import Padded, padded_rollout, padded_steps, random_item


def cells(s: Padded, values: np.ndarray) -> float:
    """The mean over the padded matrix, 0 at padding."""
    return float(np.where(s.mask, values, 0.0).mean())


def row_sums(s: Padded, values: np.ndarray) -> np.ndarray:
    return np.where(s.mask, values, 0.0).sum(1)


def removed(s: Padded, ratio: np.ndarray) -> np.ndarray:
    return -np.clip(ratio, 0.8, 1.2) * s.A > -ratio * s.A


def lower(s: Padded) -> float:
    ratio = np.exp(np.clip(s.n - s.p, -20, 20))
    clip1 = np.maximum(-s.A * ratio, -s.A * np.clip(ratio, 0.8, 1.2))
    return s.mean((clip1 > -s.A * 3.0) * (s.A < 0))


def value_clip(s: Padded) -> float:
    clipped = np.clip(s.v, s.v_old - 0.2, s.v_old + 0.2)
    return s.mean((clipped - s.R) ** 2 > (s.v - s.R) ** 2)


def jsd(s: Padded) -> float:
    middle = np.log(0.5 * np.exp(s.p) + 0.5 * np.exp(s.g))
    return sum(0.5 * s.mean(np.exp(x - middle) - (x - middle) - 1) for x in (s.p, s.g))


def size(s: Padded) -> float:
    weights = np.clip(np.exp(s.tokens(s.p - s.g)), 0.5, 2.0)
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


# by framework: the mean over these of every step, and these of the whole rollout
STEPS: dict[tuple[str, str], Callable[[Padded], float]] = {
    ("CleanRL", "losses/clipfrac"): lambda s: s.mean(np.abs(np.exp(s.n - s.g) - 1.0) > 0.2),
    ("TRL PPO", "policy/approxkl_avg"): lambda s: 0.5 * cells(s, (s.n - s.g) ** 2),
    ("TRL PPO", "policy/clipfrac_avg"): lambda s: s.mean(removed(s, np.exp(s.n - s.g))),
    ("TRL GRPO", "clip_ratio/low_mean"): lambda s: s.mean((np.exp(s.n - s.p) < 0.8) & (s.A < 0)),
    ("TRL GRPO", "clip_ratio/high_mean"): lambda s: s.mean((np.exp(s.n - s.p) > 1.2) & (s.A > 0)),
    ("TRL GRPO", "clip_ratio/region_mean"): lambda s: s.mean(removed(s, np.exp(s.n - s.p))),
    ("verl", "actor/pg_clipfrac"): lambda s: s.mean(removed(s, np.exp(s.n - s.p))),
    ("verl", "actor/pg_clipfrac_lower"): lower,
    ("verl", "actor/ppo_kl"): lambda s: s.mean(s.p - s.n),
    ("verl", "critic/vf_clipfrac"): value_clip,
    ("slime", "train/pg_clipfrac"): lambda s: s.rows(removed(s, np.exp(s.n - s.p))).mean(),
    ("slime", "train/ppo_kl"): lambda s: s.rows(s.p - s.n).mean(),
    ("slime", "train/train_rollout_logprob_abs_diff"): lambda s: s.rows(np.abs(s.p - s.g)).mean(),
    ("slime", "train/tis"): lambda s: s.rows(np.exp(s.p - s.g)).mean(),
    ("slime", "train/tis_clipfrac"): lambda s: s.rows(np.exp(s.p - s.g) > 2.0).mean(),
    ("OpenRLHF", "ppo_clip_ratio"): lambda s: s.mean(removed(s, np.exp(s.n - s.p))),
    ("OpenRLHF", "ppo_kl"): lambda s: s.mean(s.p - s.n),
    ("OpenRLHF", "vllm_kl"): lambda s: s.mean(s.g - s.p),
    ("NeMo-RL", "probs_ratio"): lambda s: s.mean(np.exp(s.n - s.p)),
    ("NeMo-RL", "probs_ratio_clamped"): lambda s: s.mean(np.clip(np.exp(s.n - s.p), 0.8, 1.2)),
    ("NeMo-RL", "token_mult_prob_error"): lambda s: s.mean(np.exp(np.abs(s.g - s.p))),
    ("NeMo-RL", "gen_kl_error"): lambda s: s.mean(np.exp(s.p - s.g) - 1 - (s.p - s.g)),
    ("NeMo-RL", "policy_kl_error"): lambda s: s.mean(np.exp(s.g - s.p) - 1 - (s.g - s.p)),
    ("NeMo-RL", "js_divergence_error"): jsd,
    ("prime-rl", "mismatch_kl"): lambda s: s.mean(np.exp(s.n - s.g) - (s.n - s.g) - 1),
    ("prime-rl", "importance_ratio"): lambda s: s.mean(np.exp(s.n - s.g)),
    ("prime-rl", "prob_delta"): lambda s: s.mean(np.exp(s.n) - np.exp(s.g)),
    ("prime-rl", "is_masked_high"): lambda s: s.mean((s.A > 0) & (np.exp(s.n) - np.exp(s.g) > 0.2)),
    ("prime-rl", "is_masked_low"): lambda s: s.mean((s.A < 0) & (np.exp(s.n) - np.exp(s.g) < -0.2)),
}
ROLLOUT: dict[tuple[str, str], Callable[[Padded], float]] = {
    ("CleanRL", "losses/explained_variance"): lambda b: 1 - b.tokens(b.R - b.v_old).var() / b.tokens(b.R).var(),
    ("TRL PPO", "objective/kl"): lambda b: row_sums(b, b.g - b.ref).mean(),
    ("TRL PPO", "objective/entropy"): lambda b: np.where(b.mask, -b.g, -1.0).sum(1).mean(),
    ("TRL GRPO", "sampling/sampling_logp_difference/mean"): lambda b: b.mean(np.abs(b.p - b.g)),
    ("TRL GRPO", "sampling/sampling_logp_difference/max"): lambda b: np.nanmax(np.abs(b.p - b.g)),
    ("TRL GRPO", "sampling/importance_sampling_ratio/mean"): lambda b: b.mean(np.minimum(np.exp(b.p - b.g), 2.0)),
    ("verl", "training/rollout_probs_diff_max"): lambda b: np.nanmax(np.abs(np.exp(b.p) - np.exp(b.g))),
    ("verl", "training/rollout_probs_diff_mean"): lambda b: b.mean(np.abs(np.exp(b.p) - np.exp(b.g))),
    ("verl", "training/rollout_actor_probs_pearson_corr"): lambda b: float(
        np.corrcoef(np.exp(b.tokens(b.p)), np.exp(b.tokens(b.g)))[0, 1]
    ),
    ("verl", "rollout_corr/kl"): lambda b: b.mean(b.g - b.p),
    ("verl", "rollout_corr/k3_kl"): lambda b: b.mean(np.exp(b.p - b.g) - (b.p - b.g) - 1),
    ("verl", "rollout_corr/training_ppl"): lambda b: np.exp(-b.rows(b.p)).mean(),
    ("verl", "rollout_corr/log_ppl_abs_diff"): lambda b: np.abs(b.rows(b.g) - b.rows(b.p)).mean(),
    ("verl", "rollout_corr/chi2_token"): lambda b: b.mean(np.exp(b.p - b.g) ** 2) - 1,
    ("verl", "rollout_corr/chi2_seq"): lambda b: np.exp(2 * row_sums(b, b.p - b.g)).mean() - 1,
    ("verl", "rollout_corr/rollout_is_mean"): lambda b: b.mean(np.exp(b.p - b.g)),
    ("verl", "rollout_corr/rollout_is_max"): lambda b: np.nanmax(np.exp(b.p - b.g)),
    ("verl", "rollout_corr/rollout_is_eff_sample_size"): size,
}
LAST: dict[tuple[str, str], Callable[[Padded], float]] = {
    ("CleanRL", "losses/approx_kl"): lambda s: s.mean(np.exp(s.n - s.g) - 1 - (s.n - s.g)),
    ("CleanRL", "losses/entropy"): lambda s: s.mean(s.H),
}
FIRST_EPOCH: dict[tuple[str, str], Callable[[Padded], float]] = {
    ("tinker-cookbook", "optim/kl_sample_train_v1"): lambda s: s.mean(s.g - s.n),
    ("tinker-cookbook", "optim/kl_sample_train_v2"): lambda s: 0.5 * s.mean((s.g - s.n) ** 2),
}


def values(item: IterationRows) -> dict[tuple[str, str], float]:
    return {(str(row["framework"]), str(row["key"])): float(str(row["value"])) for row in evaluate(item)}


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.4, 1.0]))
def test_every_key_is_its_published_formula(seed: int, scale: float) -> None:
    item = random_item(seed, scale=scale)
    steps, rollout = padded_steps(item), padded_rollout(item)
    first = Padded(item.rows[item.rows["epoch"] == 0], rollout.mask.shape[1])
    expected = {key: float(np.mean([formula(s) for s in steps])) for key, formula in STEPS.items()}
    for formulas, rows in ((ROLLOUT, rollout), (LAST, steps[-1]), (FIRST_EPOCH, first)):
        expected |= {key: float(formula(rows)) for key, formula in formulas.items()}
    found = values(item)
    assert found.keys() == expected.keys()
    assert len(definitions()) == len(found)
    for key, value in expected.items():
        # float64 sums in another order; NeMo-RL and verl add 1e-8
        assert found[key] == pytest.approx(value, rel=1e-7, abs=1e-12), key


def test_a_dual_clip_and_an_asymmetric_range() -> None:
    item = random_item(1, replace(RULE, dual=1.5), scale=1.0)
    assert (
        values(item)["verl", "actor/pg_clipfrac_lower"]
        > values(replace(item, rule=RULE))["verl", "actor/pg_clipfrac_lower"]
    )
    wide = values(replace(item, rule=replace(RULE, high=0.3)))
    assert np.isnan(wide["CleanRL", "losses/clipfrac"])
    assert np.isnan(wide["TRL PPO", "policy/clipfrac_avg"])


@pytest.mark.parametrize("name", ["deterministic_run", "native_run"])
def test_on_a_recorded_run_the_dialects_agree_with_each_other_and_with_training(
    name: str, request: pytest.FixtureRequest
) -> None:
    run_dir = request.getfixturevalue(name)
    table = long_table(run_dir).set_index(["framework", "key"])["value"]
    steps = reader.read_steps(run_dir)
    item = next(iter(load_iterations(run_dir)))
    recorded = steps[steps["iteration"] == 0]
    # float64 against the float32 flags of the loss: at most one token on the bound
    one = 1.0 / recorded["tokens"].min()
    assert table["verl", "actor/pg_clipfrac"].iloc[0] == pytest.approx(recorded["clip_fraction"].mean(), abs=one)
    assert table["OpenRLHF", "ppo_kl"].tolist() == pytest.approx(table["verl", "actor/ppo_kl"].tolist(), abs=1e-15)
    # the anchor of this run is the rollout; recorded k3 comes from float32 differences
    last = float(recorded["approx_kl"].iloc[-1])
    assert table["CleanRL", "losses/approx_kl"].iloc[0] == pytest.approx(last, rel=1e-5)
    whole = token_flags(item.rows, item.rule)["band_out"].groupby([item.rows["epoch"], item.rows["minibatch"]]).mean()
    assert table["CleanRL", "losses/clipfrac"].iloc[0] == pytest.approx(whole.mean())
    equal = bool((table["slime", "train/train_rollout_logprob_abs_diff"] == 0).all())
    assert equal == (name == "deterministic_run")
