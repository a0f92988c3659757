"""The causes of a disagreement of sampler and trainer: names, advice, and which column would decide."""

from __future__ import annotations

from typing import Literal

Cause = Literal[
    "none",
    "floating_point_noise",
    "reduced_precision",
    "temperature",
    "truncated_sampling",
    "off_by_one",
    "shuffled",
    "zero_filled",
    "stale_weights",
    "token_bias",
    "dropout",
    "padding_leak",
    "retokenization",
    "other_prompt",
    "forced_eos",
    "non_finite",
    "unknown",
]

ADVICE: dict[Cause, str] = {
    "none": "Every log-prob has the same bits; nothing to do.",
    "floating_point_noise": "Rounding in another order of additions; harmless alone, gone in deterministic numerics.",
    "reduced_precision": "One side computes in 16 bits or another coarse format; use float32 on both sides.",
    "temperature": "The two sides divide logits by different temperatures; use the sampler's in the trainer.",
    "truncated_sampling": "Only one side renormalises over the tokens left by top-k/top-p; keep the sampling mask, or "
    "ask the sampler for raw log-probs.",
    "off_by_one": "One side is shifted by one token; check the shift between logits and labels.",
    "shuffled": "The same log-probs in another order; check that rows are joined by sequence and position.",
    "zero_filled": "Log-probs are exactly 0 where none were recorded; check buffer widths and padding.",
    "stale_weights": "The sampler has older weights than the trainer; sync after every update, or correct for the lag.",
    "token_bias": "One side favours some tokens everywhere; compare last matrices, logit biases and penalties.",
    "dropout": "The trainer does not repeat itself: dropout is on; call eval() before scoring, or set dropout to 0.",
    "padding_leak": "Padded rows differ, others do not; check attention mask and position ids of padded batches.",
    "retokenization": "The trainer scores other token ids than were sampled; pass ids on, never text.",
    "other_prompt": "The trainer has other ids before the response, as a second BOS or chat template; pass ids on.",
    "forced_eos": "Only last tokens differ: an end token replaced a sampled one; mask it from the loss.",
    "non_finite": "Some log-probs are NaN or infinite and the others agree; find out where those come from.",
    "unknown": "No known cause fits; compare the two paths layer by layer with `ppo-repro bisect`.",
}
INPUTS: dict[Cause, str] = {
    "reduced_precision": "steps_since_sync (0 everywhere leaves precision)",
    "temperature": "entropies and prob_sq_sums of the trainer",
    "stale_weights": "steps_since_sync, or iterations with different lags",
    "token_bias": "steps_since_sync (0 everywhere leaves an error of each token)",
    "dropout": "logprobs_b_again, a second pass of the trainer",
    "padding_leak": "pad_length of each row",
    "retokenization": "token_id_b, the ids that the trainer scored",
    "other_prompt": "prompt_differs, whether the ids before the response are others",
    "zero_filled": "log_kept_mass (greedy sampling has log-probs of 0 too)",
    "truncated_sampling": "log_kept_mass",
}
