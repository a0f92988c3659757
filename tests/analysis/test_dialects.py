"""Each framework's keys against its published formula, written again slowly on padded matrices in NumPy."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.clipping.flags import token_flags
from analysis.clipping.update_rows import IterationRows, load_iterations
from analysis.dialects.formulas import Bounds, evaluate
from analysis.dialects.report import long_table
from analysis.dialects.table import KEYS
from ppo_repro.records import reader
from tests.analysis.clipping.rows import RULE
from tests.analysis.padded_rows import Padded, close, few, padded_rollout, padded_steps, random_item, seeds

PLACES = ["epoch", "minibatch"]


def of(item: IterationRows, framework: str, bounds: Bounds | None = None) -> pd.Series:
    """The keys of an iteration."""
    return by_place(item, framework, bounds)[-1, -1]


def by_place(item: IterationRows, framework: str, bounds: Bounds | None = None) -> dict[tuple[int, int], pd.Series]:
    """By epoch and minibatch, -1 where there is none, the keys of a framework."""
    table = pd.DataFrame(evaluate(item, tuple(k for k in KEYS if k.framework == framework), bounds))
    table[PLACES] = table[PLACES].fillna(-1).astype(int)
    return {place: part.set_index("key")["value"] for place, part in table.groupby(PLACES)}


def steps(item: IterationRows, framework: str, bounds: Bounds | None = None) -> list[pd.Series]:
    found = by_place(item, framework, bounds)
    return [found[place] for place in sorted(found) if -1 not in place]


@few
@seeds
def test_cleanrl(seed: int) -> None:
    item = random_item(seed)
    clipfracs = []
    for s in padded_steps(item):
        logratio = s.tokens(s.n - s.g)
        ratio = np.exp(logratio)
        old_approx_kl, approx_kl = (-logratio).mean(), ((ratio - 1) - logratio).mean()
        clipfracs.append((np.abs(ratio - 1.0) > 0.2).mean())
        entropy = s.tokens(s.H).mean()
    values, returns = item.tokens["values"], item.tokens["returns"]
    expected = {
        "losses/old_approx_kl": old_approx_kl,
        "losses/approx_kl": approx_kl,
        "losses/clipfrac": np.mean(clipfracs),
        "losses/entropy": entropy,
        "losses/explained_variance": 1 - (returns - values).var(ddof=0) / returns.var(ddof=0),
    }
    close(of(item, "CleanRL"), expected)


def filled(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask, values, 1.0)


@few
@seeds
def test_trl_means_over_padding_as_it_does(seed: int) -> None:
    item = random_item(seed)
    kls, ratios, clips = [], [], []
    for s in padded_steps(item):
        diff = filled(s.n, s.mask) - filled(s.g, s.mask)
        ratio, advantage = np.exp(diff), np.where(s.mask, s.A, 0.0)
        kls.append(0.5 * (diff**2).mean())
        ratios.append(ratio.mean())
        clips.append(s.mean(-advantage * np.clip(ratio, 0.8, 1.2) > -advantage * ratio))
    b = padded_rollout(item)
    g, ref = filled(b.g, b.mask), filled(b.ref, b.mask)
    expected = {
        "policy/approxkl_avg": np.mean(kls),
        "policy/clipfrac_avg": np.mean(clips),
        "val/ratio": np.mean(ratios),
        "val/ratio_var": np.var(ratios, ddof=1),
        "objective/kl": (g - ref).sum(1).mean(),
        "objective/entropy": (-g).sum(1).mean(),
    }
    close(of(item, "TRL"), expected)


@few
@seeds
def test_trl_grpo_and_sampling(seed: int) -> None:
    item = random_item(seed, replace(RULE, high=0.3))
    bounds = Bounds(cispo_high=1.4, cap=1.1)
    for s, row in zip(padded_steps(item), steps(item, "TRL", bounds), strict=True):
        coef = np.exp(s.n - s.p)
        low, high = (coef < 0.8) & (s.A < 0), (coef > 1.3) & (s.A > 0)
        expected = {
            "clip_ratio/low_mean": s.mean(low),
            "clip_ratio/low_min": s.mean(low),
            "clip_ratio/high_mean": s.mean(high),
            "clip_ratio/high_max": s.mean(high),
            "clip_ratio/region_mean": s.mean(low | high),
            "cispo_clip_ratio": s.mean((coef > 1.4) & (s.A > 0)),
        }
        close(row, expected)
    b = padded_rollout(item)
    delta, weight = b.tokens(np.abs(b.p - b.g)), np.minimum(np.exp(b.tokens(b.p - b.g)), 1.1)
    names = ("sampling_logp_difference/mean", "sampling_logp_difference/max", "importance_sampling_ratio/min")
    names += ("importance_sampling_ratio/mean", "importance_sampling_ratio/max")
    numbers = (delta.mean(), delta.max(), weight.min(), weight.mean(), weight.max())
    close(of(item, "TRL", bounds), {f"sampling/{n}": v for n, v in zip(names, numbers, strict=True)})


@few
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 1.5]))
def test_verl(seed: int, dual: float | None) -> None:
    item = random_item(seed, replace(RULE, high=0.28, dual=dual), scale=1.0)
    c = 3.0 if dual is None else dual
    found: dict[str, list[float]] = {"pg_clipfrac": [], "pg_clipfrac_lower": [], "ppo_kl": [], "vf_clipfrac": []}
    for s in padded_steps(item):
        negative_approx_kl = np.clip(s.n - s.p, -20, 20)
        ratio = np.exp(negative_approx_kl)
        losses1, losses2 = -s.A * ratio, -s.A * np.clip(ratio, 0.8, 1.28)
        clip1 = np.maximum(losses1, losses2)
        found["pg_clipfrac"].append(s.mean(losses2 > losses1))
        found["pg_clipfrac_lower"].append(s.mean((clip1 > -s.A * c) * (s.A < 0)))
        found["ppo_kl"].append(s.mean(-negative_approx_kl))
        clipped = np.clip(s.v, s.v_old - 0.2, s.v_old + 0.2)
        found["vf_clipfrac"].append(s.mean((clipped - s.R) ** 2 > (s.v - s.R) ** 2))
    b = padded_rollout(item)
    trainer, sampler = np.exp(b.tokens(b.p)), np.exp(b.tokens(b.g))
    expected = {f"{'critic' if k == 'vf_clipfrac' else 'actor'}/{k}": float(np.mean(v)) for k, v in found.items()}
    expected["training/rollout_probs_diff_max"] = np.abs(trainer - sampler).max()
    expected["training/rollout_probs_diff_mean"] = np.abs(trainer - sampler).mean()
    expected["training/rollout_probs_diff_std"] = np.abs(trainer - sampler).std(ddof=1)
    centred = trainer - trainer.mean(), sampler - sampler.mean()
    covariance = (centred[0] * centred[1]).sum()
    norm = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    expected["training/rollout_actor_probs_pearson_corr"] = covariance / norm
    close(of(item, "verl"), expected)


@few
@seeds
def test_verl_rollout_correction(seed: int) -> None:
    item, limit = random_item(seed), 1.3
    b = padded_rollout(item)
    x, weight = b.p - b.g, np.exp(b.p - b.g)
    train, roll, mean_weight = b.rows(b.p), b.rows(b.g), b.rows(weight)
    sums = np.array([row[m].sum() for row, m in zip(x, b.mask, strict=True)])
    clamped = np.clip(weight, 1 / limit, limit)
    expected = {
        "kl": b.mean(-x),
        "k3_kl": b.mean(np.exp(x) - x - 1),
        "training_ppl": np.exp(-train).mean(),
        "training_log_ppl": -train.mean(),
        "rollout_ppl": np.exp(-roll).mean(),
        "rollout_log_ppl": -roll.mean(),
        "log_ppl_diff": (roll - train).mean(),
        "log_ppl_abs_diff": np.abs(roll - train).mean(),
        "log_ppl_diff_max": (roll - train).max(),
        "log_ppl_diff_min": (roll - train).min(),
        "ppl_ratio": np.exp(roll - train).mean(),
        "chi2_token": b.mean(weight**2) - 1,
        "chi2_seq": np.exp(2 * sums).mean() - 1,
        "rollout_is_mean": b.mean(weight),
        "rollout_is_max": b.tokens(weight).max(),
        "rollout_is_min": b.tokens(weight).min(),
        "rollout_is_ratio_fraction_high": b.mean(weight > limit),
        "rollout_is_ratio_fraction_low": b.mean(weight < 1 / limit),
        "rollout_is_std": b.tokens(clamped).std(),
        "rollout_is_eff_sample_size": 1 / b.mean((clamped / (b.mean(clamped) + 1e-8)) ** 2),
        "rollout_is_batch_norm_factor": b.mean(weight.clip(max=limit)),
        "rollout_rs_token_k1_masked_fraction": b.mean(np.abs(np.log(weight)) > np.log(limit)),
        "rollout_is_seq_mean": mean_weight.mean(),
        "rollout_is_seq_std": mean_weight.std(ddof=1),
        "rollout_is_seq_max": mean_weight.max(),
        "rollout_is_seq_min": mean_weight.min(),
        "rollout_is_seq_max_deviation": np.abs(mean_weight - 1).max(),
        "rollout_is_seq_fraction_high": (mean_weight > limit).mean(),
        "rollout_is_seq_fraction_low": (mean_weight < 1 / limit).mean(),
    }
    row = of(item, "verl", Bounds(threshold=limit))
    # a standard deviation from the difference of two means loses digits where it is small
    assert row["rollout_corr/rollout_is_std"] == pytest.approx(expected.pop("rollout_is_std"), abs=1e-7)
    close(row, {f"rollout_corr/{key}": value for key, value in expected.items()})


@few
@seeds
def test_slime(seed: int) -> None:
    item = random_item(seed)
    outside = []
    for s, row in zip(padded_steps(item), steps(item, "slime", Bounds(tis_high=1.2, tis_low=0.9)), strict=True):
        ppo_kl, w = s.p - s.n, np.exp(s.p - s.g)
        ratio = np.exp(-ppo_kl)
        expected = {
            "pg_clipfrac": -np.clip(ratio, 0.8, 1.2) * s.A > -ratio * s.A,
            "ppo_kl": ppo_kl,
            "ois": ratio,
            "entropy_loss": s.H,
            "train_rollout_logprob_abs_diff": np.abs(s.p - s.g),
            "tis": w,
            "tis_abs": np.abs(w - 1),
            "tis_clipfrac": np.clip(w, 0.9, 1.2) != w,
        }
        close(row, {f"train/{key}": s.rows(values).mean() for key, values in expected.items()})
        outside.append(s.rows(np.abs(s.v - s.v_old) > 0.2).mean())
    close(of(item, "slime"), {"train/value_clipfrac": float(np.mean(outside))})


@few
@seeds
def test_openrlhf(seed: int) -> None:
    item = random_item(seed)
    found = []
    for s in padded_steps(item):
        log_ratio = s.n - s.p
        surr1, surr2 = np.exp(log_ratio) * s.A, np.clip(np.exp(log_ratio), 0.8, 1.2) * s.A
        found.append((s.mean(surr2 < surr1), s.mean(-log_ratio), s.mean(s.g - s.p), s.mean(s.H)))
    keys = ("ppo_clip_ratio", "ppo_kl", "vllm_kl", "entropy_loss")
    close(of(item, "OpenRLHF"), dict(zip(keys, np.mean(found, axis=0), strict=True)))


@few
@seeds
def test_nemo_rl(seed: int) -> None:
    item = random_item(seed)
    for s, row in zip(padded_steps(item), steps(item, "NeMo-RL"), strict=True):
        count = s.mask.sum()

        def mean(values: np.ndarray, mask: np.ndarray = s.mask, n: float = count) -> float:
            return float(np.where(mask, values, 0.0).sum() / (n + 1e-8))

        ratio, clamped = np.exp(s.n - s.p), np.clip(np.exp(s.n - s.p), 0.8, 1.2)
        log_mixture = np.log(0.5 * np.exp(s.p) + 0.5 * np.exp(s.g))
        jsd = [0.5 * (np.exp(x - log_mixture) - (x - log_mixture) - 1) for x in (s.p, s.g)]
        expected = {
            "probs_ratio": mean(ratio),
            "probs_ratio_clamped": mean(clamped),
            "probs_ratio_min": s.tokens(ratio).min(),
            "probs_ratio_max": s.tokens(ratio).max(),
            "probs_ratio_clamped_min": s.tokens(clamped).min(),
            "probs_ratio_clamped_max": s.tokens(clamped).max(),
            "token_mult_prob_error": mean(np.exp(np.abs(s.g - s.p))),
            "gen_kl_error": mean(np.exp(s.p - s.g) - 1 - (s.p - s.g)),
            "policy_kl_error": mean(np.exp(s.g - s.p) - 1 - (s.g - s.p)),
            "js_divergence_error": mean(jsd[0] + jsd[1]),
            "sampling_importance_ratio": mean(np.exp(s.p - s.g)),
            "approx_entropy": -mean(np.exp(s.n - s.g) * s.n),
        }
        close(row, expected)


@few
@seeds
def test_tinker(seed: int) -> None:
    item = random_item(seed)
    for (epoch, _), row in by_place(item, "tinker-cookbook").items():
        s = Padded(item.rows[item.rows["epoch"] == epoch], 5)
        expected = {
            "optim/kl_sample_train_v1": s.mean(s.g - s.n),
            "optim/kl_sample_train_v2": 0.5 * s.mean((s.g - s.n) ** 2),
            "optim/entropy": -s.mean(s.g),
        }
        close(row, expected)


@few
@seeds
def test_prime_rl(seed: int) -> None:
    item = random_item(seed)
    bounds = Bounds(mask_low=0.05, mask_high=0.1)
    for s, row in zip(padded_steps(item), steps(item, "prime-rl", bounds), strict=True):
        x, delta = s.n - s.g, np.exp(s.n) - np.exp(s.g)
        expected = {
            "mismatch_kl": s.mean(np.exp(x) - x - 1),
            "importance_ratio": s.mean(np.exp(x)),
            "prob_delta": s.mean(delta),
            "is_masked": s.mean(np.where(s.A > 0, delta > 0.1, delta < -0.05)),
            "is_masked_high": s.mean((s.A > 0) & (delta > 0.1)),
            "is_masked_low": s.mean((s.A < 0) & (delta < -0.05)),
        }
        close(row, expected)


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
