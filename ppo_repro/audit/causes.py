"""What a wrong log-prob may be: one entry for each cause, with the numbers that it predicts.

A log-prob is made in stages, and a cause replaces one of them:

    weights, input -> logits -> distribution (temperature, penalties, cuts) -> quantity (whose log-prob) -> unit (what
    is recorded)

A prediction is float64 [n] for each response. Some causes have a parameter: `candidates` proposes values from the
numbers, and with `refine` the best one is improved by least squares. Whether a cause is named is decided in `judge`,
by size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

VARIED = 6  # numbers above a floor, without which it would explain any constant
HEAD = 1024  # tokens that top-p is looked for in, before all are sorted
Stage = Literal["weights", "input", "distribution", "quantity", "unit"]


@dataclass(frozen=True)
class Sampling:
    """What the stack says it sampled with."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def cuts(self) -> int:
        """How many options beside the temperature change the distribution."""
        return (self.top_p < 1.0) + (self.top_k > 0) + (self.min_p > 0.0) + (self.repetition_penalty != 1.0)


@dataclass(frozen=True)
class Row:
    """What a model said about one response, and what was recorded of it.

    `logits` [m + n, V] float64 predict `targets` [m + n]: some of the prompt's last tokens, then the response's.
    """

    logits: Tensor
    targets: Tensor
    context: tuple[int, ...]  # the ids before the first target
    start: int  # m
    wanted: Tensor  # [n] the recorded numbers
    usable: Tensor  # [n] bool: finite, and judged
    counts: Tensor  # [n] bool
    reference: Tensor  # [n] the log-probs of the model as they should be

    @cached_property
    def seen(self) -> Tensor:
        """How often each token occurs before each target, in prompt and response, [m + n, V]."""
        before = torch.tensor(self.context, dtype=torch.long, device=self.logits.device)
        counts = self._counted(0)
        return counts + torch.bincount(before, minlength=counts.shape[-1]).to(counts)

    @cached_property
    def seen_in_response(self) -> Tensor:
        """How often each token occurs before each target in the response, [m + n, V]."""
        return self._counted(self.start)

    def _counted(self, first: int) -> Tensor:
        counts = torch.zeros_like(self.logits)
        for i in range(first + 1, len(counts)):
            counts[i] = counts[i - 1]
            counts[i, self.targets[i - 1]] += 1
        return counts


Distribution = Callable[[Row, Sampling, float], Tensor]  # logits whose softmax it is
Quantity = Callable[[Row, Tensor, float], Tensor]  # of log-probs [m + n, V]: [m + n]
Unit = Callable[[Row, Tensor, Sampling, float], Tensor]  # of [m + n]: [n]
Candidates = Callable[[Sequence[Row], Sampling], Iterable[float]]


@dataclass(frozen=True)
class Cause:
    """One entry. `name` may hold {x}, the parameter, and {given}, the temperature that was given."""

    name: str
    stage: Stage
    advice: str
    predict: Callable[..., Tensor] | None = None
    candidates: Candidates | None = None
    refine: bool = False
    matters: Callable[[Sampling], bool] = lambda sampling: True
    in_pairs: int = 0  # so many of its candidates are tried together with another cause


# distributions


def cut(scaled: Tensor, top_k: int, top_p: float, min_p: float, in_turn: bool = False) -> Tensor:
    """Scaled logits [n, V], -inf where a cut drops a token. in_turn: top-p of what top-k has left, renormalised."""
    vocabulary, kept, limit = scaled.shape[-1], scaled, scaled.new_full((len(scaled), 1), -math.inf)
    if top_k > 0:
        limit = scaled.topk(min(top_k, vocabulary)).values[:, -1:]
        kept = scaled.masked_fill(scaled < limit, -math.inf) if in_turn else scaled
    if top_p < 1.0:
        total, size = kept.logsumexp(-1, keepdim=True), min(HEAD, vocabulary)
        while True:
            ranked = kept.topk(size).values
            p = (ranked - total).exp()
            count = (p.cumsum(-1) - p <= top_p).sum(-1, keepdim=True).clamp_min(1)
            if size == vocabulary or bool((count < size).all()):
                break
            size = vocabulary
        limit = torch.maximum(limit, ranked.gather(-1, count - 1))
    if min_p > 0.0:
        limit = torch.maximum(limit, scaled.amax(-1, keepdim=True) + math.log(min_p))
    return scaled.masked_fill(scaled < limit, -math.inf)


