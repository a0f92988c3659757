"""Measure the errors of deterministic numerics and stock float32 in logits, log-probs, best tokens and gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.models.stock import float64
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.optimizer import SLOTS
from ppo_repro.numerics.sequences import slots_of
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.runs.accuracy import Scores, Text, policy_scores, reference_scores, spacing, stock_scores

GRADIENT_RESOLUTION = 2.0**-24  # rounding a tensor's largest gradient to float32 may cost this share of it


def deterministic_scores(model: PreTrainedModel, text: Text, max_context: int) -> Scores:
    """Score a text with an unmodified model by the kernels."""
    return policy_scores(make_policy(model, "deterministic", max_context), text)


@dataclass(frozen=True)
class Error:
    """Largest, rms and mean absolute error of some numbers, in their unit."""

    largest: float
    rms: float
    mean: float


@dataclass(frozen=True)
class Errors:
    """Errors of the same numbers in both numerics.

    `resolution` is the error of the reference after rounding to float32.
    """

    deterministic: Error
    stock: Error
    resolution: Error

    def ratio(self, kind: str) -> float:
        """Return deterministic / stock error, for `kind` = `largest`, `rms` or `mean`.

        The stock error is at least the resolution, because a float32 result can be closer only by luck.
        """
        stock = max(getattr(self.stock, kind), getattr(self.resolution, kind))
        return float(getattr(self.deterministic, kind)) / stock if stock else float("nan")


def error(found: Tensor, reference: Tensor) -> Error:
    """Return the error of numbers of any shape; the reference is float64."""
    distance = (found.to(torch.float64) - reference).abs()
    return Error(float(distance.max()), float(distance.square().mean().sqrt()), float(distance.mean()))


def errors(deterministic: Tensor, stock: Tensor, reference: Tensor) -> Errors:
    """Return the errors of the same numbers by two kinds of numerics."""
    gaps = spacing(reference)
    # rounding is off by half a spacing at most, by spacing / sqrt(12) in the rms and spacing / 4 in the mean
    resolution = Error(float(gaps.max()) / 2, float(gaps.square().mean().sqrt()) / 12**0.5, float(gaps.mean()) / 4)
    return Errors(error(deterministic, reference), error(stock, reference), resolution)


def stock_gradients(model: PreTrainedModel, text: Text) -> dict[str, Tensor]:
    """Compute the gradients of the mean of -log p over the tokens by autograd, on a copy of the model in its dtype."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = None
    for prompt, response in zip(text.prompts, text.responses, strict=True):
        ids = torch.tensor([[*prompt, *response[:-1]]])
        logits = model(input_ids=ids, use_cache=False).logits[0][len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])
        (-logprobs.sum() / text.tokens()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def reference_gradients(model: PreTrainedModel, text: Text) -> dict[str, Tensor]:
    """Compute the gradients of the mean of -log p in float64, on a copy of the model in float64."""
    wide = copy.deepcopy(model).double()
    with float64(wide):
        return stock_gradients(wide, text)


def deterministic_gradients(model: PreTrainedModel, text: Text, max_context: int) -> dict[str, Tensor]:
    """Compute the gradients of the mean of -log p by the kernels, float32."""
    policy, count = make_policy(model, "deterministic", max_context), len(text.prompts)
    sums = GradientSums(policy.named_parameters(), SLOTS)
    batch = lay_out(text.prompts, text.responses, slots=slots_of(range(count), count, SLOTS)).into(sums)
    logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "deterministic")
    torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / text.tokens()))
    return sums.finish()


@dataclass(frozen=True)
class Greedy:
    """Counts of rows whose best token differs from the reference's, and of rows that float32 cannot resolve."""

    tokens: int
    deterministic_differs: int
    stock_differs: int
    unresolved: int  # the two best logits are closer than twice stock float32's largest error in that row
    wrong: int  # deterministic differs where float32 does resolve them


