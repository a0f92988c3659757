"""The table of published keys. Columns: key, over, value, formula, anchor, reduction, difference from ours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from analysis.dialects import formulas as f
from analysis.dialects.formulas import Key, Over, Rows, mean, seq_mean

CLEANRL = ("vwxyzjn/cleanrl", "cleanrl/ppo.py", "020cf0e53305793c8e39f4b68f9ac1ae9099f004")
TRL_PPO = ("huggingface/trl", "trl/experimental/ppo/ppo_trainer.py", "0062ee10a9bc59dbb7ba244f3bbaf2e81f25196f")
TRL_GRPO = ("huggingface/trl", "trl/trainer/grpo_trainer.py", "d2b69d769dab6f77acbfd33252bcd7d22765571b")
TRL_LATER = ("huggingface/trl", "trl/trainer/grpo_trainer.py", "main, read in a derived copy")
VERL = ("verl-project/verl", "verl/trainer/ppo/core_algos.py", "018f23b5f83a13340421349e40ec42530739b23a")
VERL_CRITIC = ("volcengine/verl", "verl/trainer/ppo/core_algos.py", "26b5d6b2bbf0202683e49d9999f9174179ab5af3")
VERL_DEBUG = ("volcengine/verl", "verl/utils/debug/metrics.py", "123d744451bc4ac5072404fd6347a06249597a12")
VERL_CORR = ("volcengine/verl", "verl/trainer/ppo/rollout_corr_helper.py", "e1904109a3a83d7c911baaf8998b9188b4cf7874")
SLIME = ("THUDM/slime", "slime/backends/megatron_utils/loss.py", "00c2d6db0f23a4900be6e80a8eb81eebf9e1ebff")
SLIME_PPO = ("THUDM/slime", "slime/utils/ppo_utils.py", "06787cf5798525d9af068135ade88dc795d75821")
SLIME_TIS = (SLIME[0], SLIME[1], "main, vanilla_tis_function read in a copy")
OPENRLHF = ("OpenRLHF/OpenRLHF", "openrlhf/models/loss.py", "f5b3f08a05fd6cbd9a5b712ed931bbb72c24f2c4")
OPENRLHF_ACTOR = (OPENRLHF[0], "openrlhf/trainer/ray/ppo_actor.py", "c250c21a72176720e11aaf4fedcd6cf853d3df8b")
NEMO = ("NVIDIA-NeMo/RL", "nemo_rl/algorithms/loss_functions.py", "005a098a5fc04317a0ceb792e66a8b8076804618")
TINKER = (
    "thinking-machines-lab/tinker-cookbook",
    "tinker_cookbook/rl/metrics.py",
    "1f656115525ddc7be21d3ade56a35071cd8d406e",
)
PRIME_LOSS = (
    "PrimeIntellect-ai/prime-rl",
    "src/prime_rl/trainer/rl/loss.py",
    "008468c12f3f82fd161d5928b8ff9698dfd77582",
)
PRIME = (PRIME_LOSS[0], "src/prime_rl/trainer/rl/token_export.py", "d2f82fa63a75a6dbb0fe0a4c724e2578c1f850ea")

Row = tuple[str, Over, Callable[[Rows], float] | None, str, str, str, str]
PAIR, TRAINED = "old and rollout", "new and rollout"
LAST = "token mean; only the iteration's last minibatch is logged"
STEPS, STEP, TOKENS = "token mean, then mean over all steps", "token mean of a step", "token mean"
PADDED = "sum over real tokens / (responses x longest response), then mean over all steps"
SEQ, OVER, UNEVEN = (
    "seq_mean_token_mean of a step",
    "mean over responses",
    "responses count alike, whatever their length",
)
CLAMP, SAFE = f"log-ratio clamped to +-{f.LOG_RATIO_LIMIT:g}", f"log-ratio clamped to +-{f.LOG_RATIO_LIMIT:g}"
PROBABILITIES = "probabilities, though its docstring says logprob: small where probabilities are small"


def _keys(framework: str, source: tuple[str, str, str], *rows: Row) -> tuple[Key, ...]:
    return tuple(
        Key(framework, key, source, formula, anchor, reduction, difference, over, value)
        for key, over, value, formula, anchor, reduction, difference in rows
    )


def _ratio_g(x: Rows) -> f.Float64:
    return f.exp(x.n - x.g)


# fmt: off
KEYS: tuple[Key, ...] = (
    *_keys("CleanRL", CLEANRL,
        ("losses/old_approx_kl", "last", lambda x: mean(x.g - x.n), "mean(-log r)", "rollout", LAST,
         "k1 of KL(rollout || new); ours is every step"),
        ("losses/approx_kl", "last", lambda x: mean(_ratio_g(x) - 1.0 - (x.n - x.g)), "mean((r - 1) - log r)",
         "rollout",
         LAST, "k3; no expm1, in float32"),
        ("losses/clipfrac", "steps", f.symmetric(lambda x: mean(np.abs(_ratio_g(x) - 1.0) > x.rule.low)),
         "mean(|r - 1| > clip_coef)", "rollout", "token mean, then mean over all minibatches and epochs",
         "band_out whatever the sign of A, so also where the gradient is kept; NaN if the range is asymmetric, which "
         "CleanRL does not have; in float32 |1.2 - 1| > 0.2"),
        ("losses/entropy", "last", lambda x: mean(x.H), "mean(entropy of the new policy)", "none", LAST,
         "none but the minibatch"),
        ("losses/explained_variance", "rollout", f.explained_variance, "1 - var(returns - values) / var(returns)",
         "none",
         "over the whole rollout", "NaN where returns do not vary, as ours"),
    ),
    *_keys("TRL", TRL_PPO,
        ("policy/approxkl_avg", "steps", lambda x: 0.5 * float(((x.n - x.g) ** 2).sum()) / x.cells,
         "0.5 mean((n - g)^2)",
         "rollout", PADDED, "k2, and padding counts as 0: smaller than the token mean by the share of padding"),
        ("policy/clipfrac_avg", "steps",
         f.symmetric(lambda x: mean(-np.clip(_ratio_g(x), 1 - x.rule.low, 1 + x.rule.high) * x.A > -_ratio_g(x) * x.A)),
         "masked_mean(-clip(r) A > -r A)", "rollout", STEPS,
         "grad_zero without dual clip; NaN if the range is asymmetric, which this trainer does not have"),
        ("val/ratio", "steps", lambda x: 1.0 + float((_ratio_g(x) - 1.0).sum()) / x.cells, "mean(r)", "rollout", PADDED,
         "padding counts as ratio 1"),
        ("val/ratio_var", "all steps", lambda x: 1.0 + float((_ratio_g(x) - 1.0).sum()) / x.cells,
         "var over steps of mean(r)", "rollout", "sample variance of the steps' padded means",
         "not the variance of the ratios: it says next to nothing about their spread"),
        ("objective/kl", "rollout", lambda x: mean(x.sums(x.g - x.ref)), "mean(sum_t(g - ref))", "rollout and ref",
         "seq_mean_token_sum",
         "k1 of KL(policy || reference), unclamped (kl_estimator k1, the default); padding adds 0"),
        ("objective/entropy", "rollout", f.padded_entropy, "mean(sum_t(-g))", "rollout",
         "seq_mean_token_sum, padding included",
         f"minus {f.INVALID_LOGPROB:g} for every padded position: falls as responses get more uneven"),
        ("policy/entropy_avg", "steps", None, "mean(entropy)", "none", "padding included",
         "needs the entropy at padded positions, which no record has"),
        ("val/clipfrac_avg", "steps", None, "masked_mean((v_clip - R)^2 > (v - R)^2)", "none",
         "over real tokens, and one more position of each response shorter than the longest",
         "needs values one position after the end, which no record has"),
    ),
    *_keys("TRL", TRL_GRPO, *(
        (f"clip_ratio/{name}", "step", value, formula, "old", STEP, difference)
        for name, value, formula, difference in (
            ("low_mean", lambda x: mean((x.r < 1 - x.rule.low) & (x.A < 0)), "mean(r < 1 - eps_low and A < 0)",
             "clip_low"),
            ("low_min", lambda x: mean((x.r < 1 - x.rule.low) & (x.A < 0)), "min over processes of low_mean",
             "equal to low_mean: one process"),
            ("high_mean", lambda x: mean((x.r > 1 + x.rule.high) & (x.A > 0)), "mean(r > 1 + eps_high and A > 0)",
             "clip_high"),
            ("high_max", lambda x: mean((x.r > 1 + x.rule.high) & (x.A > 0)), "max over processes of high_mean",
             "equal to high_mean: one process"),
            ("region_mean",
             lambda x: mean(((x.r < 1 - x.rule.low) & (x.A < 0)) | ((x.r > 1 + x.rule.high) & (x.A > 0))),
             "mean(either)", "grad_zero without dual clip"),
        )
    )),
    *_keys("TRL", TRL_LATER,
        ("cispo_clip_ratio", "step", lambda x: mean((x.r > x.bounds.cispo_high) & (x.A > 0)),
         "mean(r > epsilon_high and A > 0)", "old", STEP,
         "epsilon_high is a bound on r itself, 5 by default here; ours is 1 + clip_range_high"),
        ("sampling/sampling_logp_difference/mean", "rollout", lambda x: mean(np.abs(x.p - x.g)), "mean |p - g|", PAIR,
         TOKENS, "nats"),
        ("sampling/sampling_logp_difference/max", "rollout", lambda x: float(np.abs(x.p - x.g).max()), "max |p - g|",
         PAIR, "maximum", "nats"),
        *((f"sampling/importance_sampling_ratio/{name}", "rollout",
           lambda x, reduce=reduce: float(reduce(np.minimum(x.w, x.bounds.cap))), f"{name}(min(exp(p - g), cap))", PAIR,
           "over tokens (token_truncate)",
           "after truncation at cap, 2 by default here: what was cut off cannot be seen")
          for name, reduce in (("min", np.min), ("mean", np.mean), ("max", np.max))),
    ),
    *_keys("verl", VERL,
        ("actor/pg_clipfrac", "steps", lambda x: mean(f.losses(x)[1] > f.losses(x)[0]), "mean(-clip(r) A > -r A)",
         "old",
         STEPS, f"grad_zero without dual clip; {CLAMP}"),
        ("actor/pg_clipfrac_lower", "steps", f.dual_clipped, "mean(max(-r A, -clip(r) A) > -c A and A < 0)", "old",
         STEPS,
         f"dual_zero; c = {f.DUAL_CLIP:g} where the run has no dual clip, since verl always has one"),
        ("actor/ppo_kl", "steps", lambda x: mean(-f.log_ratio(x)), "mean(p - n)", "old", STEPS,
         f"k1 of KL(old || new), any sign; {CLAMP}"),
    ),
    *_keys("verl", VERL_CRITIC,
        ("critic/vf_clipfrac", "value steps", f.value_clipped, "mean((v_clip - R)^2 > (v - R)^2)", "none", STEPS,
         "vf_grad_zero; v_clip = clip(v, v_old - eps, v_old + eps); NaN where the run clips no values"),
    ),
    *_keys("verl", VERL_DEBUG,
        ("training/rollout_probs_diff_max", "rollout", lambda x: float(np.abs(f.exp(x.p) - f.exp(x.g)).max()),
         "max(|exp(p) - exp(g)|)", PAIR, "over tokens", PROBABILITIES),
        ("training/rollout_probs_diff_mean", "rollout", lambda x: mean(np.abs(f.exp(x.p) - f.exp(x.g))),
         "mean(|exp(p) - exp(g)|)", PAIR, "over tokens", PROBABILITIES),
        ("training/rollout_probs_diff_std", "rollout",
         lambda x: f._std(np.abs(f.exp(x.p) - f.exp(x.g))) if len(x.p) > 1 else float("nan"), "std(|exp(p) - exp(g)|)",
         PAIR, "over tokens; sample standard deviation", PROBABILITIES),
        ("training/rollout_actor_probs_pearson_corr", "rollout", f.correlation,
         "Pearson correlation of exp(p) and exp(g)",
         PAIR, "over tokens", "probabilities, dominated by tokens near 0 and 1; NaN where one does not vary"),
    ),
    *_keys("verl", VERL_CORR, *(
        (f"rollout_corr/{name}", "rollout", value, formula, PAIR, reduction, difference)
        for name, value, formula, reduction, difference in (
            ("kl", lambda x: mean(x.g - x.p), "mean(g - p)", TOKENS, "k1 of KL(rollout || old), any sign"),
            ("k3_kl", lambda x: mean(x.w - (x.p - x.g) - 1.0), "mean(exp(x) - x - 1), x = p - g", TOKENS,
             "k3; no expm1: in float32 noise for small x"),
            ("training_ppl", lambda x: mean(f.exp(-x.by_response(x.p))), "mean(exp(-mean_t p))", OVER,
             "mean of perplexities, not exp of the mean"),
            ("training_log_ppl", lambda x: mean(-x.by_response(x.p)), "mean(-mean_t p)", "seq_mean_token_mean",
             "not the token mean"),
            ("rollout_ppl", lambda x: mean(f.exp(-x.by_response(x.g))), "mean(exp(-mean_t g))", OVER,
             "as training_ppl"),
            ("rollout_log_ppl", lambda x: mean(-x.by_response(x.g)), "mean(-mean_t g)", "seq_mean_token_mean",
             "as training_log_ppl"),
            ("log_ppl_diff", lambda x: mean(f.seq_difference(x)), "mean(mean_t g - mean_t p)", "seq_mean_token_mean",
             "k1 per response, not token mean"),
            ("log_ppl_abs_diff", lambda x: mean(np.abs(f.seq_difference(x))), "mean |mean_t g - mean_t p|", OVER,
             "errors cancel within a response"),
            ("log_ppl_diff_max", lambda x: float(f.seq_difference(x).max()), "max(mean_t g - mean_t p)",
             "maximum over responses", ""),
            ("log_ppl_diff_min", lambda x: float(f.seq_difference(x).min()), "min(mean_t g - mean_t p)",
             "minimum over responses", ""),
            ("ppl_ratio", lambda x: mean(f.exp(f.seq_difference(x))), "mean(exp(mean_t g - mean_t p))", OVER,
             "inverse geometric-mean ratio"),
            ("chi2_token", lambda x: mean(f.corr_weights(x) ** 2) - 1.0, "mean(w^2) - 1, w = exp(p - g)", TOKENS,
             f"may be negative in a sample; {SAFE}"),
            ("chi2_seq", lambda x: mean(f.exp(2.0 * f.safe(x.sums(x.p - x.g)))) - 1.0, "mean(exp(2 sum_t(p - g))) - 1",
             OVER, f"may be negative; sum {SAFE}"),
            ("rollout_is_mean", lambda x: mean(f.corr_weights(x)), "mean(w)", TOKENS, f"before truncation; {SAFE}"),
            ("rollout_is_max", lambda x: float(f.corr_weights(x).max()), "max(w)", "over tokens", SAFE),
            ("rollout_is_min", lambda x: float(f.corr_weights(x).min()), "min(w)", "over tokens", SAFE),
            ("rollout_is_ratio_fraction_high", lambda x: mean(f.corr_weights(x) > x.bounds.threshold), "mean(w > C)",
             TOKENS, ""),
            ("rollout_is_ratio_fraction_low", lambda x: mean(f.corr_weights(x) < 1.0 / x.bounds.threshold),
             "mean(w < 1/C)", TOKENS, ""),
            ("rollout_is_std", f.clamped_spread, "std of clip(w, 1/C, C)", "population, over tokens",
             "of clamped weights: too small"),
            ("rollout_is_eff_sample_size", f.effective_size, "1 / mean((v / (mean v + 1e-8))^2), v = clip(w, 1/C, C)",
             "over tokens", "our ess_tok formula on clamped weights: optimistic"),
            ("rollout_is_batch_norm_factor", lambda x: mean(np.minimum(f.corr_weights(x), x.bounds.threshold)),
             "mean(min(w, C))", TOKENS, "the weights are divided by it"),
            ("rollout_rs_token_k1_masked_fraction", lambda x: mean(f.outside(x)),
             "mean(-log w < log(1/C) or -log w > log C)", TOKENS,
             f"bounds on -log w, so one-sided bounds are inverted; {SAFE}"),
            ("rollout_is_seq_mean", lambda x: mean(f.seq_weights(x)), "mean over responses of mean_t w",
             "seq_mean_token_mean", "arithmetic, not product"),
            ("rollout_is_seq_std", lambda x: f._std(f.seq_weights(x)), "sample std over responses of mean_t w",
             "over responses", "0 with one response"),
            ("rollout_is_seq_max", lambda x: float(f.seq_weights(x).max()), "max of mean_t w", "over responses", ""),
            ("rollout_is_seq_min", lambda x: float(f.seq_weights(x).min()), "min of mean_t w", "over responses", ""),
            ("rollout_is_seq_max_deviation", lambda x: float(np.abs(f.seq_weights(x) - 1.0).max()),
             "max |mean_t w - 1|",
             "over responses", ""),
            ("rollout_is_seq_fraction_high", lambda x: mean(f.seq_weights(x) > x.bounds.threshold),
             "mean(mean_t w > C)",
             "over responses", ""),
            ("rollout_is_seq_fraction_low", lambda x: mean(f.seq_weights(x) < 1.0 / x.bounds.threshold),
             "mean(mean_t w < 1/C)", "over responses", ""),
        )
    )),
    *_keys("slime", SLIME_PPO,
        ("train/pg_clipfrac", "step", lambda x: seq_mean(x, -x.clipped * x.A > -x.r * x.A), "mean(-clip(r) A > -r A)",
         "old", SEQ, f"grad_zero; {UNEVEN}"),
    ),
    *_keys("slime", SLIME,
        ("train/ppo_kl", "step", lambda x: seq_mean(x, x.p - x.n), "mean(p - n)", "old", SEQ,
         f"k1, unclamped, any sign; {UNEVEN}"),
        ("train/ois", "step", lambda x: seq_mean(x, x.r), "mean(exp(n - p))", "old", SEQ, f"mean ratio; {UNEVEN}"),
        ("train/entropy_loss", "step", lambda x: seq_mean(x, x.H), "mean(entropy of the new policy)", "none", SEQ,
         UNEVEN),
        ("train/train_rollout_logprob_abs_diff", "step", lambda x: seq_mean(x, np.abs(x.p - x.g)), "mean |p - g|", PAIR,
         SEQ, f"nats; {UNEVEN}"),
        ("train/value_clipfrac", "value steps", f.value_outside, "mean(|v - v_old| > value_clip)", "none",
         "seq_mean_token_mean of a step, mean over all steps", "vf_band_out, so also where the gradient is kept"),
    ),
    *_keys("slime", SLIME_TIS,
        ("train/tis", "step", lambda x: seq_mean(x, x.w), "mean(exp(p - g))", PAIR, SEQ,
         f"before truncation; {UNEVEN}"),
        ("train/tis_abs", "step", lambda x: seq_mean(x, np.abs(x.w - 1.0)), "mean |exp(p - g) - 1|", PAIR, SEQ,
         f"twice TV; {UNEVEN}"),
        ("train/tis_clipfrac", "step",
         lambda x: seq_mean(x, np.clip(x.w, x.bounds.tis_low, x.bounds.tis_high) != x.w),
         "mean(clip(w, tis_clip_low, tis_clip) != w), w = exp(p - g)", PAIR, SEQ,
         f"bounds 0 and 2 by default here; {UNEVEN}"),
    ),
    *_keys("OpenRLHF", OPENRLHF,
        ("ppo_clip_ratio", "steps", lambda x: mean(x.clipped * x.A < x.r * x.A), "mean(clip(r) A < r A)", "old", STEPS,
         "grad_zero without dual clip, also with one"),
        ("ppo_kl", "steps", lambda x: mean(x.p - x.n), "mean(p - n)", "old", STEPS, "k1 of KL(old || new), any sign"),
    ),
    *_keys("OpenRLHF", OPENRLHF_ACTOR,
        ("vllm_kl", "steps", lambda x: mean(x.g - x.p), "mean(g - p)", PAIR, STEPS,
         "k1 of KL(rollout || old); logged only with the importance correction; formula read in a derived copy"),
        ("entropy_loss", "steps", lambda x: mean(x.H), "mean(entropy of the new policy)", "none", STEPS, "none"),
    ),
    *_keys("NeMo-RL", NEMO,
        ("probs_ratio", "step", lambda x: f.nemo_mean(x.r), "mean(r)", "old", STEP, "none but 1e-8 on the count"),
        ("probs_ratio_clamped", "step", lambda x: f.nemo_mean(x.clipped), "mean(clip(r))", "old", STEP,
         "instead of a clip fraction"),
        ("probs_ratio_min", "step", lambda x: float(x.r.min()), "min(r)", "old", "over the tokens of a step", "none"),
        ("probs_ratio_max", "step", lambda x: float(x.r.max()), "max(r)", "old", "over the tokens of a step", "none"),
        ("probs_ratio_clamped_min", "step", lambda x: float(x.clipped.min()), "min(clip(r))", "old",
         "over the tokens of a step", "none"),
        ("probs_ratio_clamped_max", "step", lambda x: float(x.clipped.max()), "max(clip(r))", "old",
         "over the tokens of a step", "none"),
        ("token_mult_prob_error", "step", lambda x: f.nemo_mean(f.exp(np.abs(x.p - x.g))), "mean(exp(|g - p|))", PAIR,
         STEP,
         "our mean exp(|delta|)"),
        ("gen_kl_error", "step", lambda x: f.nemo_mean(x.w - 1.0 - (x.p - x.g)), "mean(exp(x) - 1 - x), x = p - g",
         PAIR,
         STEP, "k3 of KL(rollout || old)"),
        ("policy_kl_error", "step", lambda x: f.nemo_mean(f.exp(x.g - x.p) - 1.0 + (x.p - x.g)),
         "mean(exp(-x) - 1 + x), x = p - g", PAIR, STEP,
         "called KL(train || generation), but its tokens are the sampler's: it estimates chi2(g || p) - KL(g || p)"),
        ("js_divergence_error", "step", f.mixture, "mean of k3 to the mixture, both halves on the sampled token", PAIR,
         STEP, "not the Jensen-Shannon divergence: both terms use the sampler's tokens"),
        ("sampling_importance_ratio", "step", f.finite_weights, "mean(exp(p - g))", PAIR, STEP,
         "non-finite weights become 0"),
        ("approx_entropy", "step", lambda x: -f.nemo_mean(_ratio_g(x) * x.n), "-mean(exp(n - g) n)", TRAINED, STEP,
         "importance-sampled from sampled tokens; ours is over the vocabulary"),
    ),
    *_keys("tinker-cookbook", TINKER, *(
        (f"optim/{name}", "epoch", value, formula, anchor, "token mean over all minibatches of a pass", difference)
        for name, value, formula, anchor, difference in (
            ("kl_sample_train_v1", lambda x: mean(x.g - x.n), "mean(g - n)", TRAINED,
             "k1; mismatch and the movement within the pass together, not mismatch alone"),
            ("kl_sample_train_v2", lambda x: 0.5 * mean((x.g - x.n) ** 2), "0.5 mean((g - n)^2)", TRAINED, "k2; as v1"),
            ("entropy", lambda x: -mean(x.g), "-mean(g)", "rollout",
             "from sampled tokens; ours is over the vocabulary"),
        )
    )),
    *_keys("prime-rl", PRIME_LOSS,
        ("mismatch_kl", "step", lambda x: mean(_ratio_g(x) - (x.n - x.g) - 1.0), "mean(exp(x) - x - 1), x = n - g",
         TRAINED,
         STEP, "k3 of KL(rollout || new): after the first step it includes the update's movement"),
    ),
    *_keys("prime-rl", PRIME,
        ("importance_ratio", "step", lambda x: mean(_ratio_g(x)), "mean(exp(n - g))", TRAINED, STEP, "none"),
        ("prob_delta", "step", lambda x: mean(f.delta(x)), "mean(exp(n) - exp(g))", TRAINED, STEP,
         "signed, so positive and negative cancel"),
        ("is_masked", "step", f.masked, "mean(prob_delta > high if A > 0 else prob_delta < -low)", TRAINED, STEP,
         "a bound on probabilities, 0.2 each by default, no ratio; with A = 0 the lower one counts here but not below"),
        ("is_masked_high", "step", lambda x: mean((x.A > 0) & (f.delta(x) > x.bounds.mask_high)),
         "mean(A > 0 and prob_delta > high)", TRAINED, STEP, "as is_masked"),
        ("is_masked_low", "step", lambda x: mean((x.A < 0) & (f.delta(x) < -x.bounds.mask_low)),
         "mean(A < 0 and prob_delta < -low)", TRAINED, STEP, "as is_masked"),
    ),
)
# fmt: on