def penalised(row: Row, penalty: float, response_only: bool = False) -> Tensor:
    """Logits of tokens seen before, divided by the penalty, or multiplied where they are below 0 (Keskar et al.,
    2019)."""
    x, counts = row.logits, row.seen_in_response if response_only else row.seen
    return torch.where(counts > 0, torch.where(x > 0, x / penalty, x * penalty), x)


def tempered(row: Row, sampling: Sampling, x: float = 0.0) -> Tensor:
    """Logits / temperature, over all tokens."""
    return row.logits / sampling.temperature


def processed(row: Row, sampling: Sampling, x: float = 0.0, in_turn: bool = False) -> Tensor:
    """What tokens are sampled from: penalty, temperature, then the cuts."""
    logits = penalised(row, sampling.repetition_penalty) if sampling.repetition_penalty != 1.0 else row.logits
    return cut(logits / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, in_turn)


def raw(row: Row, sampling: Sampling, x: float = 0.0) -> Tensor:
    """The model's own distribution, at temperature 1."""
    return row.logits


DEFINITIONS: dict[str, Distribution] = {
    "tempered": tempered,
    "processed": processed,
    "processed, top-p of what top-k leaves": lambda row, s, x: processed(row, s, x, in_turn=True),
    "raw": raw,
}


def _limits(rows: Sequence[Row], sampling: Sampling, given: Literal["top_k", "top_p", "min_p"]) -> Iterable[float]:
    """Limits under which the recorded numbers are log-probs over the likeliest tokens only.

    recorded - log p = -log(mass that is kept), so the mass of every token must be the sum of the largest probabilities.
    """
    low, high = -math.inf, math.inf
    for row in rows:
        scaled = (row.logits[row.start :] / sampling.temperature).log_softmax(-1)
        mass = (scaled.gather(-1, row.targets[row.start :, None])[:, 0] - row.wanted).exp()
        p = scaled.exp().sort(-1, descending=True).values
        sums = p.cumsum(-1)
        for i in row.usable.nonzero()[:, 0].tolist():
            fits = ((sums[i] - mass[i]).abs() <= 3e-5 * float(mass[i]) + 1e-12).nonzero()[:, 0]
            if not len(fits):
                return
            first, last = int(fits[0]), int(fits[-1])
            tail = float(p[i, last + 1]) if last + 1 < p.shape[-1] else 0.0
            bounds = {
                "top_k": (first + 1, last + 1),
                "top_p": (float(sums[i, first] - p[i, first]), float(sums[i, last])),
                "min_p": (tail / float(p[i, 0]), float(p[i, first] / p[i, 0])),
            }[given]
            low, high = max(low, bounds[0]), min(high, bounds[1])
    if low <= high and math.isfinite(low):
        yield float(_round_between(low, min(high, 1e9)))


def _round_between(low: float, high: float) -> float:
    """The number with the fewest digits in [low, high]."""
    for digits in range(7):
        rounded = round((low + high) / 2, digits)
        if low < rounded < high or low == rounded == high:
            return rounded
    return (low + high) / 2


def _without_token(rows: Sequence[Row], sampling: Sampling) -> Iterable[float]:
    """The token whose probability is what recorded - log p = -log(1 - p of that token) says."""
    left, off = [], []
    for row in rows:
        logp = (row.logits[row.start :] / sampling.temperature).log_softmax(-1)[row.usable]
        left.append((-logp.exp()).log1p())
        off.append(logp.gather(-1, row.targets[row.start :][row.usable][:, None])[:, 0] - row.wanted[row.usable])
    return [float((torch.cat(left) - torch.cat(off)[:, None]).abs().nan_to_num(math.inf).sum(0).argmin())]


def _added_zeros(rows: Sequence[Row], sampling: Sampling) -> Iterable[float]:
    """How many logits of 0 more lower every log-prob by log(1 + count / sum exp(logits))."""
    counts = []
    for row in rows:
        scaled = (row.logits / sampling.temperature)[row.start :]
        counts.append(((own(row, scaled) - row.wanted).expm1() * scaled.logsumexp(-1).exp())[row.usable])
    count = float(torch.cat(counts).median().round())
    return [count] if 1.0 <= count < 1e6 else []


def _added_probability(rows: Sequence[Row], sampling: Sampling) -> Iterable[float]:
    added = torch.cat([
        (row.wanted.exp() - own(row, (row.logits / sampling.temperature)[row.start :]).exp())[row.usable]
        for row in rows
    ])  # fmt: skip
    return [float(added.median())] if float(added.median()) > 0.0 else []


