"""Judge in float64 whether a dump's tokens were drawn from the model's distribution, and which cut explains it if not.

A sampler that draws with top-p 0.9 and reports log-probs of all tokens has right log-probs and wrong draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ppo_repro.statistics.draws import CHANCE, NONE, Draws, draws_of
from ppo_repro.testing.audit import limits
from ppo_repro.testing.audit.distributions import Chunk, Definition, cut, target_logprobs
from ppo_repro.testing.audit.stack import StackModel, StackSampling, vocabulary
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

    def left_out(self) -> tuple[int, float]:
        """Return the undrawn token that was likeliest to be drawn, and how unlikely that is, nats; -inf for none."""
        if self.undrawn is None:
            return 0, -math.inf
        return int(self.undrawn.argmax()), float(self.undrawn.max()) - math.log(len(self.undrawn))

    def is_wrong(self) -> bool:
        """Return whether the tokens were clearly drawn from other distributions."""
        return self.draws().is_wrong or self.left_out()[1] >= -math.log(CHANCE)

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


# causes of wrong draws


@dataclass(frozen=True)
class DrawCause:
    """Why tokens were drawn from another distribution than the right one."""

    kind: Literal["order", "cut", "temperature", "ban"]
    words: str
    choices: float = 0.0  # log of the number of such causes: one of many fits the draws by chance


def other_order(definition: Definition) -> DrawCause:
    """Return the cause that the tokens were drawn by the order of cuts of a definition."""
    return DrawCause("order", f"another order of cuts: {definition.words_beside_others}")


Change = Callable[[Tensor], Tensor]  # from the right logits [k, V] to logits of the distribution that a cause has


def draw_causes(
    tally: Tally, definition: Definition, sampling: StackSampling, chunks: Iterable[Chunk]
) -> list[DrawCause]:
    """Return the causes that make the draws of a tally much likelier, the best first.

    A cause is as strong as the drawn tokens allow: a cut or a grammar leaves each of them. `definition` is the right
    distribution of the tokens, which `chunks` have.
    """
    token, gain = tally.left_out()
    changes = _grammar(tally) | _smallest_cuts(tally) | _temperatures(sampling.temperature)
    # how much likelier each cause makes the draws, nats
    gains = {DrawCause("ban", f"a ban of token {token}"): gain} | {cause: -cause.choices for cause in changes}
    for chunk in chunks:
        logits = definition.logits(chunk)
        # no cause explains a token outside a cut
        drawn = chunk.counts[chunk.here] & logits.gather(-1, chunk.targets[:, None])[:, 0].isfinite()
        right, targets = among_others(logits[drawn], tally.absent), chunk.targets[drawn]
        logprobs = target_logprobs(targets, right)
        for cause, change in changes.items():
            gains[cause] += float((target_logprobs(targets, change(right)) - logprobs).sum())
    best_first = sorted(gains, key=lambda cause: -gains[cause])
    best = gains[best_first[0]]
    return [cause for cause in best_first if best >= limits.LIKELIER and gains[cause] >= best - limits.AS_LIKELY]


def _grammar(tally: Tally) -> dict[DrawCause, Change]:
    """Return the ban of all tokens that were never drawn, if these are several."""
    assert tally.undrawn is not None
    is_undrawn = tally.undrawn > -math.inf
    size, undrawn = len(is_undrawn), int(is_undrawn.sum())
    if undrawn < 2:
        return {}
    choices = math.lgamma(size + 1) - math.lgamma(undrawn + 1) - math.lgamma(size - undrawn + 1)
    grammar = DrawCause("ban", f"a grammar or bans that leave {size - undrawn:,} of {size:,} tokens", choices)
    return {grammar: lambda logits: logits.masked_fill(is_undrawn.to(logits.device), -math.inf)}


def _smallest_cuts(tally: Tally) -> dict[DrawCause, Change]:
    """Return the cuts that just leave every drawn token that is possible at all."""
    drawn = torch.cat(tally.logprobs).exp()
    here = drawn > 0
    top_p = float((torch.cat(tally.cumulative) - drawn)[here].max()) + 1e-12
    top_k = int(torch.cat(tally.ranks)[here].max()) + 1
    min_p = float(torch.cat(tally.shares)[here].min()) * (1 - 1e-9)
    return {
        DrawCause("cut", f"top-p {math.ceil(top_p * 1000) / 1000:g}"): lambda logits: cut(logits, 0, top_p, 0.0),
        DrawCause("cut", f"top-k {top_k}"): lambda logits: cut(logits, top_k, 1.0, 0.0),
        DrawCause("cut", f"min-p {min_p:.2g}"): lambda logits: cut(logits, 0, 1.0, min_p),
    }


def _temperatures(given: float) -> dict[DrawCause, Change]:
    return {
        DrawCause("temperature", f"temperature {times * given:.3g}"): partial(torch.div, other=times)
        for times in TEMPERATURES
    }
