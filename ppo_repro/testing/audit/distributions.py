"""The distributions that log-probs may be of: the model's own, tempered, or after penalties and cuts in each order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_repro.testing.audit.causes.variant import Piece
from ppo_repro.testing.audit.subject import StackSampling

HEAD = 1024  # tokens that top-p is looked for in, before all are sorted
# of a piece and its logits [k, V]: logits whose softmax is the distribution; the number is the parameter of a variant
Processing = Callable[[Piece, StackSampling, Tensor, float], Tensor]


def cut(scaled: Tensor, top_k: int, top_p: float, min_p: float, first: Collection[str] = ()) -> Tensor:
    """Set the logits of tokens that a cut drops to -inf.

    Args:
        scaled: logits / temperature [n, V].
        top_k: number of tokens that stay, 0 for all.
        top_p: probability that stays, 1 for all.
        min_p: tokens stay if p >= min_p times the largest p; 0 for all.
        first: the cuts among "top-k" and "min-p" that come before top-p; top-p then counts only their tokens.

    Returns:
        Logits [n, V].
    """
    limits, vocabulary = dict[str, Tensor](), scaled.shape[-1]
    if top_k > 0:
        limits["top-k"] = scaled.topk(min(top_k, vocabulary)).values[:, -1:]
    if min_p > 0.0:
        limits["min-p"] = scaled.amax(-1, keepdim=True) + math.log(min_p)
    if top_p < 1.0:
        left = scaled
        for name in first:
            left = left.masked_fill(left < limits[name], -math.inf) if name in limits else left
        total, size = left.logsumexp(-1, keepdim=True), min(HEAD, vocabulary)
        while True:
            ranked = left.topk(size).values
            p = (ranked - total).exp()
            count = (p.cumsum(-1) - p <= top_p).sum(-1, keepdim=True).clamp_min(1)
            if size == vocabulary or bool((count < size).all()):
                break
            size = vocabulary
        limits["top-p"] = ranked.gather(-1, count - 1)
    for limit in limits.values():
        scaled = scaled.masked_fill(scaled < limit, -math.inf)
    return scaled


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the logits of tokens with `seen` > 0 by the penalty, or multiply them if below 0 (Keskar et al., 2019)."""
    return torch.where(seen > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def tempered(piece: Piece, s: StackSampling, logits: Tensor, x: float = 0.0) -> Tensor:
    """Return logits / temperature."""
    return logits / s.temperature


def raw(piece: Piece, s: StackSampling, logits: Tensor, x: float = 0.0) -> Tensor:
    """Return the logits, whose softmax is the model's distribution at temperature 1."""
    return logits


def _processed(first: Collection[str] = (), is_cut_first: bool = False) -> Processing:
    """Return the function that applies penalty, temperature and cuts to logits; if `is_cut_first`, cuts come first."""

    def change(piece: Piece, s: StackSampling, logits: Tensor, x: float) -> Tensor:
        if s.repetition_penalty != 1.0:
            logits = penalised(logits, piece.seen, s.repetition_penalty)
        cuts = s.top_k, s.top_p, s.min_p, first
        return cut(logits, *cuts) / s.temperature if is_cut_first else cut(logits / s.temperature, *cuts)

    return change


def is_tempered(sampling: StackSampling) -> bool:
    """Return whether the temperature changes the distribution."""
    return sampling.temperature != 1.0


def has_both(s: StackSampling) -> bool:
    """Return whether top-p may count only the tokens of top-k."""
    return s.top_k > 0 and s.top_p < 1.0


def _is_last(s: StackSampling) -> bool:
    """Return whether it matters that the temperature comes after the cuts."""
    return is_tempered(s) and (s.top_p < 1.0 or s.min_p > 0.0)


@dataclass(frozen=True)
class Definition:
    """A distribution that log-probs may be of."""

    change: Processing
    differs: Callable[[StackSampling], bool]  # with these settings from those before it
    order: str | None = None  # of the cuts, after PROCESSED, in what engines sample from


PROCESSED = "processed"
OF_TOP_K = ", top-p of what top-k leaves"
ORDERS = (
    Definition(_processed(), lambda s: s.is_cut, ""),
    Definition(_processed(("top-k",)), has_both, f"{OF_TOP_K} (Transformers, vLLM)"),
    Definition(
        _processed(("min-p", "top-k")),
        lambda s: s.min_p > 0.0 and s.top_p < 1.0,
        ", top-p of what min-p and top-k leave (vLLM)",
    ),
    Definition(_processed(is_cut_first=True), _is_last, ", the cuts before the temperature (MLX)"),
    Definition(
        _processed(("top-k",), True),
        lambda s: has_both(s) and _is_last(s),
        f"{OF_TOP_K}, before the temperature (llama.cpp)",
    ),
)
DEFINITIONS: dict[str, Definition] = {
    "tempered": Definition(tempered, lambda s: True),
    **{f"{PROCESSED}{definition.order}": definition for definition in ORDERS},
    "raw": Definition(raw, lambda s: False),  # which only a user can ask for
}


def distinct(sampling: StackSampling) -> list[str]:
    """Return the definitions that differ with these settings."""
    return [name for name, definition in DEFINITIONS.items() if definition.differs(sampling)]


def target_logprobs(targets: Tensor, logits: Tensor) -> Tensor:
    """Return the log-prob of each target [n] in the softmax of logits [n, V]."""
    return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