# quantities


def own(row: Row, logits: Tensor) -> Tensor:
    """The log-prob of each target, or of the last ones, of logits whose softmax it is."""
    targets = row.targets[len(row.targets) - len(logits) :]
    return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def _moved(x: Tensor, by: int) -> Tensor:
    """x[i + by] at i, NaN where there is none."""
    moved = torch.full_like(x, torch.nan)
    if by == 0 or abs(by) >= len(x):
        return x if by == 0 else moved
    if by > 0:
        moved[:-by] = x[by:]
    else:
        moved[-by:] = x[:by]
    return moved


def _within(row: Row, x: Tensor, by: int) -> Tensor:
    """x[i + by] at i of the response, NaN where that is not of the response."""
    moved = torch.full((len(x),), torch.nan, dtype=torch.float64, device=x.device)
    moved[row.start :] = _moved(x[row.start :].double(), by)
    return moved


def _of_neighbour(row: Row, logp: Tensor, x: float) -> Tensor:
    targets = _within(row, row.targets, int(x))
    values = logp.gather(-1, targets.nan_to_num(0.0).long()[:, None])[:, 0]
    return values.masked_fill(targets.isnan(), torch.nan)


def _of_other_logits(row: Row, logp: Tensor, x: float) -> Tensor:
    rows = _within(row, torch.arange(len(logp), device=logp.device), int(x))
    values = logp[rows.nan_to_num(0.0).long(), row.targets]
    return values.masked_fill(rows.isnan(), torch.nan)


def _fixed_tokens(rows: Sequence[Row], sampling: Sampling) -> Iterable[float]:
    row = max(rows, key=lambda r: int(r.usable.sum()))
    logp = (row.logits[row.start :] / sampling.temperature).log_softmax(-1)[row.usable]
    return [float((logp - row.wanted[row.usable][:, None]).abs().mean(0).argmin())]


def _logit(row: Row, logp: Tensor, x: float) -> Tensor:
    return row.logits.gather(-1, row.targets[:, None])[:, 0]


# units


def _response(row: Row, x: Tensor) -> Tensor:
    return x[row.start :]


