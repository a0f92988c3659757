"""The variants of each cause of wrong log-probs, and the numbers that each variant predicts.

A log-prob is computed in stages, and a variant replaces one stage:

    weights, input -> logits -> distribution (temperature, penalties, cuts) -> quantity (whose log-prob) -> unit (what
    is recorded)

A prediction is float64 [n] for each response. Some variants have a parameter: `candidates` proposes values from the
numbers, and with `refine` the best value is improved by least squares. `search` decides by the size of the remaining
error which variant is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.testing.audit.measure import FORMATS, Format
from ppo_repro.testing.audit.ways import Fed
from ppo_repro.testing.causes import CAUSES, Cause

VARIED = 6  # numbers above a floor, without which it would explain any constant
HEAD = 1024  # tokens that top-p is looked for in, before all are sorted
Stage = Literal["weights", "input", "distribution", "quantity", "unit"]
Rounding = Literal["", "computed", "weights", "part", "logits"]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of the stack, and the definition of each side's log-probs; with "auto" the audit chooses it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    sampler_logprobs: str = "auto"  # or one of DEFINITIONS
    trainer_logprobs: str = "auto"
    is_temperature_given: bool = True

    @property
    def is_cut(self) -> bool:
        """Return whether an option beside the temperature changes the distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class Numbers:
    """Recorded and right log-probs of one response of n tokens: float64 [n] in nats, bool [n]."""

    recorded: Tensor
    usable: Tensor  # finite, and judged
    counts: Tensor
    reference: Tensor  # the log-probs of the model as they should be


@dataclass(frozen=True)
class Row:
    """Logits of k neighbouring tokens of one response, and the recorded numbers of the response."""

    logits: Tensor  # [k, V]
    targets: Tensor  # [k]
    prompt: tuple[int, ...]  # the ids before the response
    before: tuple[int, ...]  # the response's ids before the first target
    numbers: Numbers

    @property
    def here(self) -> slice:
        """Return the positions of the k tokens in the response."""
        return slice(len(self.before), len(self.before) + len(self.targets))

    @property
    def wanted(self) -> Tensor:
        """Return the recorded numbers [k] of the tokens."""
        return self.numbers.recorded[self.here]

    @property
    def usable(self) -> Tensor:
        """Return which of the k tokens are judged, bool [k]."""
        return self.numbers.usable[self.here]

    @cached_property
    def seen(self) -> Tensor:
        """Count how often each token occurs before each target, in prompt and response, int32 [k, V]."""
        return self.seen_in_response + self._counted(self.prompt)

    @cached_property
    def seen_in_response(self) -> Tensor:
        """Count how often each token occurs before each target in the response, int32 [k, V]."""
        counts = torch.zeros_like(self.logits, dtype=torch.int32)
        counts[range(1, len(counts)), self.targets[:-1]] = 1
        return counts.cumsum(0, dtype=torch.int32) + self._counted(self.before)

    def _counted(self, ids: tuple[int, ...]) -> Tensor:
        on = torch.tensor(ids, dtype=torch.long, device=self.logits.device)
        return torch.bincount(on, minlength=self.logits.shape[-1]).int()


# of the row's logits [k, V]: logits whose softmax is the distribution; of its log-probs [k, V]: the quantity [k]; of
# the quantity of the whole response [n], NaN where it is not known: what is recorded [n]. The number is the parameter
Change = Callable[[Row, Sampling, Tensor, float], Tensor]
Candidates = Callable[[Sequence[Row], Sampling], Sequence[float]]


@dataclass(frozen=True)
class Variant:
    """One cause: in one stage, what is computed instead, what that presumes, and how it is said.

    `words` may contain {x}, the parameter, and {given}, the user's temperature.
    """

    words: str
    stage: Stage
    cause: Cause
    change: Change | None = None  # of a distribution, a quantity or a unit
    make: Callable[[], PreTrainedModel] | None = None  # weights: the model that computes the logits
    passes: Sequence[Sequence[Fed]] = ()  # input: the forward passes of each response
    candidates: Candidates | None = None
    refine: bool = False
    is_temperature: bool = False  # the parameter is what all logits are divided by
    presumes: Callable[[Sampling], bool] = lambda sampling: True
    in_pairs: int = 0  # so many of its candidates are tried together with another cause
    rounding: Rounding = ""  # what is rounded to `format`
    format: Format | None = None
    count: int = 1  # of changes that the cause consists of
    option_advice: str = ""  # of an option of the model's architecture, else the advice of the cause

    @property
    def advice(self) -> str:
        """Return what to do about the cause."""
        return self.option_advice or CAUSES[self.cause].mend

    @property
    def deviations(self) -> float:
        """Return the number of changes; a fitted parameter counts half a change more."""
        return self.count + 0.5 * (self.candidates is not None)


