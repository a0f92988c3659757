"""How far numerics are from the model in float64: logits, log-probs of tokens, gradients.

The reference is the unmodified transformers class, each sequence alone under the masks the model makes itself, with
every number in float64: norms and rotary positions too, which transformers computes in float32 in every model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.families import ROTARIES
from ppo_repro.numerics.layers.lowering import attach
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.optimizer import collect
from ppo_repro.ranks import ALONE


@dataclass(frozen=True)
class Text:
    """Token ids of some prompts and of a response to each; the n response tokens are scored, in order."""

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]

    def tokens(self) -> int:
        """Number of response tokens, n."""
        return sum(map(len, self.responses))


@dataclass(frozen=True)
class Scores:
    """Logits [n, V] that predict the response tokens, and the log-probs [n] of those, nats; in their own dtype."""

    logits: Tensor
    logprobs: Tensor


class Float64(TorchFunctionMode):
    """Inside, whatever asks for float32 gets float64. Raises TypeError where a float32 result appears all the same."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def wider(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        call = Tensor.double if func is Tensor.float else func
        result = call(*map(wider, args), **{name: wider(x) for name, x in (kwargs or {}).items()})
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            raise TypeError(f"{getattr(func, '__name__', func)} gave float32 inside a float64 model")
        return result


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` in float64, its rotary frequencies too; to be called inside `Float64`."""
    wide = copy.deepcopy(model).double()
    for name, module in list(wide.named_modules()):
        if type(module) in ROTARIES:
            with Float64():
                wide.set_submodule(name, type(module)(wide.config))
    return wide


def _scored(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> Scores:
    """Scores of one sequence by the model's own forward; the softmax is in float32 at least."""
    out = model(input_ids=torch.tensor([[*prompt, *response[:-1]]]), use_cache=False)
    logits = out.logits[0][len(prompt) - 1 :]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return Scores(logits, wide.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0])


@torch.no_grad()
def stock_scores(model: PreTrainedModel, text: Text) -> Scores:
    """Scores by the unmodified model in its dtype."""
    parts = [_scored(model, p, r) for p, r in zip(text.prompts, text.responses, strict=True)]
    return Scores(torch.cat([s.logits for s in parts]), torch.cat([s.logprobs for s in parts]))


def reference_scores(model: PreTrainedModel, text: Text) -> Scores:
    """Scores by the model in float64."""
    wide = in_float64(model)
    with Float64():
        return stock_scores(wide, text)


@torch.no_grad()
def exact_scores(model: PreTrainedModel, text: Text, max_context: int) -> Scores:
    """Scores by the exact numerics of an unmodified model."""
    batch = lay_out(text.prompts, text.responses, "right")
    logits = policy_logits(make_policy(model, "exact", max_context), batch)
    return Scores(logits, token_statistics(logits, batch.targets, 1.0, None, "exact")[0])


def stock_gradients(model: PreTrainedModel, text: Text) -> dict[str, Tensor]:
    """Gradients of the mean of -log p over the tokens by autograd on a copy of the model, in its dtype."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = None
    for prompt, response in zip(text.prompts, text.responses, strict=True):
        (-_scored(model, prompt, response).logprobs.sum() / text.tokens()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def reference_gradients(model: PreTrainedModel, text: Text) -> dict[str, Tensor]:
    """The same in float64."""
    wide = in_float64(model)
    with Float64():
        return stock_gradients(wide, text)


def exact_gradients(model: PreTrainedModel, text: Text, max_context: int) -> dict[str, Tensor]:
    """The same in exact numerics, float32."""
    policy = make_policy(model, "exact", max_context)
    batch = lay_out(text.prompts, text.responses, "right")
    accumulator = GradientAccumulator(policy.named_parameters())
    attach(policy, accumulator)

    def backward() -> None:
        logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "exact")
        torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / text.tokens()))

    return collect(accumulator, backward, batch.real_tokens, ALONE)[0]


@dataclass(frozen=True)
class Error:
    """Absolute distances from the reference over some numbers, in their unit."""

    largest: float
    rms: float
    mean: float


def error(found: Tensor, reference: Tensor) -> Error:
    """The error of numbers of any shape; the reference is float64."""
    distance = (found.to(torch.float64) - reference).abs()
    return Error(float(distance.max()), float(distance.square().mean().sqrt()), float(distance.mean()))


def resolution(reference: Tensor) -> Error:
    """The error of rounding the reference itself to float32: half a spacing at most, spacing / sqrt(12) in the rms."""
    spacing = _spacing(reference)
    return Error(float(spacing.max()) / 2, float(spacing.square().mean().sqrt()) / 12**0.5, float(spacing.mean()) / 4)


def _spacing(x: Tensor) -> Tensor:
    """Distance of neighbouring float32 numbers at each x, float64."""
    return torch.from_numpy(np.spacing(x.abs().to(torch.float32).numpy()).astype(np.float64))


@dataclass(frozen=True)
class Greedy:
    """Of the n best tokens of the reference, how many are others elsewhere, and how many float32 does not resolve."""

    tokens: int
    exact_differs: int
    stock_differs: int
    unresolved: int  # the two best logits are closer than twice stock float32's largest error in that row
    wrong: int  # exact differs where float32 does resolve them


def greedy(exact: Scores, stock: Scores, reference: Scores) -> Greedy:
    """Compare the best token of each row of logits."""
    best = reference.logits.topk(2, -1)
    stock_error = (stock.logits.to(torch.float64) - reference.logits).abs().amax(-1)
    gap = best.values[:, 0] - best.values[:, 1]
    unresolved = gap <= torch.maximum(2 * stock_error, _spacing(best.values[:, 0]))
    exact_differs, stock_differs = (s.logits.argmax(-1) != best.indices[:, 0] for s in (exact, stock))
    counts = (exact_differs, stock_differs, unresolved, exact_differs & ~unresolved)
    return Greedy(len(gap), *(int(c.sum()) for c in counts))


def gradient_errors(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """max |g - g64| / max |g64| of each parameter; ValueError unless both have the same parameters."""
    if found.keys() != reference.keys():
        raise ValueError(f"parameters of one side only: {sorted(found.keys() ^ reference.keys())}")
    return {
        name: float((found[name].to(torch.float64) - g).abs().max() / g.abs().max()) for name, g in reference.items()
    }
