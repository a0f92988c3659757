"""Judge whether tokens were drawn from the distributions whose log-probs are reported. Never imports torch.

Two statistics need nothing but the distribution p of each token:

* the excess, mean of log p(token) + H(p) in nats, is 0 on average for tokens drawn from p. A sampler with a lower
  temperature, or a cut of the unlikely tokens, has a positive excess.
* the level u = P(p) - v p(token) of a token is uniform on (0, 1). P(p) is the probability of the tokens that are at
  least as likely, the token itself included, and v is uniform. A cut takes the levels near 1 away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

# standard errors beyond which a sampler is suspected; its tails are suspected below the same probability
CLEAR = 4.5
CHANCE = math.erfc(CLEAR / math.sqrt(2))
ROUNDED = 1e-3  # share of the tokens
# each k of the tails (1 - 2^-k, 1) in which levels are counted
TAILS = np.arange(1, 15)


def moved_by_rounding(tokens: int) -> float:
    """Return how many of the drawn tokens rounding may move across the end of a cut."""
    return max(1.0, ROUNDED * tokens)


@dataclass(frozen=True)
class Draws:
    """Sums over some sampled tokens. `+` adds the sums of other responses."""

    tokens: int
    excess: float  # sum of log p(token) + H(p), nats
    squares: float  # sum over the responses of the square of their excess
    variance: float  # lower bound of the variance of the excess, given the distributions
    spread: float  # sum over the tokens of the square of their excess
    levels: int  # tokens whose level is known
    in_tails: tuple[int, ...]  # levels above 1 - 2^-k, for each k of TAILS
    highest: float  # largest probability of the tokens that are likelier than a drawn one
    impossible: int  # drawn tokens of probability 0, as outside of a cut

    def __add__(self, other: Draws) -> Draws:
        return Draws(
            tokens=self.tokens + other.tokens,
            excess=self.excess + other.excess,
            squares=self.squares + other.squares,
            variance=self.variance + other.variance,
            spread=self.spread + other.spread,
            levels=self.levels + other.levels,
            in_tails=tuple(map(sum, zip(self.in_tails, other.in_tails, strict=True))),
            highest=max(self.highest, other.highest),
            impossible=self.impossible + other.impossible,
        )

    @property
    def mean(self) -> float:
        """Return the mean excess, nats a token."""
        return self.excess / self.tokens if self.tokens else math.nan

    @property
    def error(self) -> float:
        """Return the standard error of the mean excess, clustered by response, nats."""
        return math.sqrt(max(self.squares, self.variance)) / self.tokens if self.tokens else math.nan

    @property
    def z(self) -> float:
        """Return the mean excess in standard errors; 0 where every token was certain."""
        return self.mean / self.error if self.tokens and self.error else 0.0

    @property
    def tail_probabilities(self) -> tuple[float, float]:
        """Return how likely a right sampler has a tail as empty as the emptiest, and one as full as the fullest.

        The levels of a right sampler are independent, so their number in a tail is binomial. Each probability is
        multiplied by the number of tests.
        """
        from scipy.special import bdtr, bdtrc

        counts = np.array(self.in_tails, dtype=np.float64)
        tests, tails = 2 * len(TAILS), 0.5**TAILS
        empty, full = bdtr(counts, self.levels, tails), np.where(counts > 0, bdtrc(counts - 1, self.levels, tails), 1.0)
        return min(1.0, tests * float(empty.min())), min(1.0, tests * float(full.min()))

    @property
    def is_wrong(self) -> bool:
        """Return whether the tokens were clearly drawn from other distributions."""
        return self.are_impossible or abs(self.z) >= CLEAR or min(self.tail_probabilities) <= CHANCE

    @property
    def are_impossible(self) -> bool:
        """Return whether more tokens have probability 0 than rounding can move across the end of a cut."""
        return self.impossible > moved_by_rounding(self.tokens + self.impossible)

    def sentence(self) -> str:
        """Return one sentence on the draws: what is wrong with them, or what would have been found."""
        if self.are_impossible:
            count = self.tokens + self.impossible
            return f"{self.impossible:,} of {count:,} tokens have probability 0: does the sampler make the given cuts?"
        if not self.tokens:
            return "no sampled token has an entropy, so draws cannot be judged"
        numbers = f"mean log p + entropy {self.mean:+.2g} ± {self.error:.2g} nats"
        if self.is_wrong:
            return f"{self.tokens:,} tokens were not drawn from the log-probs: {numbers}{self._suspicion()}"
        return f"draws agree with log-probs as far as {self.tokens:,} tokens can tell: {numbers}{self._excluded()}"

    def _suspicion(self) -> str:
        missing, too_many = self.tail_probabilities
        if missing <= CHANCE or (too_many > CHANCE and self.z > 0):
            return (
                ", and unlikely tokens are missing: does the sampler have a lower temperature, or a cut that the "
                "log-probs lack (top-p, top-k, min-p, a grammar, a banned token)?"
            )
        return ", and unlikely tokens are too many: does the sampler have a higher temperature, a penalty, or a ban?"

    def _excluded(self) -> str:
        """Return what the tokens exclude: a token beyond a cut was drawn, so the cut was not made."""
        excluded = []
        if self.levels:
            excluded.append(f"a top-p of {math.floor(self.highest * 1000) / 1000:g} or less")
        if self.spread and (step := CLEAR * self.error * self.tokens / self.spread) < 0.5:
            excluded.append(f"a temperature outside {1 / (1 + step):.2f} to {1 / (1 - step):.2f}")
        return f"; {' or '.join(excluded)} would have been found" if excluded else ""


NONE = Draws(0, 0.0, 0.0, 0.0, 0.0, 0, (0,) * len(TAILS), 0.0, 0)


def draws_of(
    logprobs: npt.NDArray[Any],
    entropies: npt.NDArray[Any],
    sequences: npt.NDArray[Any],
    cumulative_probs: npt.NDArray[Any] | None = None,
    seed: int = 0,
) -> Draws:
    """Measure the draws of n tokens.

    The variance of log p(token) is at least (log p + H)^2 p / (1 - p): the variance between the drawn token and the
    mean of the others. The bound counts where responses alone would show too small an error: a rare token that was not
    drawn leaves no trace.

    Args:
        logprobs: [n] log p(token), nats.
        entropies: [n] H(p), nats.
        sequences: [n] the response of each token.
        cumulative_probs: [n] probability of the tokens at least as likely, the token included; None: unknown.
        seed: of the uniform numbers v.

    Returns:
        The sums. Tokens of probability 0 are counted apart; NaN does not count.
    """
    logp, entropy = np.asarray(logprobs, np.float64), np.asarray(entropies, np.float64)
    impossible = int(np.isneginf(logp).sum())
    usable = np.isfinite(logp) & np.isfinite(entropy)
    if not usable.any():
        return replace(NONE, impossible=impossible)
    logp, entropy = logp[usable], entropy[usable]
    response = np.unique(np.asarray(sequences)[usable], return_inverse=True)[1]
    p, p_of_others = np.exp(logp), -np.expm1(logp)
    excess = np.where(p_of_others > 0, logp + entropy, 0.0)  # a certain token tells nothing
    bound = np.divide(excess**2 * p, p_of_others, out=np.zeros_like(p), where=p_of_others > 0)
    levels, in_tails, highest = 0, NONE.in_tails, 0.0
    if cumulative_probs is not None:
        reached = np.asarray(cumulative_probs, np.float64)[usable]
        v = np.random.default_rng(seed).random(len(reached))
        known = np.isfinite(reached)
        level = (reached - v * p)[known]
        levels, highest = len(level), float(np.max((reached - p)[known], initial=0.0))
        in_tails = tuple(int((level > 1 - 0.5**k).sum()) for k in TAILS)
    return Draws(
        tokens=len(logp),
        excess=float(excess.sum()),
        squares=float((np.bincount(response, excess) ** 2).sum()),
        variance=float(bound.sum()),
        spread=float((excess**2).sum()),
        levels=levels,
        in_tails=in_tails,
        highest=highest,
        impossible=impossible,
    )