# distributions


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


def tempered(row: Row, s: Sampling, logits: Tensor, x: float = 0.0) -> Tensor:
    """Return logits / temperature."""
    return logits / s.temperature


def raw(row: Row, s: Sampling, logits: Tensor, x: float = 0.0) -> Tensor:
    """Return the logits, whose softmax is the model's distribution at temperature 1."""
    return logits


def _processed(first: Collection[str] = (), is_cut_first: bool = False) -> Change:
    """Return the function that applies penalty, temperature and cuts to logits; if `is_cut_first`, cuts come first."""

    def change(row: Row, s: Sampling, logits: Tensor, x: float) -> Tensor:
        if s.repetition_penalty != 1.0:
            logits = penalised(logits, row.seen, s.repetition_penalty)
        cuts = s.top_k, s.top_p, s.min_p, first
        return cut(logits, *cuts) / s.temperature if is_cut_first else cut(logits / s.temperature, *cuts)

    return change


def _has_both(s: Sampling) -> bool:
    """Return whether top-p may count only the tokens of top-k."""
    return s.top_k > 0 and s.top_p < 1.0


def _is_last(s: Sampling) -> bool:
    """Return whether it matters that the temperature comes after the cuts."""
    return _is_tempered(s) and (s.top_p < 1.0 or s.min_p > 0.0)


@dataclass(frozen=True)
class Definition:
    """A distribution that log-probs may be of."""

    change: Change
    differs: Callable[[Sampling], bool]  # with these settings from those before it
    order: str | None = None  # of the cuts, after PROCESSED, in what engines sample from


PROCESSED = "processed"
_ORDERS = (
    Definition(_processed(), lambda s: s.is_cut, ""),
    Definition(_processed(("top-k",)), _has_both, ", top-p of what top-k leaves (Transformers, vLLM)"),
    Definition(
        _processed(("min-p", "top-k")),
        lambda s: s.min_p > 0.0 and s.top_p < 1.0,
        ", top-p of what min-p and top-k leave (vLLM)",
    ),
    Definition(_processed(is_cut_first=True), _is_last, ", the cuts before the temperature (MLX)"),
    Definition(
        _processed(("top-k",), True),
        lambda s: _has_both(s) and _is_last(s),
        ", top-p of what top-k leaves, before the temperature (llama.cpp)",
    ),
)
DEFINITIONS: dict[str, Definition] = {
    "tempered": Definition(tempered, lambda s: True),
    **{f"{PROCESSED}{definition.order}": definition for definition in _ORDERS},
    "raw": Definition(raw, lambda s: False),  # which only a user can ask for
}


def distinct(sampling: Sampling) -> list[str]:
    """Return the definitions that differ with these settings."""
    return [name for name, definition in DEFINITIONS.items() if definition.differs(sampling)]


def own(row: Row, logits: Tensor) -> Tensor:
    """Return the log-prob of each target [n] in the softmax of logits [n, V]."""
    return logits.gather(-1, row.targets[:, None])[:, 0] - logits.logsumexp(-1)


def _without_token(rows: Sequence[Row], sampling: Sampling) -> Sequence[float]:
    """Find the token q that fits recorded - log p = -log(1 - p_q) best."""
    left, off = [], []
    for row in rows:
        logp = (row.logits / sampling.temperature).log_softmax(-1)
        left.append((-logp[row.usable].exp()).log1p())
        off.append((own(row, logp) - row.wanted)[row.usable])
    return [float((torch.cat(left) - torch.cat(off)[:, None]).abs().nan_to_num(math.inf).sum(0).argmin())]


def _added_zeros(rows: Sequence[Row], sampling: Sampling) -> Sequence[float]:
    """Find the count of extra zero logits that lower every log-prob by log(1 + count / sum exp(logits))."""
    counts = []
    for row in rows:
        scaled = row.logits / sampling.temperature
        counts.append(((own(row, scaled) - row.wanted).expm1() * scaled.logsumexp(-1).exp())[row.usable])
    count = float(torch.cat(counts).median().round())
    return [count] if 1.0 <= count < 1e6 else []


def _added_probability(rows: Sequence[Row], sampling: Sampling) -> Sequence[float]:
    scaled = ((row, own(row, row.logits / sampling.temperature)) for row in rows)
    added = float(torch.cat([(row.wanted.exp() - logp.exp())[row.usable] for row, logp in scaled]).median())
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


def _paired(row: Row, logp: Tensor, token: int, logits: int) -> Tensor:
    """Return at position i the log-prob of target i + `token` by the logits at i + `logits`; NaN outside."""
    index = torch.arange(len(logp), dtype=torch.float64, device=logp.device)
    of_token, of_logits = moved(index, token), moved(index, logits)
    values = logp[of_logits.nan_to_num(0.0).long(), row.targets[of_token.nan_to_num(0.0).long()]]
    return values.masked_fill((of_token + of_logits).isnan(), torch.nan)


