"""Names of the causes of different log-probs, and the advice about each, for audit and diagnosis. Never imports torch.

A row of `diagnosis.ROWS` tests a cause by the pattern of the differences. A row of `audit/causes/` computes the numbers
that one variant of a cause predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CauseName = Literal[
    "none", "floating_point_noise", "reduced_precision", "temperature", "truncated_sampling", "penalty",
    "logit_cap", "banned_token", "padded_vocabulary", "epsilon_in_log", "coarse_logits", "coarse_weights",
    "coarse_records", "other_architecture", "other_quantity", "other_number", "other_pairs", "off_by_one",
    "shuffled", "zero_filled", "stale_weights", "token_bias", "dropout", "padding_leak", "retokenization",
    "other_prompt", "non_finite", "unknown",
]  # fmt: skip


@dataclass(frozen=True)
class About:
    """Description of a fault and of its remedy."""

    what: str
    mend: str

    @property
    def sentence(self) -> str:
        """Return fault and remedy as one sentence."""
        return f"{self.what}; {self.mend}."


ADVICE: Mapping[CauseName, About] = {
    "none": About("Every log-prob has the same bits", "nothing to do"),
    "floating_point_noise": About(
        "Rounding in another order of additions", "harmless alone, gone in deterministic numerics"
    ),
    "reduced_precision": About("One side records numbers of 16 bits", "compute in float32 on both sides"),
    "temperature": About(
        "The two sides divide logits by different temperatures",
        "divide the logits by the same temperature on both sides, once",
    ),
    "truncated_sampling": About(
        "Only one side renormalises over the tokens left by top-k/top-p",
        "ask the sampler for log-probs of all tokens, or keep the same tokens in the trainer",
    ),
    "penalty": About(
        "Only one side lowers the logits of tokens that were seen before",
        "a penalty changes what is sampled: leave it out, or apply it on both sides",
    ),
    "logit_cap": About(
        "Only one side caps the logits",
        "cap the logits on both sides, as the configuration of the model says (final_logit_softcapping)",
    ),
    "banned_token": About(
        "Only one side bans a token",
        "a banned token, as the end token before a minimum length, changes what is sampled: ban it on both sides",
    ),
    "padded_vocabulary": About(
        "One side normalises over the padding of the vocabulary",
        "leave the padding of the vocabulary out of the softmax",
    ),
    "epsilon_in_log": About(
        "One side adds a constant before the logarithm", "use log_softmax, not log(softmax + epsilon)"
    ),
    "coarse_logits": About("One side rounds the logits to 16 bits", "take the softmax of float32 logits"),
    "coarse_weights": About("One side has weights that were rounded to 16 bits", "send float32 weights"),
    "coarse_records": About("One side stores rounded log-probs", "record them in float32"),
    "other_architecture": About(
        "One side computes the model otherwise", "compute each option of the architecture as config.json says"
    ),
    "other_quantity": About(
        "One side records something else than the sampled token's log-prob",
        "gather the sampled id from the log-softmax",
    ),
    "other_number": About("One side records a function of the log-probs", "record each token's own log-prob, in nats"),
    "other_pairs": About(
        "One side pairs tokens with the logits of other tokens", "check which tokens and logits are paired"
    ),
    "off_by_one": About(
        "One side is shifted by one token", "check the shift between logits and labels, and where the response begins"
    ),
    "shuffled": About("The same log-probs in another order", "check how tokens and log-probs are joined"),
    "zero_filled": About("Log-probs are exactly 0 where none were recorded", "check buffer widths and padding"),
    "stale_weights": About(
        "The sampler has older weights than the trainer", "send the sampler the last weights, or correct for the lag"
    ),
    "token_bias": About("One side favours some tokens everywhere", "compare last matrices, logit biases and penalties"),
    "dropout": About(
        "The trainer does not repeat itself: dropout is on", "call eval() before scoring, or set dropout to 0"
    ),
    "padding_leak": About(
        "Padded rows differ, others do not", "check attention mask and position ids of padded batches"
    ),
    "retokenization": About("The trainer scores other token ids than were sampled", "pass ids on, never text"),
    "other_prompt": About(
        "The trainer has other ids before the response, as a second BOS or chat template",
        "give both sides the same ids, positions and masks",
    ),
    "non_finite": About("Some log-probs are NaN or infinite and the others agree", "find out where those come from"),
    "unknown": About("No cause has this size", "judge each side by `ppo-repro audit`"),
}
