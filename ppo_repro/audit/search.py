"""The search for the causes of one wrong side: what each predicts, and whether what it leaves is rounding.

All causes, then all pairs of causes of different stages, are computed on a few tokens; those that leave little, on
more.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from ppo_repro.accuracy import float64
from ppo_repro.audit.causes import CAUSES, Cause, Distribution, Row, Sampling, own
from ppo_repro.audit.ways import Fed, Special, fed, ways
from ppo_repro.testing.dumps import Response

RIGHT = 10.0  # times stock float32's distance is rounding; other kernels of float32 are 1 to 3 times as far
FAR = 10.0  # times that for a single token
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LEFT_OF_HALF = (
    0.5  # of the distance of 16 bits may be left by computing in 16 bits: the order of additions is not known
)
LEFT_OF_ROUNDED = 0.4  # of the whole distance may be left by rounding the logits of the right model
LIKE = 0.3  # correlation with our own 16-bit errors from which errors of their size are called 16-bit rounding
TRIED_TOKENS, FIRST_TOKENS = 256, 24  # response tokens that causes are tried on, and screened on
LEAST_TOKENS = 8  # on fewer no cause is named for a part of the tokens
LEAD = 1 << 22  # so many logits of the prompt are computed too, to see log-probs that moved
KEPT = 1 << 26  # so many logits stay in memory
IMPROVES = 0.97  # a step of a fit that leaves more than this of the distance is the last
LATER = ("distribution", "quantity", "unit")
ON_ALL = 12  # explanations of each level that are computed on all tokens that are tried


@dataclass(frozen=True)
class Subject:
    """The model of an audit, and what else may be tried."""

    model: PreTrainedModel
    others: Mapping[str, PreTrainedModel]  # other weights by name
    special: Special


@dataclass(frozen=True)
class Entries:
    """The numbers of one side, float64 [n] for each response, and which of them count and are numbers, bool [n]."""

    values: list[Tensor]
    usable: list[Tensor]


@dataclass(frozen=True)
class Reference:
    """Log-probs [n] of each response in float64, and how far stock float32 is from them: rms and largest, nats."""

    logprobs: list[Tensor]
    floor: float
    largest: float


@dataclass(frozen=True)
class Stored:
    """The format with fewer bits than float32 that all numbers of a side have; `spacing` [n] of a number's
    neighbours."""

    name: str = ""
    mantissa: int = 23  # bits; 0: `decimals` decide
    decimals: int = 9

    def half_spacing(self, x: Tensor) -> Tensor:
        if not self.name:
            return torch.zeros_like(x)
        if not self.mantissa:
            return torch.full_like(x, 0.505 * 10.0**-self.decimals)
        return 0.505 * torch.exp2(x.abs().clamp_min(2.0**-14).log2().floor() - self.mantissa)


@dataclass(frozen=True)
class Tried:
    """One explanation: its causes in words, what to do, and the rms of what it leaves, nats."""

    words: str
    advice: str
    left: float
    explains: bool  # whether what it leaves is rounding
    deviations: float  # causes; one with a fitted parameter counts half more
    explains_zeros: bool = False  # whether every log-prob of exactly 0 is predicted


def rms(x: Tensor) -> float:
    """Root of the mean square; 0 of nothing."""
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def logits_of(model: PreTrainedModel, passes: Sequence[Fed], lead: int = 0) -> list[Tensor]:
    """Logits that predict the targets of passes of one length, after those of `lead` tokens before; the model's own
    forward."""
    accepted = inspect.signature(model.forward).parameters
    ids = torch.tensor([one.ids for one in passes], device=model.device)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if passes[0].positions is not None:
        given["position_ids"] = torch.tensor([one.positions for one in passes], device=model.device)
    first = min(min(one.at) for one in passes) - lead
    if "logits_to_keep" in accepted:
        given["logits_to_keep"] = ids.shape[1] - first
    stock: Any = model
    logits = stock(**given).logits[:, first - ids.shape[1] :]  # of the last positions, whichever were computed
    return [x[[*range(lead), *(a - first for a in one.at)]] for x, one in zip(logits, passes, strict=True)]


def stored_as(values: Tensor) -> Stored:
    """The narrow format that all these numbers have, if any."""
    numbers = values[values.isfinite() & (values != 0)].float()
    if len(numbers) < LEAST_TOKENS:
        return Stored()
    if not (numbers.view(torch.int32) & 0xFFFF).any():
        return Stored("bfloat16", 7)
    if torch.equal(numbers.half().float(), numbers):
        return Stored("float16", 10)
    for decimals in range(5):
        if torch.equal(torch.round(numbers.double(), decimals=decimals).float(), numbers):
            return Stored(f"{decimals} decimals", 0, decimals)
    return Stored()


class Search:
    """Explanations of one side, tried on tokens of the responses in which it is wrong."""

    def __init__(
        self,
        subject: Subject,
        responses: Sequence[Response],
        sampling: Sampling,
        definition: Distribution,
        reference: Reference,
        entries: Entries,
        wrong: Sequence[int],
    ) -> None:
        self.subject, self.responses, self.sampling, self.definition = subject, responses, sampling, definition
        self.reference, self.entries, self.wrong = reference, entries, wrong
        has_positions = "position_ids" in inspect.signature(subject.model.forward).parameters
        self.ways = ways(responses, subject.special, has_positions)
        self.made: tuple[str, PreTrainedModel] = ("", subject.model)  # one other model at a time is in memory
        self.rows: dict[tuple[str, str, bool], dict[int, Row]] = {}  # by weights, input, whether of the few; response
        self.own: dict[tuple[str, str, str, float, int, bool], Tensor] = {}  # log-probs of sampled tokens, all in nats
        # errors of computing in 16 bits, and of rounding the weights alone, of the usable tokens
        self.halves: dict[str, Tensor] = {}
        self.rounded: dict[str, Tensor] = {}
        self.causes = [
            *(Cause(f"computed in {name}", "weights", "compute in float32 on both sides") for name in HALF),
            *(Cause(f"weights rounded to {name}", "weights", "send float32 weights") for name in HALF),
            *(Cause(name, "weights", "send the sampler the last weights") for name in subject.others),
            *(Cause(words, "input", "give both sides the same ids, positions and masks") for words in self.ways),
            *(c for c in CAUSES if c.matters(sampling) and c.predict is not definition),
        ]
        self._restrict(self.entries.usable)
        every = torch.cat([entries.values[i][entries.usable[i]] for i in wrong])
        ideal = torch.cat([reference.logprobs[i][entries.usable[i]] for i in wrong])
        self.stored = stored_as(every)
        self.scale = max(1.0, rms(every) / max(rms(ideal), 1e-9))  # sums of many log-probs round more
        self.tolerance = RIGHT * reference.floor * self.scale + 2.0**-22 * rms(every)
        self.near: set[str] = set()  # causes that leave little on a few tokens

    def explain(self) -> list[Tried]:
        """Explanations, the best first; if none explains all tokens that are tried, of the wrong ones alone."""
        whole = self._ordered(self._levels())
        if any(t.explains for t in whole):
            return whole
        every = self.tokens
        self._restrict([
            u & ~((v - e).abs() <= self.tolerance)
            for u, v, e in zip(self.entries.usable, self.entries.values, self.reference.logprobs, strict=True)
        ])  # fmt: skip
        if LEAST_TOKENS <= self.tokens < 0.95 * every:
            part = [
                replace(t, words=f"at {self.tokens} of {every} tokens {t.words}") for t in self._levels() if t.explains
            ]
            if part:
                return [*self._ordered(part), *whole]
        self._restrict(self.entries.usable)
        return whole

    def _restrict(self, usable: Sequence[Tensor]) -> None:
        self.usable = list(usable)
        for rows in self.rows.values():
            rows.update({i: replace(row, usable=self.usable[i].to(row.usable.device)) for i, row in rows.items()})
        self.some = self._first(self.wrong, TRIED_TOKENS)
        self.few = self._first(self.some, FIRST_TOKENS)
        self.tokens = sum(int(self.usable[i].sum()) for i in self.some)

    def _first(self, rows: Sequence[int], tokens: int) -> list[int]:
        found, total = [], 0
        for i in rows:
            if total < tokens:
                found.append(i)
                total += int(self.usable[i].sum())
        return found

    def _levels(self) -> list[Tried]:
        plain = self._left((), (), self.some)
        assert plain is not None
        for name in HALF:
            errors = []
            for how in (f"computed in {name}", f"weights rounded to {name}"):
                pairs = self._predicted((self._weights(how),), (0.0,), self.some)
                errors.append(torch.cat([(p - r.reference)[r.usable].cpu() for p, r in pairs]))
            self.halves[name], self.rounded[name] = errors
        tried = [self._judged((), (), plain), *self._reordered()]
        tried += self._level([(c,) for c in self.causes])
        if not any(t.explains for t in tried):
            tried += self._as_half((), (), plain)
        if not any(t.explains for t in tried):
            tried += self._level([p for p in combinations(self.causes, 2) if self._is_pair(*p)])
        return tried

    def _is_pair(self, a: Cause, b: Cause) -> bool:
        """Whether to try both together; what 16 bits do is so small that the other one is near by itself."""
        fitted = [c for c in (a, b) if c.candidates is not None]
        is_far = a.name.rpartition(" ")[2] in HALF and a.stage == "weights" and b.name not in self.near
        return a.stage != b.stage and not is_far and (not fitted or (len(fitted) == 1 and fitted[0].in_pairs > 0))

    def _ordered(self, tried: Sequence[Tried]) -> list[Tried]:
        """The best first, each once. Of those that explain, only those with the fewest deviations do."""
        once: dict[str, Tried] = {}
        for t in sorted(tried, key=lambda t: (t.deviations, not t.explains, t.left)):
            # another cause beside one that leaves the same is not another explanation
            if t.explains or not any(math.isclose(t.left, other.left, rel_tol=1e-3) for other in once.values()):
                once.setdefault(t.words, t)
        fewest = min((t.deviations for t in tried if t.explains), default=0.0)
        found = [replace(t, explains=t.explains and t.deviations == fewest) for t in once.values()]
        return sorted(found, key=lambda t: (not t.explains, t.left))

    def _level(self, combos: Sequence[tuple[Cause, ...]]) -> list[Tried]:
        """Each combination with its best parameters: on a few tokens, and those that leave little on all."""
        screened: list[tuple[float, tuple[Cause, ...], tuple[float, ...]]] = []
        # in this order logits and their softmax are computed once
        stages = "weights", "input", "distribution"
        for combo in sorted(combos, key=lambda combo: [[c.name for c in combo if c.stage == s] for s in stages]):
            for parameters in self._parameters(combo):
                left = self._left(combo, parameters, self.few)
                if left is not None:
                    screened.append((rms(left), combo, parameters))
        screened.sort(key=lambda item: item[0])
        passing = max(30 * self.tolerance, *(3 * self.scale * rms(errors) for errors in self.halves.values()))
        self.near |= {combo[0].name for left, combo, _ in screened if left <= passing and len(combo) == 1}
        tried = []
        for _, combo, parameters in [item for item in screened[:ON_ALL] if item[0] <= passing] or screened[:3]:
            parameters = self._refined(combo, parameters, self.some)
            left = self._left(combo, parameters, self.some)
            if left is not None:
                tried += [self._judged(combo, parameters, left), *self._as_half(combo, parameters, left)]
        return tried

    def _parameters(self, combo: tuple[Cause, ...]) -> list[tuple[float, ...]]:
        """The values of the parameter that fit best on a few tokens."""
        fitted = next((c for c in combo if c.candidates is not None), None)
        if fitted is None or fitted.candidates is None:
            return [(0.0,) * len(combo)]
        of = {c.stage: c.name for c in combo}
        rows = self._rows(of.get("weights", ""), of.get("input", ""), self.few)
        values = list(fitted.candidates(rows, self.sampling))
        if len(combo) > 1:
            values = values[: fitted.in_pairs]
        options = [tuple(x if c is fitted else 0.0 for c in combo) for x in values]
        left = [(self._left(combo, option, self.few), option) for option in options]
        ranked = sorted(((rms(r), o) for r, o in left if r is not None), key=lambda item: item[0])
        return [self._refined(combo, option, self.few) for _, option in ranked[:1]]

    def _refined(
        self, combo: tuple[Cause, ...], parameters: tuple[float, ...], some: Sequence[int]
    ) -> tuple[float, ...]:
        """Least squares by Gauss and Newton."""
        index = next((k for k, c in enumerate(combo) if c.refine), None)
        if index is None:
            return parameters

        def at(x: float) -> tuple[float, ...]:
            return (*parameters[:index], x, *parameters[index + 1 :])

        x, before = parameters[index], math.inf
        for _ in range(12):
            step = 1e-4 * max(abs(x), 0.1)
            here, moved = self._left(combo, at(x), some), self._left(combo, at(x + step), some)
            if here is None or moved is None or not rms(here) < IMPROVES * before:
                break
            before, slope = rms(here), (moved - here) / step
            change = -float(slope @ here / slope.square().sum().clamp_min(1e-300))
            if not math.isfinite(change):
                break
            limit = 0.5 * abs(x) + 0.05
            x += max(-limit, min(limit, change))
            if abs(change) < 1e-9 * max(abs(x), 1.0):
                break
        return at(x)

    def _predicted(
        self, combo: tuple[Cause, ...], parameters: tuple[float, ...], some: Sequence[int]
    ) -> list[tuple[Tensor, Row]]:
        of: dict[str, tuple[Cause | None, float]]
        of = {c.stage: (c, x) for c, x in zip(combo, parameters, strict=True)}
        weights, way = (
            cause.name if (cause := of.get(stage, (None, 0.0))[0]) else "" for stage in ("weights", "input")
        )
        (distribution, x), (quantity, y), (unit, z) = (of.get(s, (None, 0.0)) for s in LATER)
        name = distribution.name if distribution else ""
        predict: Any = distribution.predict if distribution else self.definition
        found = []
        for row, i in zip(self._rows(weights, way, some), some, strict=True):
            key = (weights, way, name, x, i, some is self.few)
            if quantity is not None and quantity.predict is not None:
                values = quantity.predict(row, predict(row, self.sampling, x).log_softmax(-1), y).double()
            elif key not in self.own:
                self.own[key] = values = own(row, predict(row, self.sampling, x)).double()
            else:
                values = self.own[key]
            if unit is not None and unit.predict is not None:
                found.append((unit.predict(row, values, self.sampling, z), row))
            else:
                found.append((values[row.start :], row))
        return found

    def _left(self, combo: tuple[Cause, ...], parameters: tuple[float, ...], some: Sequence[int]) -> Tensor | None:
        """recorded - predicted; None if less than a third of the tokens has a prediction."""
        left, usable = [], 0
        for values, row in self._predicted(combo, parameters, some):
            there = row.usable & ~values.isnan()
            usable += int(row.usable.sum())
            apart = (row.wanted - values)[there].nan_to_num(1e3, 1e3, -1e3).clamp(-1e3, 1e3)
            within = self.stored.half_spacing(row.wanted[there])
            left.append((apart.sign() * (apart.abs() - within).clamp_min(0.0)).cpu())
        joined = torch.cat(left)
        return joined if not combo or len(joined) >= max(4, usable / 3) else None

    def _judged(self, combo: tuple[Cause, ...], parameters: tuple[float, ...], left: Tensor) -> Tried:
        given = f"{self.sampling.temperature:.4g}"
        words = [
            c.name.format(x=x, given=given) if c.predict else c.name for c, x in zip(combo, parameters, strict=True)
        ]
        explains = rms(left) <= self.tolerance and float(left.abs().max()) <= FAR * self.tolerance
        if self.stored.name and (explains or not combo):
            words.append(f"rounded to {self.stored.name}")
        for name, errors in self.halves.items():
            if f"computed in {name}" in words and len(errors):
                explains = explains or rms(left) <= LEFT_OF_HALF * rms(errors)
        if len(combo) == 1 and combo[0].name.startswith("logits rounded"):  # a few logits may round the other way
            plain = self._left((), (), self.some)
            explains = explains or (plain is not None and rms(left) <= LEFT_OF_ROUNDED * rms(plain))
        advice = "; ".join(dict.fromkeys(c.advice for c in combo)) or "record them in float32"
        deviations = len(combo) + 0.5 * sum(c.candidates is not None for c in combo)
        zeros = explains and all(
            bool((values[row.counts & (row.wanted == 0)].abs() <= self.tolerance).all())
            for values, row in self._predicted(combo, parameters, self.some)
        )
        return Tried(" and ".join(words) or "as it is", advice, rms(left), explains, deviations, zeros)

    def _as_half(self, combo: tuple[Cause, ...], parameters: tuple[float, ...], left: Tensor) -> list[Tried]:
        """The same if what is left is like the rounding of 16 bits, in its size and at the same tokens."""
        judged, plain = self._judged(combo, parameters, left), self._left((), (), self.some)
        is_half = any(c.stage == "weights" for c in combo)
        if judged.explains or is_half or plain is None or (combo and rms(left) > LEFT_OF_HALF * rms(plain)):
            return []
        for name, errors in self.halves.items():
            size = rms(errors)
            if len(errors) != len(left) or not size / 3 <= rms(left) <= 3 * size:
                continue
            like = max(_correlation(left, errors), _correlation(left, self.rounded[name]))
            if like >= max(LIKE, 3 / len(left) ** 0.5):
                what = f"about as far as {name} rounding is ({size:.2g} nats rms), in other digits"
                words = f"{judged.words} and {what}" if combo else what
                advice = f"{judged.advice}; " * bool(combo) + "compute in float32 on both sides"
                found = [Tried(words, advice, rms(left), True, judged.deviations + 1.5)]
                computed = (self._weights(f"computed in {name}"), *combo)
                exact = self._left(computed, (0.0, *parameters), self.some) if combo else None
                return found if exact is None else [self._judged(computed, (0.0, *parameters), exact), *found]
        return []

    def _weights(self, name: str) -> Cause:
        return next(c for c in self.causes if c.name == name)

    def _reordered(self) -> list[Tried]:
        """Numbers that belong to other responses, or to other tokens of the same response."""

        def same(i: int, values: Tensor) -> bool:
            recorded = self.entries.values[i][self.usable[i]]
            return len(recorded) > 1 and len(recorded) == len(values) and rms(recorded - values) <= self.tolerance

        def expected(i: int) -> Tensor:
            return self.reference.logprobs[i][self.usable[i]]

        def elsewhere(i: int) -> bool:
            return any(j != i and same(i, expected(j)) for j in range(len(self.responses)))

        found = []
        if all(elsewhere(i) for i in self.wrong):
            found.append("the log-probs of other responses")
        every = [self.entries.values[i][self.usable[i]] for i in self.wrong]
        pairs = zip(every, map(expected, self.wrong), strict=True)
        if all(len(a) > 2 and rms(a.sort().values - b.sort().values) <= self.tolerance for a, b in pairs):
            found.append("the right numbers in another order within the response")
        return [Tried(words, "check how tokens and log-probs are joined", 0.0, True, 1.5) for words in found]

    def _rows(self, weights: str, way: str, some: Sequence[int]) -> list[Row]:
        """Of the plain model and for a verdict in float64; float32 is enough to see what comes near on a few tokens."""
        is_stock = some is self.few and bool(weights or way)
        key = (weights, way, is_stock)
        rows = self.rows.setdefault(key, {})
        missing = [i for i in some if i not in rows]
        rows.update({i: self._row(weights, way, i, is_stock) for i in missing})
        total = sum(x.logits.numel() for of in self.rows.values() for x in of.values()) if missing else 0
        for other in [k for k in self.rows if any(k[:2]) and k != key]:
            if total > KEPT:  # logits are the most of the memory
                total -= sum(row.logits.numel() for row in self.rows.pop(other).values())
        return [rows[i] for i in some]

    def _row(self, weights: str, way: str, i: int, is_stock: bool) -> Row:
        r, model = self.responses[i], self._model(weights)
        passes = self.ways[way][i] if way else [fed(r.prompt_ids, r.response_ids)]
        vocabulary, n, device = int(model.config.get_text_config().vocab_size), len(r.response_ids), model.device
        before = passes[0].ids[: passes[0].at[0] + 1]
        lead = 0 if weights or way else min(len(before) - 1, LEAD // vocabulary)
        logits, targets = None, torch.tensor([*before[len(before) - lead :], *r.response_ids], device=device)
        is_narrow = is_stock or weights.startswith("computed in")
        as_wide: AbstractContextManager[Any] = nullcontext() if is_narrow else float64(model)
        alike = [passes] if len({len(one.ids) for one in passes}) == 1 else [[one] for one in passes]
        with as_wide:
            found = [x for some in alike for x in logits_of(model, some, lead)]
        for one, x in zip(passes, found, strict=True):
            if logits is None:
                dtype = torch.float32 if is_stock else torch.float64
                logits = torch.full((lead + n, x.shape[-1]), math.nan, dtype=dtype, device=device)
            logits[torch.tensor([*range(lead), *(lead + t for t in one.tokens)], device=device)] = x.to(logits)
            targets[lead + torch.tensor(one.tokens, device=device)] = torch.tensor(one.targets, device=device)
        assert logits is not None
        columns = (self.entries.values[i], self.usable[i], torch.tensor(r.counts), self.reference.logprobs[i])
        return Row(logits, targets, before[: len(before) - lead], lead, *(x.to(device) for x in columns))

    def _model(self, weights: str) -> PreTrainedModel:
        name = weights.rpartition(" ")[2]
        if name in HALF and weights != self.made[0]:
            model, is_wide = self.subject.model, weights.startswith("weights rounded")
            rounded = {id(p): p.detach().to(HALF[name]) for p in model.parameters()}
            # parameters only: from_pretrained leaves rotary frequencies in float32
            memo: dict[int, Any] = {i: Parameter(x.float() if is_wide else x, False) for i, x in rounded.items()}
            self.made = weights, copy.deepcopy(model, memo)
        return self.made[1] if name in HALF else self.subject.others.get(weights, self.subject.model)


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b) / (a.norm() * b.norm()).clamp_min(1e-300))