def _fixed_tokens(rows: Sequence[Row], sampling: Sampling) -> Sequence[float]:
    row = max(rows, key=lambda r: int(r.usable.sum()))
    logp = (row.logits / sampling.temperature).log_softmax(-1)[row.usable]
    return [float((logp - row.wanted[row.usable][:, None]).abs().mean(0).argmin())]


def _entropy(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)


def _shifts(rows: Sequence[Row], sampling: Sampling) -> Sequence[float]:
    longest = min(max(len(r.numbers.counts) for r in rows) - 1, 64)
    return [float(k) for n in range(1, longest + 1) for k in (n, -n)]


def _floor(rows: Sequence[Row], sampling: Sampling) -> Sequence[float]:
    of_responses = {id(r.numbers): r.numbers for r in rows}.values()  # pieces of one response have the same
    values = torch.cat([n.recorded[n.usable] for n in of_responses])
    low = values.min() if len(values) else torch.tensor(0.0)
    return [float(low)] if int((values == low).sum()) >= 2 and int((values > low).sum()) >= VARIED else []


def _is_tempered(sampling: Sampling) -> bool:
    return sampling.temperature != 1.0


TOP_K = (1, 2, 3, 4, 5, 8, 10, 16, 20, 25, 30, 32, 40, 50, 64, 80, 100, 128, 200, 256, 500, 512, 1000, 1024)
TOP_P = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999)
MIN_P = (0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3)
FACTORS = (0.8, 0.95, 1.05, 1.2, 1.5, 2.0)
TERMS = (-0.5, 0.2, 0.5, 1.0)
STEPS = (1, -1, 2, -2, 3, -3)


def _distribution(
    name: str, cause: Cause, change: Change, presumes: Callable[[Sampling], bool] = lambda s: True
) -> Variant:
    return Variant(name, "distribution", cause, change, presumes=presumes)


def _fitted(name: str, cause: Cause, change: Callable[[Row, float], Tensor], first: Sequence[float]) -> Variant:
    """Return a variant that applies change(row, x) to the logits and divides by the temperature; x is refined."""

    def changed(r: Row, s: Sampling, v: Tensor, x: float) -> Tensor:
        return change(r, x) / s.temperature

    return Variant(name, "distribution", cause, changed, candidates=lambda *_: first, refine=True)


def _cut(option: str, limits: Sequence[float], keep: Callable[[Tensor, float], Tensor]) -> Variant:
    """Return a variant whose softmax has only the tokens that one cut leaves, at the usual limits."""
    name = f"normalised over the tokens that {option} keeps (try --{option} {{x:.4g}})"

    def changed(r: Row, s: Sampling, v: Tensor, x: float) -> Tensor:
        return keep(v / s.temperature, x)

    return Variant(name, "distribution", "truncated_sampling", changed, candidates=lambda *_: limits)


def _quantity(name: str, change: Callable[[Row, Tensor], Tensor]) -> Variant:
    return Variant(name, "quantity", "other_quantity", lambda r, s, logp, x: change(r, logp))


def _unit(name: str, change: Callable[[Tensor], Tensor], cause: Cause = "other_number") -> Variant:
    """Return a variant that applies `change` to the numbers of the tokens that count."""

    def counted(r: Row, s: Sampling, v: Tensor, x: float) -> Tensor:
        found, counts = torch.full_like(v, torch.nan), r.numbers.counts
        found[counts] = change(v[counts])
        return found

    return Variant(name, "unit", cause, counted)


def _least(x: float) -> float:
    return max(x, 1e-3)


VARIANTS: tuple[Variant, ...] = (
    _distribution("temperature 1 instead of {given}", "temperature", raw, _is_tempered),
    _distribution(
        "temperature {given} applied twice", "temperature", lambda r, s, v, x: v / s.temperature**2, _is_tempered
    ),
    _distribution(
        "logits multiplied by the temperature {given}",
        "temperature",
        lambda r, s, v, x: v * s.temperature,
        _is_tempered,
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
        for definition in _ORDERS
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
                s.temperature != 1.0 and s.is_cut and (not first or (s.top_k > 0 and s.top_p < 1.0))
            ),
        )
        for order, first in (("", ()), (", top-p of what top-k leaves", ("top-k",)))
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
    _quantity("log-prob of the likeliest token", lambda row, logp: logp.max(-1).values),
    _quantity("minus the entropy", lambda row, logp: -_entropy(logp)),
    _quantity("the entropy", lambda row, logp: _entropy(logp)),
    _quantity("the logit, not normalised", lambda row, logp: row.logits.gather(-1, row.targets[:, None])[:, 0]),
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
        presumes=_is_tempered,
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
