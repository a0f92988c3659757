"""How far does a reward at the end of a response reach back, in tokens and in characters?"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ppo_repro.errors import UserError


def terminal_weights(lengths: npt.NDArray[np.int64], gamma: float, gae_lambda: float) -> npt.NDArray[np.float64]:
    """w_t = (gamma lambda)^(T - 1 - t), float64 [N]: the GAE advantages of a reward of 1 on the last token with V = 0.

    `lengths` [B] tokens of each response, sum N. Schulman et al., 2016, equation 16. UserError outside [0, 1].
    """
    decay = decay_of(gamma, gae_lambda)
    to_end = np.repeat(np.cumsum(lengths), lengths) - 1 - np.arange(int(lengths.sum()))
    return np.power(decay, to_end.astype(np.float64))


def decay_of(gamma: float, gae_lambda: float) -> float:
    """gamma lambda; UserError where one of them is outside [0, 1]."""
    for name, value in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0.0 <= value <= 1.0:
            raise UserError(f"{name} = {value}: must be from 0 to 1; use the run's own")
    return gamma * gae_lambda


def half_life_tokens(gamma: float, gae_lambda: float) -> float:
    """ln(1/2) / ln(gamma lambda), tokens; infinite where gamma lambda is 1, and 0 where it is 0."""
    decay = decay_of(gamma, gae_lambda)
    if decay in (0.0, 1.0):
        return math.inf if decay else 0.0
    return math.log(0.5) / math.log(decay)


def half_life_chars(gamma: float, gae_lambda: float, tokens_per_char: float) -> float:
    """`half_life_tokens` / tokens_per_char, characters; UserError where that is not above 0."""
    return half_life_tokens(gamma, gae_lambda) / _fertility("tokens_per_char", tokens_per_char)


def char_matched_lambda(gamma: float, gae_lambda: float, tokens_per_char: float, other_tokens_per_char: float) -> float:
    """lambda' with (gamma lambda')^f' = (gamma lambda)^f: the same decay per character under another tokenizer.

    f and f' are tokens per character of the tokenizer with `gae_lambda` and of the other one; gamma stays the same.
    For gamma = 1, lambda' = lambda^(f / f'). UserError where no lambda' from 0 to 1 satisfies this.
    """
    exponent = _fertility("tokens_per_char", tokens_per_char) / _fertility(
        "other_tokens_per_char", other_tokens_per_char
    )
    decay = decay_of(gamma, gae_lambda)
    if gamma == 0.0:
        raise UserError("gamma = 0: lambda has no effect; give a gamma above 0")
    matched = float(decay**exponent / gamma)
    if matched > 1.0:
        raise UserError(
            f"gamma = {gamma}: alone decays faster per character, lambda would have to be {matched:.4g}; raise gamma"
        )
    return matched


def _fertility(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0.0):
        raise UserError(f"{name} = {value}: must be above 0 and finite; count tokens and characters of some text")
    return value
