"""Judge in float64 whether a dump's tokens were drawn from the model's distribution, and which cut explains it if not.

A sampler that draws with top-p 0.9 and reports log-probs of all tokens has right log-probs and wrong draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppo_repro.statistics.draws import CHANCE, NONE, Draws, draws_of
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.distributions import Definition, cut, target_logprobs
from ppo_repro.testing.audit.stack import StackModel, vocabulary
from ppo_repro.testing.dumps import DumpedResponse

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0)  # in units of the given temperature


@dataclass
class Tally:
    """How likely the drawn tokens of a dump are in their distributions, response by response."""

    absent: tuple[int, ...] = ()  # tokens that the dump does not have: it is judged among the others
    logprobs: list[Tensor] = field(default_factory=list)  # log p(token), float64 [k] each
    entropies: list[Tensor] = field(default_factory=list)
    cumulative: list[Tensor] = field(default_factory=list)  # probability of the tokens at least as likely
    ranks: list[Tensor] = field(default_factory=list)  # number of likelier tokens
    shares: list[Tensor] = field(default_factory=list)  # p(token) over the largest p
    owners: list[Tensor] = field(default_factory=list)
    undrawn: Tensor | None = None  # [V] -log of the probability that a token is never drawn; -inf for the drawn tokens

    def add(self, owner: int, logits: Tensor, targets: Tensor, counts: Tensor) -> None:
        """Add k tokens of response `owner`: logits [k, V] of their distributions, ids [k], and which ones count [k]."""
        if not bool(counts.any()):
            return
        log_p = among_others(logits[counts], self.absent).log_softmax(-1)
        p, at = log_p.exp(), targets[counts][:, None]
        mine = log_p.gather(-1, at)
        ids = torch.arange(log_p.shape[-1], device=log_p.device)
        before = (log_p > mine) | ((log_p == mine) & (ids <= at))
        self.logprobs.append(mine[:, 0].cpu())
        self.entropies.append(-(p * log_p.masked_fill(p == 0, 0.0)).sum(-1).cpu())
        self.cumulative.append((p * before).sum(-1).cpu())
        self.ranks.append((before.sum(-1) - 1).cpu())
        self.shares.append((mine[:, 0] - log_p.amax(-1)).exp().cpu())
        self.owners.append(torch.full((len(mine),), owner))
        never = -torch.log1p(-p.clamp(max=1 - 1e-12)).sum(0).cpu()
        self.undrawn = never if self.undrawn is None else self.undrawn + never
        self.undrawn[at[:, 0].cpu()] = -math.inf

    def draws(self) -> Draws:
        """Return the sums of all tokens."""
        if not self.logprobs:
            return NONE
        return draws_of(
            torch.cat(self.logprobs).numpy(),
            torch.cat(self.entropies).numpy(),
            torch.cat(self.owners).numpy(),
            torch.cat(self.cumulative).numpy(),
        )

    def banned(self) -> tuple[str, float]:
        """Return the token that was least likely to be left out, in words, and by how many nats; ("", 0) if none."""
        if self.undrawn is None or not math.isfinite(most := float(self.undrawn.max())):
            return "", 0.0
        return f"a ban of token {int(self.undrawn.argmax())}", most - math.log(len(self.undrawn))

    def is_wrong(self) -> bool:
        """Return whether the tokens were clearly drawn from other distributions."""
        return self.draws().is_wrong or self.banned()[1] >= -math.log(CHANCE)

    def impossible(self) -> int:
        """Return the number of tokens of probability 0."""
        return -self.likelihood()[0]

    def likelihood(self) -> tuple[int, float]:
        """Return minus the number of tokens of probability 0, and the sum of the other log-probs, nats."""
        logprobs = torch.cat(self.logprobs) if self.logprobs else torch.empty(0)
        possible = logprobs > -math.inf
        return int(possible.sum()) - len(logprobs), float(logprobs[possible].sum())


def drawn_from(tallies: Mapping[Definition, Tally]) -> Definition:
    """Return the distribution that makes the drawn tokens likeliest."""
    return max(tallies, key=lambda definition: tallies[definition].likelihood())


def among_others(logits: Tensor, absent: Sequence[int]) -> Tensor:
    """Return logits [k, V] of the distribution that never has some tokens."""
    return logits.index_fill(-1, torch.tensor(absent, dtype=torch.long, device=logits.device), -math.inf)


def absent_ends(stack: StackModel, responses: Sequence[DumpedResponse]) -> tuple[int, ...]:
    """Return the end tokens if no response has one, as in a dump of texts.

    Several responses of one length ended at a limit, so that their end tokens were never drawn; texts of one token did
    not.
    """
    lengths = {len(r.response_ids) for r in responses}
    if len(responses) > 1 and len(lengths) == 1 and lengths != {1}:
        return ()
    model = stack.model
    others = (getattr(config, "eos_token_id", None) for config in (model.config, model.generation_config))
    ends = {
        i
        for ids in (stack.eos_token_id, *others)
        for i in (ids if isinstance(ids, list) else [ids])
        if i is not None and 0 <= i < vocabulary(model)  # a tokenizer may have more
    }
    there = {token for r in responses for token, counts in zip(r.response_ids, r.counts, strict=True) if counts}
    return () if ends & there else tuple(sorted(ends))


def _smallest_cuts(tally: Tally) -> dict[str, tuple[int, float, float]]:
    """Return the cuts (top-k, top-p, min-p) that just leave every drawn token that is possible at all, in words."""
    drawn = torch.cat(tally.logprobs).exp()
    here = drawn > 0
    top_p = float((torch.cat(tally.cumulative) - drawn)[here].max()) + 1e-12
    top_k = int(torch.cat(tally.ranks)[here].max()) + 1
    min_p = float(torch.cat(tally.shares)[here].min()) * (1 - 1e-9)
    return {
        f"top-p {math.ceil(top_p * 1000) / 1000:g}": (0, top_p, 0.0),
        f"top-k {top_k}": (top_k, 1.0, 0.0),
        f"min-p {min_p:.2g}": (0, 1.0, min_p),
    }


class DrawCauses:
    """How much likelier each cause of wrong draws makes the drawn tokens, in nats (`gains`).

    A cause is as strong as the drawn tokens allow: a cut or a grammar leaves each of them.
    """

    def __init__(self, tally: Tally, temperature: float) -> None:
        """Begin with the causes that the tally alone can judge; `add` tokens for the others."""
        assert tally.undrawn is not None
        self.absent, self.temperature = tally.absent, temperature
        self.cuts, self.drawn = _smallest_cuts(tally), tally.undrawn == -math.inf
        count, size = int(self.drawn.sum()), len(self.drawn)
        self.grammar = f"a grammar or bans that leave {count:,} of {size:,} tokens"
        choices = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)  # log of their number
        ban, gain = tally.banned()
        self.gains = {ban: gain} if ban else {}
        self.gains[self.grammar] = -choices if size - count > 1 else -math.inf  # one token is a ban

    def add(self, logits: Tensor, targets: Tensor, counts: Tensor) -> None:
        """Add k tokens: logits [k, V] of their distributions, ids [k], and which ones count [k]."""
        at = torch.isfinite(logits.gather(-1, targets[:, None])[:, 0]) & counts  # none explains a token outside a cut
        row_logits, ids = among_others(logits[at], self.absent), targets[at]
        if not len(ids):
            return
        plain = target_logprobs(ids, row_logits)
        hypotheses = {name: cut(row_logits, k, p, m) for name, (k, p, m) in self.cuts.items()}
        hypotheses[self.grammar] = row_logits.masked_fill(~self.drawn.to(row_logits.device), -math.inf)
        for times in TEMPERATURES:
            hypotheses[f"temperature {times * self.temperature:.3g}"] = row_logits / times
        for name, changed in hypotheses.items():
            self.gains[name] = self.gains.get(name, 0.0) + float((target_logprobs(ids, changed) - plain).sum())

    def words(self) -> str:
        """Return the causes that make the draws much likelier, the best first; "" if none does."""
        top = max(self.gains.values(), default=0.0)
        if top < limits.LIKELIER:
            return ""
        best_first = sorted(self.gains, key=lambda name: -self.gains[name])
        return " or ".join(name for name in best_first if self.gains[name] >= top - limits.AS_LIKELY)
