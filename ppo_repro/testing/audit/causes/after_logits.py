"""The variants of all that follows the logits, a row of the table for each, and the numbers that each one predicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ppo_repro.testing.audit.causes.variant import RecordedPiece, Replacement, Variant
from ppo_repro.testing.audit.distributions import (
    OF_TOP_K,
    ORDERS,
    cut,
    has_both,
    is_tempered,
    penalised,
    raw,
    target_logprobs,
    tempered,
)
from ppo_repro.testing.audit.rounding import FORMATS
from ppo_repro.testing.audit.subject import StackSampling
from ppo_repro.testing.causes import Cause

VARIED = 6  # numbers above a floor, without which it would explain any constant


def _without_token(pieces: Sequence[RecordedPiece], sampling: StackSampling) -> Sequence[float]:
    """Find the token q that fits recorded - log p = -log(1 - p_q) best."""
    left, off = [], []
    for piece in pieces:
        logp = (piece.logits / sampling.temperature).log_softmax(-1)
        left.append((-logp[piece.usable].exp()).log1p())
        off.append((target_logprobs(piece.targets, logp) - piece.wanted)[piece.usable])
    return [float((torch.cat(left) - torch.cat(off)[:, None]).abs().nan_to_num(math.inf).sum(0).argmin())]


def _added_zeros(pieces: Sequence[RecordedPiece], sampling: StackSampling) -> Sequence[float]:
    """Find the count of extra zero logits that lower every log-prob by log(1 + count / sum exp(logits))."""
    counts = []
    for piece in pieces:
        scaled = piece.logits / sampling.temperature
        off = target_logprobs(piece.targets, scaled) - piece.wanted
        counts.append((off.expm1() * scaled.logsumexp(-1).exp())[piece.usable])
    count = float(torch.cat(counts).median().round())
    return [count] if 1.0 <= count < 1e6 else []


def _added_probability(pieces: Sequence[RecordedPiece], sampling: StackSampling) -> Sequence[float]:
    scaled = ((piece, target_logprobs(piece.targets, piece.logits / sampling.temperature)) for piece in pieces)
    added = float(torch.cat([(piece.wanted.exp() - logp.exp())[piece.usable] for piece, logp in scaled]).median())
    return [added] if added > 0.0 else []


# quantities and units


def moved(x: Tensor, by: int) -> Tensor:
    """Return y with y[i] = x[i + by], NaN if x has no such entry."""
    found = torch.full_like(x, torch.nan)
    if by >= 0:
        found[: max(len(x) - by, 0)] = x[by:]
    else:
        found[-by:] = x[:by]
    return found


def _paired(piece: RecordedPiece, logp: Tensor, token: int, logits: int) -> Tensor:
    """Return at position i the log-prob of target i + `token` by the logits at i + `logits`; NaN outside."""
    index = torch.arange(len(logp), dtype=torch.float64, device=logp.device)
    of_token, of_logits = moved(index, token), moved(index, logits)
    values = logp[of_logits.nan_to_num(0.0).long(), piece.targets[of_token.nan_to_num(0.0).long()]]
    return values.masked_fill((of_token + of_logits).isnan(), torch.nan)


def _fixed_tokens(pieces: Sequence[RecordedPiece], sampling: StackSampling) -> Sequence[float]:
    piece = max(pieces, key=lambda r: int(r.usable.sum()))
    logp = (piece.logits / sampling.temperature).log_softmax(-1)[piece.usable]
    return [float((logp - piece.wanted[piece.usable][:, None]).abs().mean(0).argmin())]


def _entropy(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)


def _shifts(pieces: Sequence[RecordedPiece], sampling: StackSampling) -> Sequence[float]:
    longest = min(max(len(r.numbers.counts) for r in pieces) - 1, 64)
    return [float(k) for n in range(1, longest + 1) for k in (n, -n)]


def _floor(pieces: Sequence[RecordedPiece], sampling: StackSampling) -> Sequence[float]:
    of_responses = {id(r.numbers): r.numbers for r in pieces}.values()  # pieces of one response have the same
    values = torch.cat([n.recorded[n.usable] for n in of_responses])
    low = values.min() if len(values) else torch.tensor(0.0)
    return [float(low)] if int((values == low).sum()) >= 2 and int((values > low).sum()) >= VARIED else []


TOP_K = (1, 2, 3, 4, 5, 8, 10, 16, 20, 25, 30, 32, 40, 50, 64, 80, 100, 128, 200, 256, 500, 512, 1000, 1024)
TOP_P = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999)
MIN_P = (0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3)
FACTORS = (0.8, 0.95, 1.05, 1.2, 1.5, 2.0)
TERMS = (-0.5, 0.2, 0.5, 1.0)
STEPS = (1, -1, 2, -2, 3, -3)


def _distribution(
    name: str, cause: Cause, change: Replacement, presumes: Callable[[StackSampling], bool] = lambda s: True
) -> Variant:
    return Variant(name, "distribution", cause, change, presumes=presumes)


def _fitted(
    name: str, cause: Cause, change: Callable[[RecordedPiece, float], Tensor], first: Sequence[float]
) -> Variant:
    """Return a variant that applies change(piece, x) to the logits and divides by the temperature; x is refined."""

    def changed(r: RecordedPiece, s: StackSampling, v: Tensor, x: float) -> Tensor:
        return change(r, x) / s.temperature

    return Variant(name, "distribution", cause, changed, candidates=lambda *_: first, refine=True)


def _cut(option: str, limits: Sequence[float], keep: Callable[[Tensor, float], Tensor]) -> Variant:
    """Return a variant whose softmax has only the tokens that one cut leaves, at the usual limits."""
    name = f"normalised over the tokens that {option} keeps (try --{option} {{x:.4g}})"

    def changed(r: RecordedPiece, s: StackSampling, v: Tensor, x: float) -> Tensor:
        return keep(v / s.temperature, x)

    return Variant(name, "distribution", "truncated_sampling", changed, candidates=lambda *_: limits)


def _quantity(name: str, change: Callable[[RecordedPiece, Tensor], Tensor]) -> Variant:
    return Variant(name, "quantity", "other_quantity", lambda r, s, logp, x: change(r, logp))


def _unit(name: str, change: Callable[[Tensor], Tensor], cause: Cause = "other_number") -> Variant:
    """Return a variant that applies `change` to the numbers of the tokens that count."""

    def counted(r: RecordedPiece, s: StackSampling, v: Tensor, x: float) -> Tensor:
        found, counts = torch.full_like(v, torch.nan), r.numbers.counts
        found[counts] = change(v[counts])
        return found

    return Variant(name, "unit", cause, counted)


def _least(x: float) -> float:
    return max(x, 1e-3)


VARIANTS: tuple[Variant, ...] = (
    _distribution("temperature 1 instead of {given}", "temperature", raw, is_tempered),
    _distribution(
        "temperature {given} applied twice", "temperature", lambda r, s, v, x: v / s.temperature**2, is_tempered
    ),
    _distribution(
        "logits multiplied by the temperature {given}",
        "temperature",
        lambda r, s, v, x: v * s.temperature,
        is_tempered,
    ),
    Variant(
        "temperature {x:.4g} instead of {given}",
        "distribution",
        "temperature",
        lambda r, s, v, x: v / _least(x),
        candidates=lambda *_: (1.0, 0.25, 0.5, 0.7, 1.4, 2.0, 4.0),
        is_temperature=True,
        refine=True,
        in_pairs=1,
    ),
    *(
        _distribution(
            f"of the processed distribution{definition.order}, not of all tokens",
            "truncated_sampling",
            definition.change,
            definition.differs,
        )
        for definition in ORDERS
    ),
    _distribution(
        "of all tokens, not of the processed distribution", "truncated_sampling", tempered, lambda s: s.is_cut
    ),
    *(
        _distribution(
            f"temperature 1 and normalised over the tokens that the cuts keep{order}",
            "truncated_sampling",
            lambda r, s, v, x, first=first: cut(v, s.top_k, s.top_p, s.min_p, first),  # type: ignore[misc]
            lambda s, first=first: (  # type: ignore[misc]
                is_tempered(s) and s.is_cut and (not first or has_both(s))
            ),
        )
        for order, first in (("", ()), (OF_TOP_K, ("top-k",)))
    ),
    _cut("top-k", TOP_K, lambda scaled, x: cut(scaled, int(x), 1.0, 0.0)),
    _cut("top-p", TOP_P, lambda scaled, x: cut(scaled, 0, x, 0.0)),
    _cut("min-p", MIN_P, lambda scaled, x: cut(scaled, 0, 1.0, x)),
    _fitted("repetition penalty {x:.4g}", "penalty", lambda r, x: penalised(r.logits, r.seen, _least(x)), FACTORS),
    _fitted(
        "repetition penalty {x:.4g} on response tokens alone",
        "penalty",
        lambda r, x: penalised(r.logits, r.seen_in_response, _least(x)),
        FACTORS,
    ),
    _fitted("presence penalty {x:.4g}", "penalty", lambda r, x: r.logits - x * (r.seen_in_response > 0), TERMS),
    _fitted("frequency penalty {x:.4g}", "penalty", lambda r, x: r.logits - x * r.seen_in_response.to(r.logits), TERMS),
    *(
        Variant(
            f"logits rounded to {name}",
            "distribution",
            "coarse_logits",
            lambda r, s, v, x, dtype=dtype: v.to(dtype).to(v) / s.temperature,  # type: ignore[misc]
            rounding="logits",
            format=name,
        )
        for name, dtype in FORMATS.items()
    ),
    _fitted(
        "logits capped by {x:.4g} tanh(logit / {x:.4g})",
        "logit_cap",
        lambda r, x: _least(x) * (r.logits / _least(x)).tanh(),
        (5.0, 15.0, 30.0, 50.0),
    ),
    Variant(
        "normalised over {x:.0f} more tokens with a logit of 0",
        "distribution",
        "padded_vocabulary",
        lambda r, s, v, x: torch.cat([v / s.temperature, torch.full_like(v[:, :1], math.log(x))], -1),
        candidates=_added_zeros,
    ),
    Variant(
        "normalised without token id {x:.0f}",
        "distribution",
        "banned_token",
        lambda r, s, v, x: (v / s.temperature).index_fill(-1, torch.tensor([int(x)], device=v.device), -math.inf),
        candidates=_without_token,
    ),
    _quantity("log-prob of the likeliest token", lambda piece, logp: logp.max(-1).values),
    _quantity("minus the entropy", lambda piece, logp: -_entropy(logp)),
    _quantity("the entropy", lambda piece, logp: _entropy(logp)),
    _quantity("the logit, not normalised", lambda piece, logp: piece.logits.gather(-1, piece.targets[:, None])[:, 0]),
    Variant(
        "log-prob of token id {x:.0f} at every position",
        "quantity",
        "other_quantity",
        lambda r, s, logp, x: logp[:, int(x)],
        candidates=_fixed_tokens,
    ),
    Variant(
        "log-prob of the token {x:+.0f} places on, by the right logits",
        "quantity",
        "other_pairs",
        lambda r, s, logp, x: _paired(r, logp, int(x), 0),
        candidates=lambda *_: STEPS,
        in_pairs=2,
    ),
    Variant(
        "log-prob of the right token, by the logits {x:+.0f} places on",
        "quantity",
        "other_pairs",
        lambda r, s, logp, x: _paired(r, logp, 0, int(x)),
        candidates=lambda *_: STEPS,
        in_pairs=2,
    ),
    _unit("in base 2, not in nats", lambda y: y / math.log(2)),
    _unit("in base 10, not in nats", lambda y: y / math.log(10)),
    _unit("minus the log-prob (a loss)", lambda y: -y),
    _unit("the probability, not its logarithm", torch.exp),
    Variant(
        "divided by the temperature {given} after the softmax",
        "unit",
        "temperature",
        lambda r, s, v, x: v / s.temperature,
        presumes=is_tempered,
    ),
    Variant(
        "each entry is of the token {x:+.0f} places on",
        "unit",
        "off_by_one",
        lambda r, s, v, x: moved(v, int(x)),
        candidates=_shifts,
        in_pairs=4,
    ),
    _unit("cumulative sums", lambda y: y.cumsum(0)),
    _unit("sums from each token to the end", lambda y: y.flip(0).cumsum(0).flip(0)),
    _unit("running means", lambda y: y.cumsum(0) / torch.arange(1, len(y) + 1, device=y.device)),
    _unit("the sum over the response at every token", lambda y: y.sum().expand_as(y)),
    _unit("the mean over the response at every token", lambda y: y.mean().expand_as(y)),
    _unit("divided by the number of tokens of the response", lambda y: y / len(y)),
    _unit("in the opposite order", lambda y: y.flip(0), "shuffled"),
    Variant(
        "cut off below {x:.4g}",
        "unit",
        "other_number",
        lambda r, s, v, x: v.clamp(min=x),
        candidates=_floor,
        in_pairs=1,
    ),
    Variant(
        "the logarithm of the probability + {x:.3g}",
        "unit",
        "epsilon_in_log",
        lambda r, s, v, x: (v.exp() + x).clamp_min(1e-30).log(),
        candidates=_added_probability,
        refine=True,
    ),
)
