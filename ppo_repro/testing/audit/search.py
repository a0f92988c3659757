"""The search for the causes of one wrong side: what each predicts, and whether what it leaves is rounding.

All causes, then all pairs of causes of different stages, are computed on a few tokens; those that leave little, on
more.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from ppo_repro.models.stock import float64
from ppo_repro.testing.audit.variants import VARIANTS, Change, Row, Sampling, Variant, own, tempered
from ppo_repro.testing.audit.ways import Fed, Subject, fed, ways
from ppo_repro.testing.causes import CAUSES
from ppo_repro.testing.dumps import Response

RIGHT = 10.0  # times stock float32's distance is rounding; other kernels of float32 are 1 to 3 times as far
FAR = 10.0  # times that for a single token
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
COMPUTED, ROUNDED = "computed in ", "weights rounded to "
LEFT_OF_HALF = 0.5  # of the distance of 16 bits may be left by computing in 16 bits: the order of sums is not known
LEFT_OF_ROUNDED = 0.4  # of the whole distance may be left by rounding the logits of the right model
LIKE = 0.3  # correlation with our own 16-bit errors from which errors of their size are called 16-bit rounding
TRIED_TOKENS, FIRST_TOKENS = 256, 24  # response tokens that causes are tried on, and screened on
LEAST_TOKENS = 8  # on fewer no cause is named for a part of the tokens
IN_MEMORY = 1 << 26  # logits
ON_ALL = 12  # explanations of each level that are computed on all tokens that are tried
Steps = tuple[tuple[Variant, float], ...]  # causes of different stages, each with its parameter


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
    """The format with fewer bits than float32 that all numbers of a side have, if any."""

    name: str = ""
    mantissa: int = 23  # bits; 0: `decimals` decide
    decimals: int = 9

    def half_spacing(self, x: Tensor) -> Tensor:
        """Return half the distance of neighbouring numbers of the format at each x."""
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


def logits_of(model: PreTrainedModel, passes: Sequence[Fed]) -> list[Tensor]:
    """Return logits that predict the targets of passes of one length, by the model's own forward."""
    ids = torch.tensor([one.ids for one in passes], device=model.device)
    options: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if passes[0].positions is not None:
        options["position_ids"] = torch.tensor([one.positions for one in passes], device=model.device)
    first = min(min(one.at) for one in passes)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = ids.shape[1] - first
    stock: Any = model
    logits = stock(**options).logits[:, first - ids.shape[1] :]  # of the last positions, whichever were computed
    return [x[[a - first for a in one.at]] for x, one in zip(logits, passes, strict=True)]


