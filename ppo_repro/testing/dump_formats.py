"""The columns of dumps, by the stack that wrote them. Imports no NumPy, for the command line lists the formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import shown

DumpRow = Mapping[str, Any]
# other numbers of each token, and their names in dumps: first ours, then names of stacks
EXTRA = {
    "entropies": ("entropies", "entropy", "entropys"),
    "prob_sq_sums": ("prob_sq_sums", "sum_pi_squared"),
    "cumulative_probs": ("cumulative_probs",),
    "log_kept_mass": ("log_kept_mass",),
    "logprobs_b_again": ("logprobs_b_again",),
    "token_id_b": ("token_id_b",),
    "pad_length": ("pad_length",),
    "steps_since_sync": ("steps_since_sync",),
    "prompt_differs": ("prompt_differs",),
    "advantages": ("advantages",),
}
OF_RESPONSE = ("pad_length", "steps_since_sync", "prompt_differs")  # may be one number for all tokens of a response


@dataclass(frozen=True)
class Names:
    """Columns of a dump, None for no column. Only the log-probs, in nats, must be in every file."""

    sampler: str
    trainer: str
    mask: str | None = None  # 1: the token counts; 0: the token is only context. Without a mask all tokens count
    tokens: str | None = None  # ids of the response, or of the whole sequence if there is no prompt
    prompt: str | None = None
    padding_mask: str | None = None  # 0 for padding of the prompt, or of the whole sequence
    response_length: str | None = None  # number of entries at the end of `tokens` that are the response
    iteration: str = "iteration"
    ahead: tuple[str, ...] = ()  # columns whose entry i is about token i + 1
    all_ahead_with: str | None = None  # in a file with this column all numbers of tokens are ahead, but no ids

    @property
    def has_whole_sequences(self) -> bool:
        """Return whether `tokens` has the prompt too, and no column says where the response begins."""
        return self.prompt is None and self.response_length is None


FORMATS = {
    "ppo_repro": Names("rollout_logprobs", "old_logprobs", "mask", "response_ids", "prompt_ids"),
    "verl": Names("rollout_log_probs", "old_log_probs", "response_mask", "responses", "prompts", "attention_mask"),
    "trl": Names(
        *("sampling_per_token_logps", "old_per_token_logps", "completion_mask", "completion_ids", "prompt_ids"),
        padding_mask="prompt_mask",
    ),
    "slime": Names("rollout_log_probs", "log_probs", "loss_masks", "tokens", response_length="response_lengths"),
    "prime-rl": Names("inference_logprobs", "trainer_logprobs", "loss_mask", "token_ids", iteration="step"),
    "areal": Names(
        *("logprobs", "prox_logp", "loss_mask", "input_ids"),
        padding_mask="attention_mask",
        ahead=("prox_logp",),
        all_ahead_with="advantages",
    ),
}


def names_of(where: str, columns: Iterable[str], form: str | None = None) -> Names:
    """Return the column names of a format, or of the only format that fits. Raises UserError if none or several fit."""
    there = dict.fromkeys(columns)
    if form is not None:
        if form not in FORMATS:
            raise UserError(f"--format or names = {form!r}: must be one of {', '.join(FORMATS)}")
        return FORMATS[form]
    fits = [names for names in FORMATS.values() if {names.sampler, names.trainer} <= there.keys()]
    if len(fits) != 1:
        known = "; ".join(f"{n.sampler} and {n.trainer} ({stack})" for stack, n in FORMATS.items())
        raise UserError(
            f"{where}: must have the two log-probs of one stack, {known}; there are "
            f"{shown(', '.join(map(str, there)))}; say which with --format, or names=ppo_repro.testing.Names(...)"
        )
    return fits[0]


def no_column(where: object, name: str, row: Mapping[Any, Any]) -> UserError:
    """Return the error for a row without a column that it must have."""
    there = shown(", ".join(map(str, row)))
    return UserError(f"{where}: no column {name!r}; there are {there}; choose --format or names=Names(...)")
