"""Search the causes of one wrong side: predict numbers from each cause, and check whether the error left is rounding.

All causes, then all pairs of causes of different stages, are computed on a few tokens. The causes that leave small
errors are computed on more tokens. The tokens are windows of neighbouring tokens that begin shortly before the first
wrong token of a response.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from ppo_repro.models.stock import float64
from ppo_repro.testing.audit.forward import Progress, States, pieces, states
from ppo_repro.testing.audit.options import IN_BFLOAT16, computed
from ppo_repro.testing.audit.variants import (
    OTHER_TEMPERATURE,
    VARIANTS,
    Change,
    Numbers,
    Row,
    Sampling,
    Variant,
    own,
    tempered,
)
from ppo_repro.testing.audit.ways import Fed, Subject, fed, ways
from ppo_repro.testing.causes import CAUSES
from ppo_repro.testing.dumps import Response

RIGHT = 10.0  # times stock float32's distance is rounding; other kernels of float32 are 1 to 3 times as far
FAR = 10.0  # times that for a single token
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
COMPUTED, ROUNDED = "computed in ", "weights rounded to "
LEFT_OF_ANY = 0.5  # of the distance may be left by a cause: near rounding another could leave less by chance
LEFT_OF_HALF = 0.5  # of the distance of 16 bits may be left by computing in 16 bits: the order of sums is not known
LEFT_OF_PART = 0.2  # of the whole distance may be left by computing one part in 16 bits
LEFT_OF_ROUNDED = 0.4  # of the whole distance may be left by rounding the logits of the right model
LIKE = 0.3  # correlation with our own 16-bit errors from which errors of their size are called 16-bit rounding
SAME_FORMAT = 2.0  # times the size of a format's rounding may be; the formats are 8 times apart
NEARLY = 0.8  # of that correlation another part may have that is then named too
TRIED_TOKENS, FIRST_TOKENS = 256, 24  # response tokens that causes are tried on, and at most screened on
WRONG_TOKENS = 8  # wrong tokens that suffice for screening
FEW, MANY = 8, 32  # tokens of a window, or up to twice as many if those are the rest of the response
LEAD = 8  # tokens of a window before its first wrong one; at most half of the window
ROUGHLY = 8.0  # times is how far sizes on a few tokens and on more may be apart
LEAST_TOKENS = 8  # on fewer no cause is named for a part of the tokens
ON_ALL = 12  # explanations of each level that are computed on all tokens that are tried
Steps = tuple[tuple[Variant, float], ...]  # causes of different stages, each with its parameter


@dataclass(frozen=True)
class Entries:
    """Log-probs of one side: for each response values float64 [n], and usable bool [n]."""

    values: list[Tensor]
    usable: list[Tensor]


@dataclass(frozen=True)
class Reference:
    """Right log-probs float64 [n] of each response, and the rms and largest error of stock float32, nats."""

    logprobs: list[Tensor]
    floor: float
    largest: float
    measured: int  # the first responses, in which stock float32 was computed


@dataclass(frozen=True)
class Stored:
    """Narrower number format than float32 that holds all numbers of a side; without a name if there is none."""

    name: str = ""
    mantissa: int = 23  # bits; 0: `decimals` decide
    decimals: int = 9

    def half_spacing(self, x: Tensor) -> Tensor:
        """Return half the distance between neighbouring numbers of the format at each x."""
        if not self.name:
            return torch.zeros_like(x)
        if not self.mantissa:
            return torch.full_like(x, 0.505 * 10.0**-self.decimals)
        return 0.505 * torch.exp2(x.abs().clamp_min(2.0**-14).log2().floor() - self.mantissa)


@dataclass(frozen=True)
class Tried:
    """One explanation: its causes and a remedy in words, and the rms of the remaining error, nats."""

    words: str
    advice: str
    left: float
    explains: bool  # whether what it leaves is rounding
    deviations: float  # causes; one with a fitted parameter counts half more
    explains_zeros: bool = False  # whether every log-prob of exactly 0 is predicted
    temperature: float | None = None  # one that all logits were divided by, if that is among the causes


def rms(x: Tensor) -> float:
    """Return the root of the mean square of x; 0 if x is empty."""
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def stored_as(values: Tensor) -> Stored:
    """Return the narrowest format that holds all these numbers, `Stored()` if they need float32."""
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


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `end` of the response with index `response`."""

    response: int
    start: int
    end: int


