"""Logits, log-probs and gradients of a text: by the model in float64, by stock transformers, by the kernels.

The reference in float64 is the unmodified transformers class, each sequence alone under the masks the model makes
itself. Every number is float64: norms and rotary positions too, which transformers computes in float32 in every model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.families import ROTARIES
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.optimizer import SLOTS
from ppo_repro.numerics.rows import slots_of
from ppo_repro.numerics.token_statistics import token_statistics


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
    wide.config._experts_implementation = "eager"  # grouped products take no float64
    for name, module in list(wide.named_modules()):
        if type(module) in ROTARIES:
            with Float64():
                wide.set_submodule(name, type(module)(wide.config))
    return wide


def _scored(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> Scores:
    """Scores of one sequence by the model's own forward; the softmax is in float32 at least."""
    out = model(input_ids=torch.tensor([[*prompt, *response[:-1]]]).to(model.device), use_cache=False)
    logits = out.logits[0][len(prompt) - 1 :]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = torch.tensor(response).to(model.device)
    return Scores(logits, wide.log_softmax(-1).gather(-1, targets[:, None])[:, 0])


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
def policy_scores(policy: PreTrainedModel, text: Text) -> Scores:
    """Scores by a policy in deterministic numerics."""
    batch = lay_out(text.prompts, text.responses, "right")
    logits = policy_logits(policy, batch)
    return Scores(logits, token_statistics(logits, batch.targets, 1.0, None, "deterministic")[0])


def deterministic_scores(model: PreTrainedModel, text: Text, max_context: int) -> Scores:
    """Scores of an unmodified model by the kernels."""
    return policy_scores(make_policy(model, "deterministic", max_context), text)


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


def deterministic_gradients(model: PreTrainedModel, text: Text, max_context: int) -> dict[str, Tensor]:
    """The same by the kernels, float32."""
    policy, count = make_policy(model, "deterministic", max_context), len(text.prompts)
    batch = lay_out(text.prompts, text.responses, slots=slots_of(range(count), count, SLOTS))
    sums = GradientSums(policy.named_parameters(), SLOTS)
    logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "deterministic")
    torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / text.tokens()))
    return sums.finish()