def greedy(deterministic: Scores, stock: Scores, reference: Scores) -> Greedy:
    """Compare the best token of each row of logits."""
    best = reference.logits.topk(2, -1)
    stock_error = (stock.logits.to(torch.float64) - reference.logits).abs().amax(-1)
    gap = best.values[:, 0] - best.values[:, 1]
    unresolved = gap <= torch.maximum(2 * stock_error, spacing(best.values[:, 0]))
    deterministic_differs, stock_differs = (s.logits.argmax(-1) != best.indices[:, 0] for s in (deterministic, stock))
    counts = (deterministic_differs, stock_differs, unresolved, deterministic_differs & ~unresolved)
    return Greedy(len(gap), *(int(c.sum()) for c in counts))


def by_expert(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the matrices [E, outputs, inputs] of mixtures by expert, because frequent experts would hide a rare one."""
    found: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        experts = {f"{name}.{e}": expert for e, expert in enumerate(gradient)} if gradient.dim() == 3 else {}
        found |= experts or {name: gradient}
    return found


def relative(found: Tensor, reference: Tensor) -> float:
    """Return max |g - g64| / max |g64|; 0 if both are all zeros."""
    distance = (found.to(torch.float64) - reference).abs().max()
    return float(distance / reference.abs().max()) if distance else 0.0


def gradient_errors(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each parameter, and of each expert.

    Raises ValueError unless both have the same parameters.
    """
    if found.keys() != reference.keys():
        raise ValueError(f"parameters of one side only: {sorted(found.keys() ^ reference.keys())}")
    parts = by_expert(found)
    return {name: relative(parts[name], gradient) for name, gradient in by_expert(reference).items()}


@dataclass(frozen=True)
class Comparison:
    """Errors of deterministic numerics and stock float32 on one text."""

    logprobs: Errors
    logits: Errors
    bfloat16: Error | None  # of the log-probs by the stock model in bfloat16
    greedy: Greedy


def compare(
    model: PreTrainedModel, text: Text, max_context: int, given: PreTrainedModel | None = None, bfloat16: bool = False
) -> Comparison:
    """Compare log-probs, logits and best tokens. The deterministic numerics compute `given`, or the model itself."""
    reference, stock = reference_scores(model, text), stock_scores(model, text)
    deterministic = deterministic_scores(model if given is None else given, text, max_context)
    half = stock_scores(copy.deepcopy(model).bfloat16(), text).logprobs if bfloat16 else None
    return Comparison(
        errors(deterministic.logprobs, stock.logprobs, reference.logprobs),
        errors(deterministic.logits, stock.logits, reference.logits),
        None if half is None else error(half, reference.logprobs),
        greedy(deterministic, stock, reference),
    )


@dataclass(frozen=True)
class GradientComparison:
    """Relative error max |g - g64| / max |g64| of each parameter, in both numerics."""

    deterministic: dict[str, float]
    stock: dict[str, float]

    def worst(self) -> tuple[str, str]:
        """Return the parameters with the largest error: of deterministic numerics, and of stock."""
        return max(self.deterministic, key=self.deterministic.__getitem__), max(self.stock, key=self.stock.__getitem__)

    def ratio(self) -> float:
        """Return deterministic / stock error of the worst parameters; the stock error is at least the resolution."""
        deterministic, stock = self.worst()
        return self.deterministic[deterministic] / max(self.stock[stock], GRADIENT_RESOLUTION)


def compare_gradients(
    model: PreTrainedModel, text: Text, max_context: int, given: PreTrainedModel | None = None
) -> GradientComparison:
    """Compare the gradients of the mean of -log p. The deterministic numerics compute `given`, or the model itself."""
    reference = reference_gradients(model, text)
    deterministic = deterministic_gradients(model if given is None else given, text, max_context)
    return GradientComparison(
        gradient_errors(deterministic, reference), gradient_errors(stock_gradients(model, text), reference)
    )


def typical(ratios: Sequence[float]) -> float:
    """Return the geometric mean of ratios, which one lucky model changes little."""
    return float(np.exp(np.mean(np.log(ratios))))