def _counted(row: Row, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`change` of the entries that count, at their places."""
    found = torch.full_like(row.wanted, torch.nan)
    found[row.counts] = change(_response(row, x)[row.counts])
    return found


def _shift_within(row: Row, x: Tensor, sampling: Sampling, by: float) -> Tensor:
    return _moved(_response(row, x), int(by))


def _shift(row: Row, x: Tensor, sampling: Sampling, by: float) -> Tensor:
    n, first = len(row.wanted), row.start + int(by)
    index = torch.arange(first, first + n, device=x.device)
    inside = (index >= 0) & (index < len(x))
    return torch.where(inside, x[index.clamp(0, len(x) - 1)], torch.nan)


def _shifts(rows: Sequence[Row], sampling: Sampling) -> Iterable[float]:
    longest, before = max(len(r.wanted) for r in rows), max(r.start for r in rows)
    steps = range(-min(before + longest - 1, 64), min(longest - 1, 64) + 1)
    return [float(k) for k in sorted(steps, key=abs) if k]


def _floor(rows: Sequence[Row], sampling: Sampling) -> Iterable[float]:
    values = torch.cat([r.wanted[r.usable] for r in rows])
    low = values.min() if len(values) else torch.tensor(0.0)
    return [float(low)] if int((values == low).sum()) >= 2 and int((values > low).sum()) >= VARIED else []


def _packed(row: Row, x: Tensor, sampling: Sampling, unused: float) -> Tensor:
    """The entries that count one after the other, without those between."""
    found = torch.full_like(row.wanted, torch.nan)
    values = _response(row, x)[row.counts]
    found[: len(values)] = values
    return found


def _is_tempered(sampling: Sampling) -> bool:
    return sampling.temperature != 1.0


def _entropy(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)


PAIRING = "check which tokens and logits are paired"
TEMPERATURE = "divide the logits by the same temperature on both sides, once"
SAME_CUTS = "ask the sampler for log-probs of all tokens, or keep the same tokens in the trainer"
PENALTY = "a penalty changes what is sampled: leave it out, or apply it on both sides"
SAMPLED = "gather the sampled id from the log-softmax"
OWN = "record each token's own log-prob, in nats"
CAP = "cap the logits on both sides, as the configuration of the model says (final_logit_softcapping)"
FACTORS = (0.8, 0.95, 1.05, 1.2, 1.5, 2.0)
TERMS = (-0.5, 0.2, 0.5, 1.0)
STEPS = (1, -1, 2, -2, 3, -3)


def _distribution(
    name: str, advice: str, predict: Distribution, matters: Callable[[Sampling], bool] = lambda s: True
) -> Cause:
    return Cause(name, "distribution", advice, predict, matters=matters)


def _fitted(name: str, advice: str, change: Callable[[Row, float], Tensor], first: Sequence[float]) -> Cause:
    """`change` of the logits, before the temperature divides them."""
    return Cause(name, "distribution", advice, lambda r, s, x: change(r, x) / s.temperature, lambda *_: first, True)


def _cuts(name: str, option: Literal["top_k", "top_p", "min_p"]) -> tuple[Cause, Cause]:
    """Log-probs over the tokens of one cut: the one that was given, and another one that fits."""
    none = Sampling()

    def over(r: Row, s: Sampling, limit: float) -> Tensor:
        one = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, option: type(getattr(none, option))(limit)}
        return cut(r.logits / s.temperature, **one)

    words = f"normalised over the tokens that {name} keeps"
    return (
        _distribution(
            words,
            SAME_CUTS,
            lambda r, s, x: over(r, s, getattr(s, option)),
            lambda s: getattr(s, option) != getattr(none, option),
        ),
        Cause(
            f"{words} (try --{name} {{x:.4g}})", "distribution", SAME_CUTS, over,
            lambda rows, s: _limits(rows, s, option),
        ),
    )  # fmt: skip


def _quantity(name: str, predict: Quantity) -> Cause:
    return Cause(name, "quantity", SAMPLED, predict)


def _unit(name: str, change: Callable[[Tensor], Tensor], advice: str = OWN) -> Cause:
    """`change` of the log-probs of the tokens that count, [k]."""
    return Cause(name, "unit", advice, lambda row, v, s, x: _counted(row, v, change))


def _least(x: float) -> float:
    return max(x, 1e-3)


CAUSES: tuple[Cause, ...] = (
    *(
        _distribution(words, TEMPERATURE, predict, _is_tempered)
        for words, predict in (
            ("temperature 1 instead of {given}", raw),
            ("temperature {given} applied twice", lambda r, s, x: r.logits / s.temperature**2),
            ("logits multiplied by the temperature {given}", lambda r, s, x: r.logits * s.temperature),
        )
    ),
    *(cause for option in ("top_k", "top_p", "min_p") for cause in _cuts(option.replace("_", "-"), option)),
    _distribution(
        "normalised over the tokens that the cuts keep of logits not divided by the temperature",
        SAME_CUTS,
        lambda r, s, x: tempered(r, s).masked_fill(cut(r.logits, s.top_k, s.top_p, s.min_p).isinf(), -math.inf),
        lambda s: s.temperature != 1.0 and (s.top_p < 1.0 or s.min_p > 0.0),
    ),
    _distribution("of the processed distribution, not of all tokens", SAME_CUTS, processed, lambda s: s.cuts > 1),
    _distribution("of all tokens, not of the processed distribution", SAME_CUTS, tempered, lambda s: s.cuts > 0),
    _distribution(
        "temperature 1 and normalised over the tokens that the cuts keep",
        SAME_CUTS,
        lambda r, s, x: cut(r.logits, s.top_k, s.top_p, s.min_p),
        lambda s: s.temperature != 1.0 and s.cuts > 0,
    ),
    Cause(
        "temperature {x:.4g} instead of {given}",
        "distribution",
        TEMPERATURE,
        lambda r, s, x: r.logits / _least(x),
        lambda *_: (1.0, 0.25, 0.5, 0.7, 1.4, 2.0, 4.0),
        refine=True,
        in_pairs=1,
    ),
    _fitted("repetition penalty {x:.4g}", PENALTY, lambda r, x: penalised(r, _least(x)), FACTORS),
    _fitted(
        "repetition penalty {x:.4g} on response tokens alone",
        PENALTY,
        lambda r, x: penalised(r, _least(x), response_only=True),
        FACTORS,
    ),
    _fitted("presence penalty {x:.4g}", PENALTY, lambda r, x: r.logits - x * (r.seen_in_response > 0), TERMS),
    _fitted("frequency penalty {x:.4g}", PENALTY, lambda r, x: r.logits - x * r.seen_in_response, TERMS),
    *(
        _distribution(
            f"logits rounded to {name}",
            "take the softmax of float32 logits",
            lambda r, s, x, dtype=dtype: r.logits.to(dtype).to(r.logits) / s.temperature,  # type: ignore[misc]
        )
        for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))
    ),
    _fitted(
        "logits capped by {x:.4g} tanh(logit / {x:.4g})",
        CAP,
        lambda r, x: _least(x) * (r.logits / _least(x)).tanh(),
        (5.0, 15.0, 30.0, 50.0),
    ),
    _fitted(
        "logits without their cap, {x:.4g} atanh(logit / {x:.4g})",
        CAP,
        lambda r, x: _least(x) * (r.logits / _least(x)).clamp(-1 + 1e-9, 1 - 1e-9).atanh(),
        (15.0, 30.0, 50.0),
    ),
    Cause(
        "normalised over {x:.0f} more tokens with a logit of 0",
        "distribution",
        "leave the padding of the vocabulary out of the softmax",
        lambda r, s, x: torch.cat([r.logits / s.temperature, torch.full_like(r.logits[:, :1], math.log(x))], -1),
        _added_zeros,
    ),
    Cause(
        "normalised without token id {x:.0f}",
        "distribution",
        "a banned token, as the end token before a minimum length, changes what is sampled: ban it on both sides",
        lambda r, s, x: (r.logits / s.temperature).index_fill(
            -1, torch.tensor([int(x)], device=r.logits.device), -math.inf
        ),
        _without_token,
    ),
    _quantity("log-prob of the likeliest token", lambda row, logp, x: logp.max(-1).values),
    _quantity("minus the entropy", lambda row, logp, x: -_entropy(logp)),
    _quantity("the entropy", lambda row, logp, x: _entropy(logp)),
    _quantity("the logit, not normalised", _logit),
    Cause(
        "log-prob of token id {x:.0f} at every position",
        "quantity",
        SAMPLED,
        lambda row, logp, x: logp[:, int(x)],
        _fixed_tokens,
    ),
    *(
        Cause(name, "quantity", PAIRING, predict, lambda rows, s: STEPS, in_pairs=2)
        for name, predict in (
            ("log-prob of the token {x:+.0f} places on, by the right logits", _of_neighbour),
            ("log-prob of the right token, by the logits {x:+.0f} places on", _of_other_logits),
        )
    ),
    _unit("in base 2, not in nats", lambda y: y / math.log(2)),
    _unit("in base 10, not in nats", lambda y: y / math.log(10)),
    _unit("minus the log-prob (a loss)", lambda y: -y),
    _unit("the probability, not its logarithm", torch.exp),
    *(
        Cause(
            f"{words} the temperature {{given}} after the softmax", "unit", TEMPERATURE, predict, matters=_is_tempered
        )
        for words, predict in (
            ("divided by", lambda row, v, s, x: _response(row, v) / s.temperature),
            ("multiplied by", lambda row, v, s, x: _response(row, v) * s.temperature),
        )
    ),
    *(
        Cause(
            "each entry is of the token {x:+.0f} places on",
            "unit",
            "check the shift between logits and labels, and where the response begins",
            shift,
            _shifts,
            in_pairs=in_pairs,
        )
        for shift, in_pairs in ((_shift_within, 4), (_shift, 0))  # what is recorded beyond the response may be anything
    ),
    _unit("cumulative sums", lambda y: y.cumsum(0)),
    _unit("sums of the tokens before", lambda y: y.cumsum(0) - y),
    _unit("sums from each token to the end", lambda y: y.flip(0).cumsum(0).flip(0)),
    _unit("running means", lambda y: y.cumsum(0) / torch.arange(1, len(y) + 1, device=y.device)),
    _unit("the sum over the response at every token", lambda y: y.sum().expand_as(y)),
    _unit("the mean over the response at every token", lambda y: y.mean().expand_as(y)),
    _unit("divided by the number of tokens of the response", lambda y: y / len(y)),
    _unit("in the opposite order", lambda y: y.flip(0), "check how tokens and log-probs are joined"),
    Cause(
        "cut off below {x:.4g}",
        "unit",
        OWN,
        lambda row, v, s, x: _response(row, v).clamp(min=x),
        _floor,
        in_pairs=1,
    ),
    Cause(
        "the logarithm of the probability + {x:.3g}",
        "unit",
        "use log_softmax, not log(softmax + epsilon)",
        lambda row, v, s, x: (_response(row, v).exp() + x).log(),
        _added_probability,
        refine=True,
    ),
    Cause("without the entries between turns", "unit", "keep one entry for each token", _packed),
)