class Search:
    """Search for explanations of one side, on tokens of its wrong responses."""

    def __init__(
        self,
        name: str,
        subject: Subject,
        responses: Sequence[Response],
        sampling: Sampling,
        definition: Change,
        reference: Reference,
        entries: Entries,
        wrong: Sequence[int],
    ) -> None:
        """Begin the search for the cause of wrong log-probs.

        Args:
            name: name of the side.
            subject: the model, and others that may have been used instead.
            responses: prompts and tokens.
            sampling: settings of the stack.
            definition: maps logits to the distribution of the side's log-probs.
            reference: the right log-probs, in nats.
            entries: the recorded log-probs, and which are usable.
            wrong: indices of the responses with a wrong log-prob.
        """
        self.name, self.subject, self.responses, self.sampling = name, subject, responses, sampling
        self.definition, self.reference, self.entries = definition, reference, entries
        self.wrong = wrong
        self.ways = ways(responses, subject)
        self.has_experts = any(name.endswith("experts") for name, _ in subject.model.named_modules())
        self.made: tuple[str, PreTrainedModel] = ("", subject.model)  # one other model at a time is in memory
        self.states: dict[tuple[str, str, bool], list[tuple[States, Tensor]]] = {}  # by weights, input, of the few
        self.rows: dict[tuple[str, str, bool], list[list[Row]]] = {}  # by window, in pieces
        self.own: dict[Hashable, list[Tensor]] = {}  # log-probs of the targets, by window
        self.logp: tuple[Hashable, list[list[Tensor]]] = (None, [])  # of all tokens, the last ones
        self.near: set[str] = set()  # causes that leave little on a few tokens
        self.half = [name for name in HALF if computed(partial(_in_half, subject.model, COMPUTED + name)) is not None]
        self.causes = [
            *(Variant(COMPUTED + name, "weights", CAUSES["reduced_precision"].mend) for name in self.half),
            *(Variant(ROUNDED + name, "weights", "send float32 weights") for name in HALF),
            *(Variant(name, "weights", CAUSES["stale_weights"].mend) for name in subject.others),
            *(Variant(option.words, "weights", option.advice) for option in subject.options.values()),
            *(Variant(words, "input", CAUSES["other_prompt"].mend) for words in self.ways),
            *(c for c in VARIANTS if c.matters(sampling) and c.change is not definition),
        ]
        every = torch.cat([entries.values[i][entries.usable[i]] for i in wrong])
        ideal = torch.cat([reference.logprobs[i][entries.usable[i]] for i in wrong])
        self.stored = stored_as(every)
        self.scale = max(1.0, rms(every) / max(rms(ideal), 1e-9))  # sums of many log-probs round more
        self.tolerance = RIGHT * reference.floor * self.scale + 2.0**-22 * rms(every)
        self._restrict(entries.usable)
        bad = {i: (self._bad(i).nonzero()[:1, 0].tolist() or [0])[0] for i in wrong}
        # with few tokens before the window a pass is short
        order = sorted(bad.items(), key=lambda item: max(item[1], LEAD) + len(responses[item[0]].prompt_ids))
        self.few = self._windows(order, FEW, FIRST_TOKENS, WRONG_TOKENS)
        some = self._windows(order, max(MANY, math.ceil(TRIED_TOKENS / len(wrong))), TRIED_TOKENS, TRIED_TOKENS)
        last = some[-1]
        size = len(responses[last.response].response_ids)
        if size > last.end:  # a cause has to be right at the end of a response too
            some += (Window(last.response, max(last.end, size - MANY), size),)
        self.some = some
        self.causes = [c for c in self.causes if c.stage != "input" or self._predicts(c.name)]

    def _predicts(self, way: str) -> bool:
        """Return whether a way has a forward pass for some token of the few, which are the first of the tried ones."""
        return any(f.within(w.start, w.end) for w in self.few for f in self.ways[way][w.response])

    def _bad(self, i: int) -> Tensor:
        apart = self.entries.values[i] - self.reference.logprobs[i]
        return self.entries.usable[i] & ~(apart.abs() <= self.tolerance)

    def _windows(self, order: Sequence[tuple[int, int]], length: int, tokens: int, wrong: int) -> tuple[Window, ...]:
        """Return windows of a length until they have enough usable tokens, or enough wrong ones."""
        found, total, bad = [], 0, 0
        for i, first in order:
            if total < tokens and bad < wrong:
                start = max(0, first - min(LEAD, length // 2))
                whole = len(self.responses[i].response_ids)
                found.append(Window(i, start, whole if whole - start <= 2 * length else start + length))
                total += int(self.entries.usable[i][start : found[-1].end].sum())
                bad += int(self._bad(i)[start : found[-1].end].sum())
        return tuple(found)

    def explain(self) -> list[Tried]:
        """Return explanations of all tried tokens, or else of the wrong tokens only; the best come first."""
        whole = self._ordered(self._levels())
        if any(t.explains for t in whole):
            return whole
        every, part = self._tokens(), []
        self._restrict([self._bad(i) for i in range(len(self.responses))])
        if LEAST_TOKENS <= self._tokens() < 0.95 * every:
            words = f"at {self._tokens()} of {every} tokens"
            part = [replace(t, words=f"{words} {t.words}", temperature=None) for t in self._levels() if t.explains]
        self._restrict(self.entries.usable)
        return [*self._ordered(part), *whole]

    def _restrict(self, usable: Sequence[Tensor]) -> None:
        columns = zip(self.entries.values, usable, self.responses, self.reference.logprobs, strict=True)
        device = self.subject.model.device
        self.numbers = [
            Numbers(*(x.to(device) for x in (values, use, torch.tensor(r.counts), ideal)))
            for values, use, r, ideal in columns
        ]
        self.rows.clear()
        self.halves: dict[tuple[str, bool], Tensor] = {}  # errors of 16 bits, of the usable tokens

    def _tokens(self) -> int:
        return sum(int(self.numbers[w.response].usable[w.start : w.end].sum()) for w in self.some)

    def _levels(self) -> list[Tried]:
        plain = self._left((), self.some)
        assert plain is not None
        tried = [self._judged((), plain), *self._reordered(), *self._level("causes", [(c,) for c in self.causes])]
        if not any(t.explains for t in tried):
            tried += self._as_half((), plain)
        if not any(t.explains for t in tried):
            pairs = [pair for pair in combinations(self.causes, 2) if self._is_pair(*pair)]
            tried += self._level("pairs of causes", pairs)
        return tried

    def _errors(self, name: str, some: Sequence[Window]) -> Tensor:
        """Return the errors (nats) of the model in 16 bits at the usable tokens."""
        key = name, some is self.few
        if key not in self.halves:
            cause = next(c for c in self.causes if c.name == name)
            pairs = zip(self._predicted(((cause, 0.0),), some), some, strict=True)
            numbers = [(p, self.numbers[w.response], slice(w.start, w.end)) for p, w in pairs]
            self.halves[key] = torch.cat([(p - of.reference[at])[of.usable[at]].cpu() for p, of, at in numbers])
        return self.halves[key]

    def _is_pair(self, a: Variant, b: Variant) -> bool:
        """Return whether to try both causes together; a 16-bit error is small, so its partner must come near alone."""
        fitted = [c for c in (a, b) if c.candidates is not None]
        is_far = _is_half(a) and b.name not in self.near
        if a.name in self.subject.options and (b.stage != "distribution" or (fitted and b.in_pairs == 0)):
            return False
        return a.stage != b.stage and not is_far and (not fitted or (len(fitted) == 1 and fitted[0].in_pairs > 0))

    def _ordered(self, tried: Sequence[Tried]) -> list[Tried]:
        """Sort explanations, the best first, without duplicates; those with more deviations lose `explains`.

        An option of the model may predict the same numbers as a fitted parameter (a divisor of the logits acts as a
        temperature). Then both explain.
        """
        once: dict[str, Tried] = {}
        for t in sorted(tried, key=lambda t: (t.deviations, not t.explains, t.left)):
            # another cause beside one that leaves the same is not another explanation
            if t.explains or not any(math.isclose(t.left, other.left, rel_tol=1e-3) for other in once.values()):
                once.setdefault(t.words, t)
        most = min((t.deviations for t in tried if t.explains), default=0.0)
        most += 0.5 * any(t.explains and t.words in self.subject.options for t in tried)
        found = [replace(t, explains=t.explains and t.deviations <= most) for t in once.values()]
        return sorted(found, key=lambda t: (not t.explains, t.left))

    def _level(self, what: str, level: Sequence[tuple[Variant, ...]]) -> list[Tried]:
        """Fit each combination of causes on a few tokens, and return the best ones computed on all tried tokens."""
        screened: list[tuple[float, Steps]] = []
        progress = Progress(f"{self.name}, {what}", len(level))
        # in this order logits and their softmax are computed once
        order = "weights", "input", "distribution"
        for causes in sorted(level, key=lambda causes: [[c.name for c in causes if c.stage == s] for s in order]):
            steps = self._with_parameters(causes)
            left = None if steps is None else self._left(steps, self.few)
            if steps is not None and left is not None:
                screened.append((rms(left), steps))
            progress.step()
        screened.sort(key=lambda item: item[0])
        narrow = [*(COMPUTED + name for name in self.half), *(ROUNDED + name for name in HALF)]
        errors = (rms(self._errors(name, self.few)) for name in narrow)
        passing = max(30 * self.tolerance, *(3 * self.scale * size for size in errors))
        self.near |= {steps[0][0].name for left, steps in screened if left <= passing and len(steps) == 1}
        tried = []
        for _, screened_steps in [item for item in screened[:ON_ALL] if item[0] <= passing] or screened[:3]:
            steps = self._refined(screened_steps, self.some)
            left = self._left(steps, self.some)
            if left is not None:
                tried += [self._judged(steps, left), *self._as_half(steps, left)]
        return tried

    def _with_parameters(self, causes: tuple[Variant, ...]) -> Steps | None:
        """Return the causes with the parameter that fits best on a few tokens; None if no value is proposed."""
        plain = tuple((c, 0.0) for c in causes)
        index = next((k for k, c in enumerate(causes) if c.candidates is not None), None)
        if index is None:
            return plain
        fitted, names = causes[index], {c.stage: c.name for c in causes}
        assert fitted.candidates is not None
        windows = self._rows(names.get("weights", ""), names.get("input", ""), self.few)
        rows = [row for of_window in windows for row in of_window]
        values = fitted.candidates(rows, self.sampling)[: fitted.in_pairs if len(causes) > 1 else None]
        options = [(*plain[:index], (fitted, x), *plain[index + 1 :]) for x in values]
        left = [(rms(r), k) for k, steps in enumerate(options) if (r := self._left(steps, self.few)) is not None]
        return self._refined(options[min(left)[1]], self.few) if left else None

    def _refined(self, steps: Steps, some: Sequence[Window]) -> Steps:
        """Return the steps after a least-squares fit of the parameter that has `refine`."""
        index = next((k for k, (c, _) in enumerate(steps) if c.refine), None)
        if index is None:
            return steps

        def at(x: float) -> Steps:
            return (*steps[:index], (steps[index][0], x), *steps[index + 1 :])

        def residuals(x: Any) -> Any:
            left = self._left(at(float(x[0])), some)
            return np.zeros(1) if left is None else left.numpy()

        fit = least_squares(residuals, [steps[index][1]], method="lm", diff_step=1e-4, ftol=1e-2, xtol=1e-10)
        return at(float(fit.x[0]))

    def _predicted(self, steps: Steps, some: Sequence[Window]) -> list[Tensor]:
        """Return the predicted numbers of each window; NaN for tokens without a prediction."""
        by_stage = {c.stage: (c, x) for c, x in steps}
        none = Variant("", "weights", ""), 0.0
        weights, way = (by_stage.get(stage, none)[0].name for stage in ("weights", "input"))
        distribution, quantity, unit = (by_stage.get(stage, none) for stage in ("distribution", "quantity", "unit"))
        is_plain = not (weights or way or distribution[0].name or quantity[0].name)
        parts = None if is_plain else self._parts(weights, way, some, distribution, quantity)
        plain, found = self._rows("", "", some), []
        for k, w in enumerate(some):
            values, at = self.numbers[w.response].reference, slice(w.start, w.end)
            if parts is not None:
                values = torch.full_like(values, math.nan)
                values[at] = parts[k]
            change, x = unit[0].change, unit[1]
            found.append((values if change is None else change(plain[k][0], self.sampling, values, x))[at])
        return found

    def _parts(
        self,
        weights: str,
        way: str,
        some: Sequence[Window],
        distribution: tuple[Variant, float],
        quantity: tuple[Variant, float],
    ) -> list[Tensor]:
        """Return the quantity of each token, by window; without a `quantity` its log-prob."""
        (changed, x), (wanted, y) = distribution, quantity
        change, pick = changed.change or self.definition, wanted.change
        key = weights, way, some is self.few, changed.name, x

        def scaled(row: Row) -> Tensor:
            return change(row, self.sampling, row.logits, x)

        if pick is None:
            if key not in self.own:
                windows = self._rows(weights, way, some)
                self.own[key] = [torch.cat([own(row, scaled(row)).double() for row in rows]) for rows in windows]
            return self.own[key]
        windows = self._rows(weights, way, some)
        if self.logp[0] != key:
            self.logp = key, [[scaled(row).log_softmax(-1) for row in rows] for rows in windows]
        pairs = zip(windows, self.logp[1], strict=True)
        return [
            torch.cat([pick(row, self.sampling, logp, y).double() for row, logp in zip(rows, parts, strict=True)])
            for rows, parts in pairs
        ]

    def _left(self, steps: Steps, some: Sequence[Window]) -> Tensor | None:
        """Return recorded - predicted; None if fewer than a third of the tokens have a prediction."""
        left, usable = [], 0
        for values, w in zip(self._predicted(steps, some), some, strict=True):
            at, numbers = slice(w.start, w.end), self.numbers[w.response]
            there = numbers.usable[at] & ~values.isnan()
            usable += int(numbers.usable[at].sum())
            wanted = numbers.recorded[at][there]
            apart = (wanted - values[there]).nan_to_num(1e3, 1e3, -1e3).clamp(-1e3, 1e3)
            within = self.stored.half_spacing(wanted)
            left.append((apart.sign() * (apart.abs() - within).clamp_min(0.0)).cpu())
        joined = torch.cat(left)
        return joined if not steps or len(joined) >= max(4, usable / 3) else None

    def _judged(self, steps: Steps, left: Tensor) -> Tried:
        given = f"{self.sampling.temperature:.4g}"
        words = [c.name.format(x=x, given=given) if c.change else c.name for c, x in steps]
        explains = rms(left) <= self.tolerance and float(left.abs().max()) <= FAR * self.tolerance
        plain = self._left((), self.some)
        assert plain is not None
        explains = explains and not (steps and rms(left) >= LEFT_OF_ANY * rms(plain))
        if self.stored.name and (explains or not steps):
            words.append(f"rounded to {self.stored.name}")
        for cause, _ in steps:
            if cause.name.startswith(COMPUTED):
                explains = explains or rms(left) <= LEFT_OF_HALF * rms(self._errors(cause.name, self.some))
            elif cause.name.endswith(IN_BFLOAT16) and len(steps) == 1:
                explains = explains or rms(left) <= LEFT_OF_PART * rms(plain)
        if len(steps) == 1 and steps[0][0].name.startswith("logits rounded"):  # a few may round the other way
            unrounded: Steps = next((((c, 0.0),) for c in self.causes if c.change is tempered), ())
            exact = self._left(unrounded, self.some)
            explains = explains or (exact is not None and rms(left) <= LEFT_OF_ROUNDED * rms(exact))
        advice = "; ".join(dict.fromkeys(c.advice for c, _ in steps)) or "record them in float32"
        deviations = len(steps) + 0.5 * sum(c.candidates is not None for c, _ in steps)
        deviations += sum(of[c.name].count - 1 for c, _ in steps if c.name in (of := self.subject.options))
        predicted = zip(self._predicted(steps, self.some), self.some, strict=True)
        zeros = explains and all(self._explains_zeros(values, w) for values, w in predicted)
        temperature = next((x for c, x in steps if c.name == OTHER_TEMPERATURE), None)
        return Tried(" and ".join(words) or "as it is", advice, rms(left), explains, deviations, zeros, temperature)

    def _explains_zeros(self, values: Tensor, w: Window) -> bool:
        at, numbers = slice(w.start, w.end), self.numbers[w.response]
        return bool((values[numbers.counts[at] & (numbers.recorded[at] == 0)].abs() <= self.tolerance).all())

    def _as_half(self, steps: Steps, left: Tensor) -> list[Tried]:
        """Return an explanation with 16-bit rounding added, if the remaining errors have its size and its pattern.

        With experts there is none: a small error of any cause may choose other experts, which gives the same pattern.
        """
        judged, plain = self._judged(steps, left), self._left((), self.some)
        is_excluded = self.has_experts or any(_is_half(c) for c, _ in steps)
        if judged.explains or is_excluded or plain is None or (steps and rms(left) > LEFT_OF_HALF * rms(plain)):
            return []
        for name in self.half:
            size = rms(self._errors(COMPUTED + name, self.few))
            if not size / ROUGHLY <= rms(left) <= ROUGHLY * size:  # which spares the time on more tokens
                continue
            errors = self._errors(COMPUTED + name, self.some)
            size = rms(errors)
            if len(errors) != len(left) or not size / 3 <= rms(left) <= 3 * size:
                continue
            like = max(_correlation(left, self._errors(how + name, self.some)) for how in (COMPUTED, ROUNDED))
            if like >= max(LIKE, 3 / len(left) ** 0.5):
                parts = [c.name for c in self.causes if c.name.endswith(IN_BFLOAT16) and name in c.name]
                far = [p for p in parts if _correlation(left, self._errors(p, self.some)) > NEARLY * like]
                is_near = size / SAME_FORMAT <= rms(left) <= SAME_FORMAT * size
                kind = name if is_near else "16-bit"
                what = " or ".join([f"as large as {kind} rounding ({size:.2g} nats rms)", *far]) + ", with other bits"
                words = f"{judged.words} and {what}" if steps else what
                advice = f"{judged.advice}; " * bool(steps) + CAUSES["reduced_precision"].mend
                found = [Tried(words, advice, rms(left), True, judged.deviations + 1.5)]
                computed = (next((c, 0.0) for c in self.causes if c.name == COMPUTED + name), *steps)
                exact = self._left(computed, self.some) if steps else None
                return found if exact is None else [self._judged(computed, exact), *found]
        return []

    def _reordered(self) -> list[Tried]:
        """Explain the numbers as log-probs of other responses, or of other tokens of the same response."""
        usable = [numbers.usable.cpu() for numbers in self.numbers]
        recorded = {i: self.entries.values[i][usable[i]] for i in self.wrong}
        expected = [e[u] for e, u in zip(self.reference.logprobs, usable, strict=True)]

        def explain(i: int, left: Tensor) -> bool:  # and what is right but for few tokens has no other order
            is_rounding = rms(left) <= self.tolerance and float(left.abs().max()) <= FAR * self.tolerance
            return is_rounding and rms(left) <= LEFT_OF_ANY * rms(recorded[i] - expected[i])

        def elsewhere(i: int) -> bool:
            a = recorded[i]
            others = (b for j, b in enumerate(expected) if j != i and len(a) == len(b) > 1)
            return any(explain(i, a - b) for b in others)

        def exchanged(i: int) -> bool:
            a, b = recorded[i].sort().values, expected[i].sort().values
            return len(a) > 2 and explain(i, a - b)

        found = ["the log-probs of other responses"] * all(map(elsewhere, self.wrong))
        found += ["the right numbers in another order within the response"] * all(map(exchanged, self.wrong))
        return [Tried(words, "check how tokens and log-probs are joined", 0.0, True, 1.5) for words in found]

    def _rows(self, weights: str, way: str, some: Sequence[Window]) -> list[list[Row]]:
        """Return the rows of each window; cache the logits of the plain model and of the last changed model."""
        key = weights, way, some is self.few
        if key not in self.rows:
            for other in [k for k in self.rows if any(k[:2])]:
                del self.rows[other]
            model, of_windows = self._model(weights), self._states(weights, way, some)
            joined = replace(of_windows[0][0], values=torch.cat([x.values for x, _ in of_windows]))
            with self._as_computed(*key):
                logits = joined.logits(model)
            by_window = logits.to(_precision(*key)).split([w.end - w.start for w in some])
            triples = zip(some, by_window, of_windows, strict=True)
            self.rows[key] = [list(self._pieces(w, x, targets)) for w, x, (_, targets) in triples]
        return self.rows[key]

    def _pieces(self, w: Window, logits: Tensor, targets: Tensor) -> Iterator[Row]:
        r = self.responses[w.response]
        for at in pieces(*logits.shape):
            before = r.response_ids[: w.start + at.start]
            yield Row(logits[at], targets[at], r.prompt_ids, before, self.numbers[w.response])

    def _states(self, weights: str, way: str, some: Sequence[Window]) -> list[tuple[States, Tensor]]:
        """Return the states that predict each window's tokens, and the targets, which a way may change."""
        key = weights, way, some is self.few
        if key in self.states:
            return self.states[key]
        model, windows, passes = self._model(weights), list[int](), list[Fed]()
        for k, w in enumerate(some):
            r = self.responses[w.response]
            for one in self.ways[way][w.response] if way else [fed(r.prompt_ids, r.response_ids)]:
                if (part := one.within(w.start, w.end)) is not None:
                    windows.append(k)
                    passes.append(part)
        with self._as_computed(*key):
            of_passes = dict(states(model, passes))
        first = of_passes[0]
        found = []
        for w in some:
            size = w.end - w.start, first.values.shape[-1]
            targets = torch.tensor(self.responses[w.response].response_ids[w.start : w.end], device=model.device)
            found.append((replace(first, values=first.values.new_full(size, math.nan)), targets))
        for number, (k, one) in enumerate(zip(windows, passes, strict=True)):
            tokens = [t - some[k].start for t in one.tokens]
            found[k][0].values[tokens] = of_passes[number].values
            found[k][1][tokens] = torch.tensor(one.targets, device=model.device)
        if first.output is not None:  # else they are logits
            self.states[key] = found
        return found

    def _as_computed(self, weights: str, way: str, is_few: bool) -> AbstractContextManager[Any]:
        """Compute the model in float64 while the block runs, except for screening, where float32 suffices."""
        is_narrow = weights.startswith(COMPUTED) or _precision(weights, way, is_few) == torch.float32
        return nullcontext() if is_narrow else float64(self._model(weights))

    def _model(self, weights: str) -> PreTrainedModel:
        model, option = self.subject.model, self.subject.options.get(weights)
        if option is None and not weights.startswith((COMPUTED, ROUNDED)):
            return self.subject.others.get(weights, model)
        if weights != self.made[0]:
            self.made = "", model  # two would need more memory
            self.made = weights, _in_half(model, weights) if option is None else option.make()
        return self.made[1]


def _in_half(model: PreTrainedModel, weights: str) -> PreTrainedModel:
    """Return a copy with the weights in 16 bits, or rounded to 16 bits."""
    dtype = HALF[weights.rpartition(" ")[2]]
    last = torch.float32 if weights.startswith(ROUNDED) else dtype
    # parameters only: from_pretrained leaves rotary frequencies in float32
    memo: dict[int, Any] = {id(p): Parameter(p.detach().to(dtype).to(last), False) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def _is_half(cause: Variant) -> bool:
    return cause.name.startswith((COMPUTED, ROUNDED))


def _precision(weights: str, way: str, is_few: bool) -> torch.dtype:
    return torch.float32 if is_few and bool(weights or way) else torch.float64


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b) / (a.norm() * b.norm()).clamp_min(1e-300))
