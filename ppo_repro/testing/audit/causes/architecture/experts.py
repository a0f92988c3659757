"""Change how a router weighs experts, compute it in bfloat16, and leave out the shared experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.architecture.bfloat16 import in_bfloat16, with_narrow_products
from ppo_repro.testing.audit.causes.architecture.copies import with_forward, with_modules
from ppo_repro.testing.audit.causes.architecture.option import Option

_ROUTER = re.compile("(Router|Gate|Gating)$")
# of the logits [n, E] of all experts, and the logits [n, k] of the experts taken: weights [n, k]
_WEIGHTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by the softmax over all experts": lambda every, taken: (taken - every.logsumexp(-1, keepdim=True)).exp(),
    "by the softmax over the experts taken": lambda every, taken: taken.softmax(-1),
    "by the sigmoid": lambda every, taken: taken.sigmoid(),
    "equally": lambda every, taken: torch.full_like(taken, 1 / taken.shape[-1]),
}


def of_experts(model: PreTrainedModel) -> Iterator[Option]:
    """Yield changes of routers and shared experts."""
    routers = [name for name, module in model.named_modules() if _ROUTER.search(type(module).__name__)]
    if routers:
        yield in_bfloat16("router", partial(with_narrow_products, model, routers))
        advice = "weigh the experts by the same function of the router's logits on both sides"
        for words, weigh in _WEIGHTS.items():
            yield Option(f"experts weighed {words}", advice, partial(with_forward, model, routers, _weighted, weigh))
    shared = [name for name, _ in model.named_modules() if re.search(r"shared_experts?$", name)]
    if shared:
        without = partial(with_modules, model, shared, _Nothing)
        yield Option("without the shared experts", "compute the shared experts on both sides", without)


def _weighted(weigh: Callable[[Tensor, Tensor], Tensor], forward: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Replace the weights of a router by `weigh` of its logits."""
    logits, weights, experts = forward(hidden)
    router = forward.__self__
    exact = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, "bias", None))
    return logits, weigh(exact, exact.gather(-1, experts)).to(weights.dtype), experts


class _Nothing(Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)