def stored_as(values: Tensor) -> Stored:
    """Return the narrow format that all these numbers have, if any."""
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
        definition: Change,
        reference: Reference,
        entries: Entries,
        wrong: Sequence[int],
    ) -> None:
        """Begin the search for the cause of wrong log-probs.

        Args:
            subject: the model, and others that may have been used instead.
            responses: prompts and tokens.
            sampling: settings of the stack.
            definition: what its log-probs are, of the tokens or of the tokens after cuts.
            reference: the log-probs as they should be, in nats.
            entries: the recorded log-probs, and which are usable.
            wrong: indices of the responses with a wrong one.
        """
        self.subject, self.responses, self.sampling, self.definition = subject, responses, sampling, definition
        self.reference, self.entries, self.wrong = reference, entries, wrong
        self.ways = ways(responses, subject)
        self.made: tuple[str, PreTrainedModel] = ("", subject.model)  # one other model at a time is in memory
        self.rows: dict[tuple[str, str, bool], dict[int, Row]] = {}  # by weights, input, whether of the few; response
        self.own: dict[tuple[str, str, str, float, int, bool], Tensor] = {}  # log-probs of sampled tokens, all in nats
        self.halves: dict[str, Tensor] = {}  # errors of 16 bits, of the usable tokens
        self.near: set[str] = set()  # causes that leave little on a few tokens
        self.causes = [
            *(Variant(COMPUTED + name, "weights", CAUSES["reduced_precision"].mend) for name in HALF),
            *(Variant(ROUNDED + name, "weights", "send float32 weights") for name in HALF),
            *(Variant(name, "weights", CAUSES["stale_weights"].mend) for name in subject.others),
            *(Variant(option.words, "weights", option.advice) for option in subject.options.values()),
            *(Variant(words, "input", CAUSES["other_prompt"].mend) for words in self.ways),
            *(c for c in VARIANTS if c.matters(sampling) and c.change is not definition),
        ]
        self._restrict(entries.usable)
        every = torch.cat([entries.values[i][entries.usable[i]] for i in wrong])
        ideal = torch.cat([reference.logprobs[i][entries.usable[i]] for i in wrong])
        self.stored = stored_as(every)
        self.scale = max(1.0, rms(every) / max(rms(ideal), 1e-9))  # sums of many log-probs round more
        self.tolerance = RIGHT * reference.floor * self.scale + 2.0**-22 * rms(every)

    def explain(self) -> list[Tried]:
        """Return explanations, the best first; if none explains all tokens that are tried, of the wrong ones alone."""
        whole = self._ordered(self._levels())
        if any(t.explains for t in whole):
            return whole
        every, part = self.tokens, []
        numbers = zip(self.entries.usable, self.entries.values, self.reference.logprobs, strict=True)
        self._restrict([u & ~((v - e).abs() <= self.tolerance) for u, v, e in numbers])
        if LEAST_TOKENS <= self.tokens < 0.95 * every:
            words = f"at {self.tokens} of {every} tokens"
            part = [replace(t, words=f"{words} {t.words}") for t in self._levels() if t.explains]
        self._restrict(self.entries.usable)
        return [*self._ordered(part), *whole]

    def _restrict(self, usable: Sequence[Tensor]) -> None:
        self.usable = list(usable)
        for rows in self.rows.values():
            rows.update({i: replace(row, usable=self.usable[i].to(row.usable.device)) for i, row in rows.items()})
        self.some = self._first(self.wrong, TRIED_TOKENS)
        self.few = self._first(self.some, FIRST_TOKENS)
        self.tokens = sum(int(self.usable[i].sum()) for i in self.some)

    def _first(self, responses: Sequence[int], tokens: int) -> list[int]:
        found, total = [], 0
        for i in responses:
            if total < tokens:
                found.append(i)
                total += int(self.usable[i].sum())
        return found

    def _levels(self) -> list[Tried]:
        plain = self._left((), self.some)
        assert plain is not None
        for cause in self.causes[: 2 * len(HALF)]:
            pairs = self._predicted(((cause, 0.0),), self.some)
            self.halves[cause.name] = torch.cat([(p - r.reference)[r.usable].cpu() for p, r in pairs])
        tried = [self._judged((), plain), *self._reordered(), *self._level([(c,) for c in self.causes])]
        if not any(t.explains for t in tried):
            tried += self._as_half((), plain)
        if not any(t.explains for t in tried):
            tried += self._level([pair for pair in combinations(self.causes, 2) if self._is_pair(*pair)])
        return tried

    def _is_pair(self, a: Variant, b: Variant) -> bool:
        """Say whether to try both together; what 16 bits do is so small that the other one is near by itself."""
        fitted = [c for c in (a, b) if c.candidates is not None]
        is_far = a.name in self.halves and b.name not in self.near
        if a.name in self.subject.options and (b.stage != "distribution" or (fitted and b.in_pairs == 0)):
            return False
        return a.stage != b.stage and not is_far and (not fitted or (len(fitted) == 1 and fitted[0].in_pairs > 0))

    def _ordered(self, tried: Sequence[Tried]) -> list[Tried]:
        """Order them, the best first, each once. Of those that explain, only those with the fewest deviations do."""
        once: dict[str, Tried] = {}
        for t in sorted(tried, key=lambda t: (t.deviations, not t.explains, t.left)):
            # another cause beside one that leaves the same is not another explanation
            if t.explains or not any(math.isclose(t.left, other.left, rel_tol=1e-3) for other in once.values()):
                once.setdefault(t.words, t)
        fewest = min((t.deviations for t in tried if t.explains), default=0.0)
        found = [replace(t, explains=t.explains and t.deviations == fewest) for t in once.values()]
        return sorted(found, key=lambda t: (not t.explains, t.left))

    def _level(self, level: Sequence[tuple[Variant, ...]]) -> list[Tried]:
        """Return each combination with its best parameters: on a few tokens, and those that leave little on all."""
        screened: list[tuple[float, Steps]] = []
        # in this order logits and their softmax are computed once
        order = "weights", "input", "distribution"
        for causes in sorted(level, key=lambda causes: [[c.name for c in causes if c.stage == s] for s in order]):
            steps = self._with_parameters(causes)
            left = None if steps is None else self._left(steps, self.few)
            if steps is not None and left is not None:
                screened.append((rms(left), steps))
        screened.sort(key=lambda item: item[0])
        passing = max(30 * self.tolerance, *(3 * self.scale * rms(errors) for errors in self.halves.values()))
        self.near |= {steps[0][0].name for left, steps in screened if left <= passing and len(steps) == 1}
        tried = []
        for _, screened_steps in [item for item in screened[:ON_ALL] if item[0] <= passing] or screened[:3]:
            steps = self._refined(screened_steps, self.some)
            left = self._left(steps, self.some)
            if left is not None:
                tried += [self._judged(steps, left), *self._as_half(steps, left)]
        return tried

    def _with_parameters(self, causes: tuple[Variant, ...]) -> Steps | None:
        """Return the causes with the parameter that fits best on a few tokens; None if none is proposed."""
        plain = tuple((c, 0.0) for c in causes)
        index = next((k for k, c in enumerate(causes) if c.candidates is not None), None)
        if index is None:
            return plain
        fitted, names = causes[index], {c.stage: c.name for c in causes}
        assert fitted.candidates is not None
        rows = self._rows(names.get("weights", ""), names.get("input", ""), self.few)
        values = fitted.candidates(rows, self.sampling)[: fitted.in_pairs if len(causes) > 1 else None]
        options = [(*plain[:index], (fitted, x), *plain[index + 1 :]) for x in values]
        left = [(rms(r), k) for k, steps in enumerate(options) if (r := self._left(steps, self.few)) is not None]
        return self._refined(options[min(left)[1]], self.few) if left else None

    def _refined(self, steps: Steps, some: Sequence[int]) -> Steps:
        """Return the steps with the parameter that is to be refined at its least squares."""
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

    def _predicted(self, steps: Steps, some: Sequence[int]) -> list[tuple[Tensor, Row]]:
        by_stage = {c.stage: (c, x) for c, x in steps}
        none = Variant("", "weights", ""), 0.0
        weights, way = (by_stage.get(stage, none)[0].name for stage in ("weights", "input"))
        (distribution, x), (quantity, y), (unit, z) = (
            by_stage.get(stage, none) for stage in ("distribution", "quantity", "unit")
        )
        change, found = distribution.change or self.definition, []
        for row, i in zip(self._rows(weights, way, some), some, strict=True):
            key = (weights, way, distribution.name, x, i, some is self.few)
            if quantity.change is not None:
                logp = change(row, self.sampling, row.logits, x).log_softmax(-1)
                values = quantity.change(row, self.sampling, logp, y).double()
            elif key not in self.own:
                self.own[key] = values = own(row, change(row, self.sampling, row.logits, x)).double()
            else:
                values = self.own[key]
            found.append((values if unit.change is None else unit.change(row, self.sampling, values, z), row))
        return found

    def _left(self, steps: Steps, some: Sequence[int]) -> Tensor | None:
        """recorded - predicted; None if less than a third of the tokens has a prediction."""
        left, usable = [], 0
        for values, row in self._predicted(steps, some):
            there = row.usable & ~values.isnan()
            usable += int(row.usable.sum())
            apart = (row.wanted - values)[there].nan_to_num(1e3, 1e3, -1e3).clamp(-1e3, 1e3)
            within = self.stored.half_spacing(row.wanted[there])
            left.append((apart.sign() * (apart.abs() - within).clamp_min(0.0)).cpu())
        joined = torch.cat(left)
        return joined if not steps or len(joined) >= max(4, usable / 3) else None

    def _judged(self, steps: Steps, left: Tensor) -> Tried:
        given = f"{self.sampling.temperature:.4g}"
        words = [c.name.format(x=x, given=given) if c.change else c.name for c, x in steps]
        explains = rms(left) <= self.tolerance and float(left.abs().max()) <= FAR * self.tolerance
        if self.stored.name and (explains or not steps):
            words.append(f"rounded to {self.stored.name}")
        for cause, _ in steps:
            if cause.name.startswith(COMPUTED):
                explains = explains or rms(left) <= LEFT_OF_HALF * rms(self.halves[cause.name])
        if len(steps) == 1 and steps[0][0].name.startswith("logits rounded"):  # a few may round the other way
            unrounded: Steps = next((((c, 0.0),) for c in self.causes if c.change is tempered), ())
            plain = self._left(unrounded, self.some)
            explains = explains or (plain is not None and rms(left) <= LEFT_OF_ROUNDED * rms(plain))
        advice = "; ".join(dict.fromkeys(c.advice for c, _ in steps)) or "record them in float32"
        deviations = len(steps) + 0.5 * sum(c.candidates is not None for c, _ in steps)
        zeros = explains and all(
            bool((values[row.counts & (row.wanted == 0)].abs() <= self.tolerance).all())
            for values, row in self._predicted(steps, self.some)
        )
        return Tried(" and ".join(words) or "as it is", advice, rms(left), explains, deviations, zeros)

    def _as_half(self, steps: Steps, left: Tensor) -> list[Tried]:
        """Return the same if what is left is like the rounding of 16 bits, in its size and at the same tokens."""
        judged, plain = self._judged(steps, left), self._left((), self.some)
        is_half = any(c.name in self.halves for c, _ in steps)
        if judged.explains or is_half or plain is None or (steps and rms(left) > LEFT_OF_HALF * rms(plain)):
            return []
        for name in HALF:
            errors = self.halves[COMPUTED + name]
            size = rms(errors)
            if len(errors) != len(left) or not size / 3 <= rms(left) <= 3 * size:
                continue
            like = max(_correlation(left, self.halves[how + name]) for how in (COMPUTED, ROUNDED))
            if like >= max(LIKE, 3 / len(left) ** 0.5):
                what = f"about as far as {name} rounding is ({size:.2g} nats rms), in other digits"
                words = f"{judged.words} and {what}" if steps else what
                advice = f"{judged.advice}; " * bool(steps) + CAUSES["reduced_precision"].mend
                found = [Tried(words, advice, rms(left), True, judged.deviations + 1.5)]
                computed = (next((c, 0.0) for c in self.causes if c.name == COMPUTED + name), *steps)
                exact = self._left(computed, self.some) if steps else None
                return found if exact is None else [self._judged(computed, exact), *found]
        return []

    def _reordered(self) -> list[Tried]:
        """Find numbers that belong to other responses, or to other tokens of the same response."""
        recorded = {i: self.entries.values[i][self.usable[i]] for i in self.wrong}
        expected = [e[u] for e, u in zip(self.reference.logprobs, self.usable, strict=True)]

        def elsewhere(i: int) -> bool:
            a = recorded[i]
            others = (b for j, b in enumerate(expected) if j != i and len(a) == len(b) > 1)
            return any(rms(a - b) <= self.tolerance for b in others)

        def exchanged(i: int) -> bool:
            a, b = recorded[i].sort().values, expected[i].sort().values
            return len(a) > 2 and rms(a - b) <= self.tolerance

        found = ["the log-probs of other responses"] * all(map(elsewhere, self.wrong))
        found += ["the right numbers in another order within the response"] * all(map(exchanged, self.wrong))
        return [Tried(words, "check how tokens and log-probs are joined", 0.0, True, 1.5) for words in found]

    def _rows(self, weights: str, way: str, some: Sequence[int]) -> list[Row]:
        """Compute the rows of the plain model and of a verdict in float64; float32 is enough to see what comes near."""
        is_stock = some is self.few and bool(weights or way)
        key = (weights, way, is_stock)
        rows = self.rows.setdefault(key, {})
        missing = [i for i in some if i not in rows]
        rows.update({i: self._row(weights, way, i, is_stock) for i in missing})
        total = sum(x.logits.numel() for of in self.rows.values() for x in of.values()) if missing else 0
        for other in [k for k in self.rows if any(k[:2]) and k != key]:
            if total > IN_MEMORY:
                total -= sum(row.logits.numel() for row in self.rows.pop(other).values())
        return [rows[i] for i in some]

    def _row(self, weights: str, way: str, i: int, is_stock: bool) -> Row:
        r, model = self.responses[i], self._model(weights)
        passes = self.ways[way][i] if way else [fed(r.prompt_ids, r.response_ids)]
        targets, device = torch.tensor(r.response_ids, device=model.device), model.device
        is_narrow = is_stock or weights.startswith(COMPUTED)
        as_wide: AbstractContextManager[Any] = nullcontext() if is_narrow else float64(model)
        alike = [passes] if len({len(one.ids) for one in passes}) == 1 else [[one] for one in passes]
        with as_wide:
            found = [x for some in alike for x in logits_of(model, some)]
        dtype = torch.float32 if is_stock else torch.float64
        logits = torch.full((len(targets), found[0].shape[-1]), math.nan, dtype=dtype, device=device)
        for one, x in zip(passes, found, strict=True):
            tokens = list(one.tokens)
            logits[tokens] = x.to(logits)
            targets[tokens] = torch.tensor(one.targets, device=device)
        context = passes[0].ids[: passes[0].at[0] + 1]
        columns = (self.entries.values[i], self.usable[i], torch.tensor(r.counts), self.reference.logprobs[i])
        return Row(logits, targets, context, *(x.to(device) for x in columns))

    def _model(self, weights: str) -> PreTrainedModel:
        if weights in self.subject.options:
            if weights != self.made[0]:
                self.made = weights, self.subject.options[weights].make()
            return self.made[1]
        if not weights.startswith((COMPUTED, ROUNDED)):
            return self.subject.others.get(weights, self.subject.model)
        if weights != self.made[0]:
            dtype = HALF[weights.rpartition(" ")[2]]
            rounded = {id(p): p.detach().to(dtype) for p in self.subject.model.parameters()}
            is_wide = weights.startswith(ROUNDED)
            # parameters only: from_pretrained leaves rotary frequencies in float32
            memo: dict[int, Any] = {i: Parameter(x.float() if is_wide else x, False) for i, x in rounded.items()}
            self.made = weights, copy.deepcopy(self.subject.model, memo)
        return self.made[1]


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b) / (a.norm() * b.norm()).clamp_min(1e-300))
