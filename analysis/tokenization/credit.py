"""How far does a reward at the end of a response reach back, in tokens and in characters?

GAE gives a reward of 1 on the last of T tokens the weight (gamma lambda)^(T - 1 - t) at token t, where V = 0.
"""

from __future__ import annotations

import math

from ppo_repro.errors import UserError


def half_life_tokens(gamma: float, gae_lambda: float) -> float:
    """ln(1/2) / ln(gamma lambda), tokens; infinite where gamma lambda is 1, and 0 where it is 0."""
    decay = gamma * gae_lambda
    if decay in (0.0, 1.0):
        return math.inf if decay else 0.0
    return math.log(0.5) / math.log(decay)


def char_matched_lambda(gamma: float, gae_lambda: float, tokens_per_char: float, other_tokens_per_char: float) -> float:
    """lambda' with (gamma lambda')^f' = (gamma lambda)^f: the same decay per character under another tokenizer.

    f and f' are tokens per character of the tokenizer with `gae_lambda` and of the other one; gamma stays the same.
    For gamma = 1, lambda' = lambda^(f / f'). UserError where no lambda' from 0 to 1 satisfies this.
    """
    if not (0.0 < gamma <= 1.0 and 0.0 <= gae_lambda <= 1.0 and tokens_per_char > 0.0 and other_tokens_per_char > 0.0):
        raise UserError("gamma must be above 0, lambda 0 to 1, tokens per character above 0; use those of a run")
    matched = float((gamma * gae_lambda) ** (tokens_per_char / other_tokens_per_char) / gamma)
    if matched > 1.0:
        raise UserError(
            f"gamma = {gamma}: alone decays faster per character, lambda would have to be {matched:.4g}; raise gamma"
        )
    return matched
