"""A language small enough to sum over: three tokens, responses of up to three, every conditional from a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

VOCABULARY, END, LONGEST = 3, 0, 3
Response = tuple[int, ...]


def contexts() -> list[Response]:
    """Everything that can stand before a token."""
    return [c for n in range(LONGEST) for c in itertools.product(range(1, VOCABULARY), repeat=n)]


def responses() -> list[Response]:
    """Every response: closed by the end token, or cut off at the greatest length."""
    closed = [(*c, END) for c in contexts()]
    return closed + list(itertools.product(range(1, VOCABULARY), repeat=LONGEST))


CONTEXTS, RESPONSES = contexts(), responses()
ROW = {context: row for row, context in enumerate(CONTEXTS)}


def table(seed: int, spread: float = 1.0) -> Tensor:
    """Logits [contexts, vocabulary] float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(CONTEXTS), VOCABULARY, generator=generator, dtype=torch.float64) * spread


def logprobs(logits: Tensor, response: Response) -> Tensor:
    """log p of each token of a response given what is before it, [T] float64, differentiable."""
    rows = [ROW[response[:t]] for t in range(len(response))]
    return logits.log_softmax(-1)[rows, list(response)]


def expectation(logits: Tensor, value: Callable[[Response], Tensor]) -> Tensor:
    """Sum over all responses of p(y) value(y); differentiable in both."""
    return torch.stack([logprobs(logits, y).sum().exp() * value(y) for y in RESPONSES]).sum()


def sequence_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) over whole responses, nats, from its definition."""
    return expectation(p, lambda y: logprobs(p, y).sum() - logprobs(q, y).sum())


def token_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of the next token in every context, [contexts]."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def visits(p: Tensor) -> Tensor:
    """How probable it is that a response comes through each context, [contexts]."""
    found = []
    for context in CONTEXTS:
        log_p = p.log_softmax(-1)
        steps = [log_p[ROW[context[:t]], token] for t, token in enumerate(context)]
        found.append(torch.stack(steps).sum().exp() if steps else torch.ones((), dtype=torch.float64))
    return torch.stack(found)
