"""Causes between logits and log-probs: temperature, cuts, penalties, and what else changes the softmax.

Each function returns logits whose softmax is the distribution that a side with the fault takes log-probs of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ppo_repro.testing.advice import CauseName
from ppo_repro.testing.audit.causes.cause import Cause, CauseOf, Change, ChangeBy, Parameter, RecordedChunk, Rounded
from ppo_repro.testing.audit.distributions import OF_TOP_K, PROCESSED, cut, penalised, raw, target_logprobs, tempered
from ppo_repro.testing.audit.measure import FORMATS
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


def _cut_at_temperature_1(
    chunk: RecordedChunk, s: StackSampling, logits: Tensor, first: tuple[str, ...] = ()
) -> Tensor:
    return cut(logits, s.top_k, s.top_p, s.min_p, first)


def _is_tempered_and_cut(s: StackSampling) -> bool:
    return s.is_tempered() and s.is_cut()


def _kept(chunk: RecordedChunk, s: StackSampling, logits: Tensor, x: float, option: str) -> Tensor:
    cuts = {"top-k": (int(x), 1.0, 0.0), "top-p": (0, x, 0.0), "min-p": (0, 1.0, x)}
    return cut(logits / s.temperature, *cuts[option])


# penalties


def _repetition(chunk: RecordedChunk, s: StackSampling, logits: Tensor, x: float) -> Tensor:
    return penalised(chunk.logits, chunk.seen, _least(x)) / s.temperature


def _repetition_in_response(chunk: RecordedChunk, s: StackSampling, logits: Tensor, x: float) -> Tensor:
    return penalised(chunk.logits, chunk.seen_in_response, _least(x)) / s.temperature


def _presence(chunk: RecordedChunk, s: StackSampling, logits: Tensor, x: float) -> Tensor:
    return (chunk.logits - x * (chunk.seen_in_response > 0)) / s.temperature


def _frequency(chunk: RecordedChunk, s: StackSampling, logits: Tensor, x: float) -> Tensor:
    return (chunk.logits - x * chunk.seen_in_response.to(chunk.logits)) / s.temperature


# the logits


def _rounded(chunk: RecordedChunk, s: StackSampling, logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.to(dtype).to(logits) / s.temperature


def _capped(chunk: RecordedChunk, s: StackSampling, logits: Tensor, x: float) -> Tensor:
    return _least(x) * (chunk.logits / _least(x)).tanh() / s.temperature


def _with_zeros(chunk: RecordedChunk, s: StackSampling, logits: Tensor, x: float) -> Tensor:
    return torch.cat([logits / s.temperature, torch.full_like(logits[:, :1], math.log(x))], -1)


def _count_of_zeros(chunks: Sequence[RecordedChunk], sampling: StackSampling) -> Sequence[float]:
    """Find the count of extra zero logits that lower every log-prob by log(1 + count / sum exp(logits))."""
    counts = []
    for chunk in chunks:
        scaled = chunk.logits / sampling.temperature
        off = target_logprobs(chunk.targets, scaled) - chunk.wanted
        counts.append((off.expm1() * scaled.logsumexp(-1).exp())[chunk.usable])
    count = float(torch.cat(counts).median().round())
    return [count] if 1.0 <= count < 1e6 else []


def _without_token(chunk: RecordedChunk, s: StackSampling, logits: Tensor, x: float) -> Tensor:
    return (logits / s.temperature).index_fill(-1, torch.tensor([int(x)], device=logits.device), -math.inf)


def _missing_token(chunks: Sequence[RecordedChunk], sampling: StackSampling) -> Sequence[float]:
    """Find the token q that fits recorded - log p = -log(1 - p_q) best."""
    left, off = [], []
    for chunk in chunks:
        logp = (chunk.logits / sampling.temperature).log_softmax(-1)
        left.append((-logp[chunk.usable].exp()).log1p())
        off.append((target_logprobs(chunk.targets, logp) - chunk.wanted)[chunk.usable])
    return [float((torch.cat(left) - torch.cat(off)[:, None]).abs().nan_to_num(math.inf).sum(0).argmin())]


# the rows


def _row(
    words: str,
    name: CauseName,
    change: Change,
    presumes: Callable[[StackSampling], bool] = lambda sampling: True,
    rounded: Rounded | None = None,
) -> CauseOf[Change]:
    return CauseOf(words, "distribution", name, change, presumes=presumes, rounded=rounded)


def _row_by(words: str, name: CauseName, change: ChangeBy, parameter: Parameter) -> CauseOf[ChangeBy]:
    return CauseOf(words, "distribution", name, change, parameter=parameter)


def _kept_by(option: str, values: Sequence[float]) -> CauseOf[ChangeBy]:
    words = f"normalised over the tokens that {option} keeps (try --{option} {{x:.4g}})"
    return _row_by(words, "truncated_sampling", partial(_kept, option=option), Parameter(values))


_TEMPERATURE_1 = _row("temperature 1 instead of {given}", "temperature", raw, presumes=StackSampling.is_tempered)
TEMPERATURE = Parameter(
    (1.0, 0.25, 0.5, 0.7, 1.4, 2.0, 4.0), is_fitted=True, in_pairs=1, is_temperature=True, at_one=_TEMPERATURE_1
)
_OF_ALL_TOKENS = _row(
    "of all tokens, not of the processed distribution", "truncated_sampling", tempered, presumes=StackSampling.is_cut
)
_AT_1 = "temperature 1 and normalised over the tokens that the cuts keep"
DISTRIBUTIONS: tuple[Cause, ...] = (
    _TEMPERATURE_1,
    _row(
        "temperature {given} applied twice",
        "temperature",
        lambda chunk, s, logits: logits / s.temperature**2,
        presumes=StackSampling.is_tempered,
    ),
    _row(
        "logits multiplied by the temperature {given}",
        "temperature",
        lambda chunk, s, logits: logits * s.temperature,
        presumes=StackSampling.is_tempered,
    ),
    _row_by(
        "temperature {x:.4g} instead of {given}",
        "temperature",
        lambda chunk, s, logits, x: logits / _least(x),
        TEMPERATURE,
    ),
    *(
        _row(
            f"of the processed distribution{definition.order}, not of all tokens",
            "truncated_sampling",
            definition.change,
            presumes=definition.differs,
        )
        for definition in PROCESSED
    ),
    _OF_ALL_TOKENS,
    _row(_AT_1, "truncated_sampling", _cut_at_temperature_1, presumes=_is_tempered_and_cut),
    _row(
        f"{_AT_1}{OF_TOP_K}",
        "truncated_sampling",
        partial(_cut_at_temperature_1, first=("top-k",)),
        presumes=lambda s: _is_tempered_and_cut(s) and s.has_top_k_and_p(),
    ),
    _kept_by("top-k", TOP_K),
    _kept_by("top-p", TOP_P),
    _kept_by("min-p", MIN_P),
    _row_by("repetition penalty {x:.4g}", "penalty", _repetition, FACTOR),
    _row_by("repetition penalty {x:.4g} on response tokens alone", "penalty", _repetition_in_response, FACTOR),
    _row_by("presence penalty {x:.4g}", "penalty", _presence, TERM),
    _row_by("frequency penalty {x:.4g}", "penalty", _frequency, TERM),
    *(
        _row(
            f"logits rounded to {name}",
            "coarse_logits",
            partial(_rounded, dtype=dtype),
            rounded=Rounded("logits", name, exact=_OF_ALL_TOKENS),
        )
        for name, dtype in FORMATS.items()
    ),
    _row_by("logits capped by {x:.4g} tanh(logit / {x:.4g})", "logit_cap", _capped, CAP),
    _row_by(
        "normalised over {x:.0f} more tokens with a logit of 0",
        "padded_vocabulary",
        _with_zeros,
        Parameter(propose=_count_of_zeros),
    ),
    _row_by("normalised without token id {x:.0f}", "banned_token", _without_token, Parameter(propose=_missing_token)),
)
