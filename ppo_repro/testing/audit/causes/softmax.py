"""Causes between logits and log-probs: temperature, cuts, penalties, and what else changes the softmax.

Each formula returns logits whose softmax is the distribution that a side with the fault takes log-probs of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ppo_repro.testing.advice import CauseName
from ppo_repro.testing.audit.causes.cause import Formula, OtherDistribution, Parameter, Rounded, fixed
from ppo_repro.testing.audit.distributions import (
    OF_TOP_K,
    PROCESSED,
    RAW,
    TEMPERED,
    Chunk,
    Definition,
    cut,
    penalised,
    target_logprobs,
)
from ppo_repro.testing.audit.measure import FORMATS
from ppo_repro.testing.audit.numbers import RecordedChunk
from ppo_repro.testing.audit.stack import StackSampling

FACTOR = Parameter((0.8, 0.95, 1.05, 1.2, 1.5, 2.0), is_fitted=True)
TERM = Parameter((-0.5, 0.2, 0.5, 1.0), is_fitted=True)
CAP = Parameter((5.0, 15.0, 30.0, 50.0), is_fitted=True)
TOP_K = (1, 2, 3, 4, 5, 8, 10, 16, 20, 25, 30, 32, 40, 50, 64, 80, 100, 128, 200, 256, 500, 512, 1000, 1024)
TOP_P = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999)
MIN_P = (0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3)


def _least(x: float) -> float:
    return max(x, 1e-3)


# cuts


def _cut_at_temperature_1(first: tuple[str, ...] = ()) -> Formula:
    return fixed(lambda c, logits: cut(logits, c.sampling.top_k, c.sampling.top_p, c.sampling.min_p, first))


def _is_tempered_and_cut(s: StackSampling) -> bool:
    return s.is_tempered() and s.is_cut()


# penalties


def _repetition(chunk: Chunk, logits: Tensor, x: float) -> Tensor:
    return penalised(logits, chunk.seen, _least(x)) / chunk.sampling.temperature


def _repetition_in_response(chunk: Chunk, logits: Tensor, x: float) -> Tensor:
    return penalised(logits, chunk.seen_in_response, _least(x)) / chunk.sampling.temperature


def _presence(chunk: Chunk, logits: Tensor, x: float) -> Tensor:
    return (logits - x * (chunk.seen_in_response > 0)) / chunk.sampling.temperature


def _frequency(chunk: Chunk, logits: Tensor, x: float) -> Tensor:
    return (logits - x * chunk.seen_in_response.to(logits)) / chunk.sampling.temperature


# the logits


def _rounded_to(dtype: torch.dtype) -> Formula:
    return fixed(lambda c, logits: logits.to(dtype).to(logits) / c.sampling.temperature)


def _capped(chunk: Chunk, logits: Tensor, x: float) -> Tensor:
    return _least(x) * (logits / _least(x)).tanh() / chunk.sampling.temperature


def _with_zeros(chunk: Chunk, logits: Tensor, x: float) -> Tensor:
    return torch.cat([logits / chunk.sampling.temperature, torch.full_like(logits[:, :1], math.log(x))], -1)


def _count_of_zeros(chunks: Sequence[RecordedChunk]) -> Sequence[float]:
    """Find the count of extra zero logits that lower every log-prob by log(1 + count / sum exp(logits))."""
    counts = []
    for one in chunks:
        scaled = one.chunk.logits / one.chunk.sampling.temperature
        off = target_logprobs(one.chunk.targets, scaled) - one.recorded
        counts.append((off.expm1() * scaled.logsumexp(-1).exp())[one.usable])
    count = float(torch.cat(counts).median().round())
    return [count] if 1.0 <= count < 1e6 else []


def _without_token(chunk: Chunk, logits: Tensor, x: float) -> Tensor:
    return (logits / chunk.sampling.temperature).index_fill(-1, torch.tensor([int(x)], device=logits.device), -math.inf)


def _missing_token(chunks: Sequence[RecordedChunk]) -> Sequence[float]:
    """Find the token q that fits recorded - log p = -log(1 - p_q) best."""
    gains, off = [], []
    for one in chunks:
        logp = (one.chunk.logits / one.chunk.sampling.temperature).log_softmax(-1)
        gains.append((-logp[one.usable].exp()).log1p())
        off.append((target_logprobs(one.chunk.targets, logp) - one.recorded)[one.usable])
    return [float((torch.cat(gains) - torch.cat(off)[:, None]).abs().nan_to_num(math.inf).sum(0).argmin())]


# the rows


def _of(words: str, definition: Definition, presumes: Callable[[StackSampling], bool]) -> OtherDistribution:
    """Return the cause that log-probs are of another definition."""
    name: CauseName = "temperature" if definition == RAW else "truncated_sampling"
    formula = fixed(lambda c, logits: definition.logits(c))
    return OtherDistribution(words, name, formula, presumes=presumes, definition=definition)


def _kept(option: str, formula: Formula, values: Sequence[float]) -> OtherDistribution:
    words = f"normalised over the tokens that {option} keeps (try --{option} {{x:.4g}})"
    return OtherDistribution(words, "truncated_sampling", formula, parameter=Parameter(values))


_TEMPERATURE_1 = _of("temperature 1 instead of {given}", RAW, StackSampling.is_tempered)
TEMPERATURE = Parameter((1.0, 0.25, 0.5, 0.7, 1.4, 2.0, 4.0), is_fitted=True, in_pairs=1, temperature_1=_TEMPERATURE_1)
_OF_ALL_TOKENS = _of("of all tokens, not of the processed distribution", TEMPERED, StackSampling.is_processed)
_AT_1 = "temperature 1 and normalised over the tokens that the cuts keep"
DISTRIBUTIONS: tuple[OtherDistribution, ...] = (
    _TEMPERATURE_1,
    OtherDistribution(
        "temperature {given} applied twice",
        "temperature",
        fixed(lambda c, logits: logits / c.sampling.temperature**2),
        presumes=StackSampling.is_tempered,
    ),
    OtherDistribution(
        "logits multiplied by the temperature {given}",
        "temperature",
        fixed(lambda c, logits: logits * c.sampling.temperature),
        presumes=StackSampling.is_tempered,
    ),
    OtherDistribution(
        "temperature {x:.4g} instead of {given}",
        "temperature",
        lambda c, logits, x: logits / _least(x),
        parameter=TEMPERATURE,
    ),
    *(
        _of(f"of the processed distribution{definition.order}, not of all tokens", definition, definition.differs)
        for definition in PROCESSED
    ),
    _OF_ALL_TOKENS,
    OtherDistribution(_AT_1, "truncated_sampling", _cut_at_temperature_1(), presumes=_is_tempered_and_cut),
    OtherDistribution(
        f"{_AT_1}{OF_TOP_K}",
        "truncated_sampling",
        _cut_at_temperature_1(first=("top-k",)),
        presumes=lambda s: _is_tempered_and_cut(s) and s.has_top_k_and_p(),
    ),
    _kept("top-k", lambda c, logits, x: cut(logits / c.sampling.temperature, int(x), 1.0, 0.0), TOP_K),
    _kept("top-p", lambda c, logits, x: cut(logits / c.sampling.temperature, 0, x, 0.0), TOP_P),
    _kept("min-p", lambda c, logits, x: cut(logits / c.sampling.temperature, 0, 1.0, x), MIN_P),
    OtherDistribution("repetition penalty {x:.4g}", "penalty", _repetition, parameter=FACTOR),
    OtherDistribution(
        "repetition penalty {x:.4g} on response tokens alone", "penalty", _repetition_in_response, parameter=FACTOR
    ),
    OtherDistribution("presence penalty {x:.4g}", "penalty", _presence, parameter=TERM),
    OtherDistribution("frequency penalty {x:.4g}", "penalty", _frequency, parameter=TERM),
    *(
        OtherDistribution(
            f"logits rounded to {name}",
            "coarse_logits",
            _rounded_to(dtype),
            rounded=Rounded("logits", name, exact=_OF_ALL_TOKENS),
        )
        for name, dtype in FORMATS.items()
    ),
    OtherDistribution("logits capped by {x:.4g} tanh(logit / {x:.4g})", "logit_cap", _capped, parameter=CAP),
    OtherDistribution(
        "normalised over {x:.0f} more tokens with a logit of 0",
        "padded_vocabulary",
        _with_zeros,
        parameter=Parameter(propose=_count_of_zeros),
    ),
    OtherDistribution(
        "normalised without token id {x:.0f}",
        "banned_token",
        _without_token,
        parameter=Parameter(propose=_missing_token),
    ),
)
