"""Causes of different log-probs in sampler and trainer, for the audit and the diagnosis. Never imports torch.

The diagnosis names a cause from the pattern of the differences. The audit computes the predictions of many variants of
a cause, and gives the advice of this list, or advice of its own for a variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Cause = Literal[
    "none",
    "floating_point_noise",
    "reduced_precision",
    "temperature",
    "truncated_sampling",
    "penalty",
    "other_logits",
    "other_number",
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


@dataclass(frozen=True)
class About:
    """Description of a fault and of its remedy."""

    what: str
    mend: str

    @property
    def advice(self) -> str:
        """Return fault and remedy as one sentence."""
        return f"{self.what}; {self.mend}."


CAUSES: Mapping[Cause, About] = {
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
    "other_logits": About("Only one side changes the logits before the softmax", "apply the same change on both sides"),
    "other_number": About(
        "One side records another number than the token's log-prob", "record each token's own log-prob, in nats"
    ),
    "off_by_one": About(
        "One side is shifted by one token",
        "check the shift between logits and labels, and where the response begins",
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
    "forced_eos": About("An end token replaces the sampled token", "record the ids that were sampled last"),
    "non_finite": About("Some log-probs are NaN or infinite and the others agree", "find out where those come from"),
    "unknown": About("No cause has this size", "judge each side by `ppo-repro audit`"),
}
