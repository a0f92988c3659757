"""Leave out norms, subtract the mean in them or not, and scale by 1 + weight or by weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Identity, LayerNorm, Module
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.architecture.copies import by_kind, with_forward, with_modules, with_weights
from ppo_repro.testing.audit.causes.architecture.option import Option

ADVICE = "compute the norms of the model on both sides"


def norms(model: PreTrainedModel) -> list[str]:
    """Return the names of the model's norms."""
    return [name for name, module in model.named_modules() if _is_norm(module)]


def _is_norm(module: Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.children())


def of_norms(model: PreTrainedModel) -> Iterator[Option]:
    """Yield changes of the norms."""
    every = norms(model)
    kinds = by_kind(every)
    for parent in dict.fromkeys(kind.rpartition(".")[0] for kind in kinds):
        of = [kind for kind in kinds if kind.rpartition(".")[0] == parent]
        if len(of) > 1 and ".*." in parent:  # inside a layer: the norms of queries and keys
            names = [name for kind in of for name in kinds[kind]]
            yield Option(f"without the norms {', '.join(of)}", ADVICE, partial(with_modules, model, names, Identity))
    for kind, names in kinds.items():
        yield Option(f"without the norm {kind}", ADVICE, partial(with_modules, model, names, Identity))
    layer_norms = [name for name in every if isinstance(model.get_submodule(name), LayerNorm)]
    yield Option("norms that subtract the mean", ADVICE, partial(with_forward, model, every, _centred))
    yield Option("norms that do not subtract the mean", ADVICE, partial(with_forward, model, layer_norms, _not_centred))
    scales = {f"{name}.weight" for name in every}
    yield Option("norms that scale by weight, not 1 + weight", ADVICE, partial(_with_added, model, scales, -1.0))
    yield Option("norms that scale by 1 + weight, not weight", ADVICE, partial(_with_added, model, scales, 1.0))


def _centred(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x - x.mean(-1, keepdim=True))


def _not_centred(forward: Any, x: Tensor) -> Tensor:
    norm = forward.__self__
    scaled = rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    return scaled if norm.bias is None else scaled + norm.bias


def _with_added(model: PreTrainedModel, names: Set[str], by: float) -> PreTrainedModel:
    return with_weights(model, lambda name, x: x + by if name in names else None)
