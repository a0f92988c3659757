"""Change one part of a model: norms, vectors, constants of its code, experts, embeddings, rotary positions or heads.

Nothing here knows a family: parts are found by a model's modules, its tensors and its code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Identity, LayerNorm, Module
from torch.nn.functional import linear, rms_norm
from transformers import PreTrainedModel

from ppo_repro.testing.advice import ADVICE
from ppo_repro.testing.audit.causes.cause import MakeModel, OtherModel, Rounded, option
from ppo_repro.testing.audit.causes.names import (
    BIAS,
    EMBED_SCALE,
    FREQUENCIES,
    NORM,
    REPETITION,
    ROTATION,
    ROUTER,
    SHARED_EXPERTS,
    is_constant,
)
from ppo_repro.testing.audit.patches import (
    weights,
    with_attributes,
    with_forward,
    with_function,
    with_modules,
    with_narrow_products,
    with_weights,
)

NORMS = "compute the norms of the model on both sides"
VECTORS = "load every tensor of the folder on both sides"
SCALING = "multiply embeddings by the same factor on both sides"
WEIGHING = "weigh the experts by the same function of the router's logits on both sides"
FLOAT32 = ADVICE["reduced_precision"].mend
CONSTANTS = (0.0, 1.0, -math.inf)  # that may stand for a vector which a stack does not know


def of_modules(model: PreTrainedModel) -> Iterator[OtherModel]:
    """Yield changes of each part of the model."""
    yield from _of_norms(model)
    yield from _of_vectors(model)
    yield from _of_constants(model)
    yield from _of_experts(model)
    yield from _of_embeddings(model)
    yield from _of_rotary_positions(model)
    yield from _of_heads(model)


def _by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names of weights or modules by kind, which is the name with * in place of the index of a layer."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(name)
    return found


def _rounded(x: Tensor) -> Tensor:
    """Return x rounded to bfloat16, in its own dtype."""
    return x.bfloat16().to(x.dtype)


def _in_bfloat16(part: str, make: MakeModel) -> OtherModel:
    """Return the cause that computes a part of the model in bfloat16."""
    words = f"{part} computed in bfloat16, all else in float32"
    return replace(option(words, FLOAT32, make), rounded=Rounded("part", "bfloat16"))


# norms


def _of_norms(model: PreTrainedModel) -> Iterator[OtherModel]:
    every = _norms(model)
    kinds = _by_kind(every)
    for parent in dict.fromkeys(kind.rpartition(".")[0] for kind in kinds):
        siblings = [kind for kind in kinds if kind.rpartition(".")[0] == parent]
        if len(siblings) > 1 and ".*." in parent:  # inside a layer: the norms of queries and keys
            names = [name for kind in siblings for name in kinds[kind]]
            yield option(
                f"without the norms {', '.join(siblings)}", NORMS, partial(with_modules, model, names, Identity)
            )
    for kind, names in kinds.items():
        yield option(f"without the norm {kind}", NORMS, partial(with_modules, model, names, Identity))
    layer_norms = [name for name in every if isinstance(model.get_submodule(name), LayerNorm)]
    yield option("norms that subtract the mean", NORMS, partial(with_forward, model, every, _centred))
    yield option("norms that do not subtract the mean", NORMS, partial(with_forward, model, layer_norms, _not_centred))
    scales = {f"{name}.weight" for name in every}
    yield option("norms that scale by weight, not 1 + weight", NORMS, partial(_with_added, model, scales, -1.0))
    yield option("norms that scale by 1 + weight, not weight", NORMS, partial(_with_added, model, scales, 1.0))


def _norms(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model.named_modules() if _is_norm(module)]


def _is_norm(module: Module) -> bool:
    return NORM.recognise(type(module).__name__) and not list(module.children())


def _centred(own: Callable[[Tensor], Tensor], norm: Module, x: Tensor) -> Tensor:
    return own(x - x.mean(-1, keepdim=True))


def _not_centred(own: Callable[[Tensor], Tensor], norm: Any, x: Tensor) -> Tensor:
    scaled = rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    return scaled if norm.bias is None else scaled + norm.bias


def _with_added(model: PreTrainedModel, names: Set[str], by: float) -> PreTrainedModel:
    return with_weights(model, lambda name, x: x + by if name in names else None)


# biases, and vectors that a stack may not know, such as sinks


def _of_vectors(model: PreTrainedModel) -> Iterator[OtherModel]:
    scales = {f"{name}.weight" for name in _norms(model)}
    kinds = _by_kind(name for name, x in weights(model).items() if x.dim() < 2 and name not in scales)
    biases = [kind for kind in kinds if BIAS.recognise(kind)]
    together: dict[str, list[str]] = {}
    for kind in biases:
        together.setdefault(kind.rpartition(".")[0].rpartition(".")[0], []).append(kind)
    for group in (biases, *(some for some in together.values() if some != biases)):
        if len(group) > 1:
            names = {name for kind in group for name in kinds[kind]}
            words = f"without {', '.join(group)}" if len(group) < len(biases) else "without any bias"
            yield option(words, VECTORS, partial(_filled, model, names, 0.0))
    for kind, of_kind in kinds.items():
        for value in (0.0,) if kind in biases else CONSTANTS:
            words = f"without {kind}" if kind in biases else f"{kind} {value} instead of its values"
            yield option(words, VECTORS, partial(_filled, model, set(of_kind), value))


def _filled(model: PreTrainedModel, names: Set[str], value: float) -> PreTrainedModel:
    return with_weights(model, lambda name, x: torch.full_like(x, value) if name in names else None)


# numbers that the code contains or computes from sizes, such as the scale of attention


def _of_constants(model: PreTrainedModel) -> Iterator[OtherModel]:
    """Yield changes of each number of a module that is no field of the configuration."""
    fields = set(model.config.get_text_config().to_dict())
    numbers = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, float) and key not in fields and is_constant(key)
    ]
    for kind, names in _by_kind(numbers).items():
        first, _, key = names[0].rpartition(".")
        old = f"{getattr(model.get_submodule(first), key):.4g}"
        advice = f"compute with {kind} {old} on both sides"
        for value in (1.0, math.inf):
            other = partial(with_attributes, model, names, _always(value))
            yield option(f"{kind} {value} instead of {old}", advice, other)


def _always(value: float) -> Callable[[float], float]:
    return lambda own: value


# routers and shared experts


# of the logits [n, E] of all experts, and the logits [n, k] of the experts taken: weights [n, k]
_WEIGHTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by the softmax over all experts": lambda every, taken: (taken - every.logsumexp(-1, keepdim=True)).exp(),
    "by the softmax over the experts taken": lambda every, taken: taken.softmax(-1),
    "by the sigmoid": lambda every, taken: taken.sigmoid(),
    "equally": lambda every, taken: torch.full_like(taken, 1 / taken.shape[-1]),
}


def _of_experts(model: PreTrainedModel) -> Iterator[OtherModel]:
    routers = [name for name, module in model.named_modules() if ROUTER.recognise(type(module).__name__)]
    if routers:
        yield _in_bfloat16("router", partial(with_forward, model, routers, with_narrow_products))
        for words, weigh in _WEIGHTS.items():
            weighed = partial(with_forward, model, routers, partial(_weighted, weigh))
            yield option(f"experts weighed {words}", WEIGHING, weighed)
    shared = [name for name, _ in model.named_modules() if SHARED_EXPERTS.recognise(name)]
    if shared:
        without = partial(with_modules, model, shared, _Nothing)
        yield option("without the shared experts", "compute the shared experts on both sides", without)


def _weighted(
    weigh: Callable[[Tensor, Tensor], Tensor], own: Callable[[Tensor], tuple[Tensor, ...]], router: Any, hidden: Tensor
) -> tuple[Tensor, ...]:
    """Replace the weights of a router by `weigh` of its logits."""
    logits, weights, experts = own(hidden)
    exact = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, "bias", None))
    return logits, weigh(exact, exact.gather(-1, experts)).to(weights.dtype), experts


class _Nothing(Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


# embedding and output matrix


def _of_embeddings(model: PreTrainedModel) -> Iterator[OtherModel]:
    embedding: Any = model.get_input_embeddings()
    heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    factors = [f"{name}.{EMBED_SCALE.example}" for name, module in model.named_modules() if module is embedding]
    if heads:
        tied = partial(with_attributes, model, [f"{name}.weight" for name in heads], lambda own: embedding.weight)
        yield option("the embedding as output matrix", "use the output matrix of the folder on both sides", tied)
    without, narrow = (partial(with_attributes, model, factors, change) for change in (torch.ones_like, _rounded))
    yield option("embeddings without their factor", SCALING, without)
    yield option("embeddings with their factor rounded to bfloat16", SCALING, narrow)
    if heads:
        yield _in_bfloat16("output matrix", partial(with_forward, model, heads, with_narrow_products))


# rotary positions


def _of_rotary_positions(model: PreTrainedModel) -> Iterator[OtherModel]:
    names = [name for name, module in model.named_modules() if _frequencies(module)]
    if names:
        yield _in_bfloat16("rotary table", partial(with_forward, model, names, _table_in_bfloat16))
        with_rounded = partial(with_forward, model, names, _frequencies_in_bfloat16)
        yield option("rotary frequencies rounded to bfloat16", FLOAT32, with_rounded)

        def with_both() -> PreTrainedModel:
            return with_forward(with_weights(model, _weight_in_bfloat16), names, _frequencies_in_bfloat16)

        yield option("weights and rotary frequencies rounded to bfloat16", FLOAT32, with_both)
    yield option(
        "rotary positions in the other order of pairs",
        "rotate the same pairs on both sides: halves of a head, or neighbours",
        partial(with_function, model, ROTATION.example, _other_pairs),
    )


def _frequencies(rotary: Module) -> list[str]:
    return [name for name in rotary._buffers if FREQUENCIES.recognise(name)]


def _weight_in_bfloat16(name: str, x: Tensor) -> Tensor | None:
    return _rounded(x) if x.is_floating_point() else None


def _table_in_bfloat16(
    own: Callable[..., tuple[Tensor, Tensor]], rotary: Module, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    cos, sin = own(*args, **kwargs)
    return _rounded(cos), _rounded(sin)


def _frequencies_in_bfloat16(own: Callable[..., Any], rotary: Module, *args: Any, **kwargs: Any) -> Any:
    for name in _frequencies(rotary):
        exact: Any = rotary._buffers[name]
        rotary._buffers[name] = _rounded(exact)
    return own(*args, **kwargs)


def _other_pairs(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the rotation of neighbouring entries if `rotate` pairs the halves of a head, and the reverse."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        width, one = cos.shape[-1], torch.zeros_like(q)
        one[..., 0] = 1.0
        swapped, _ = rotate(one, k, torch.zeros_like(cos), torch.ones_like(sin), *args, **kwargs)
        is_halves = not bool(swapped[..., 1].any())
        order = torch.arange(width, device=q.device).view(*((-1, 2) if is_halves else (2, -1))).T.reshape(-1)
        there = torch.cat([order, torch.arange(width, q.shape[-1], device=q.device)])
        rotated = rotate(q[..., there], k[..., there], cos, sin, *args, **kwargs)
        return rotated[0][..., there.argsort()], rotated[1][..., there.argsort()]

    return turned


# which heads of queries share a head of keys


def _of_heads(model: PreTrainedModel) -> Iterator[OtherModel]:
    """Yield the repetition of all heads in turn, in place of each head by itself."""
    yield option(
        "queries with the keys of other heads",
        "let neighbouring heads of queries share a head of keys and values on both sides",
        partial(with_function, model, REPETITION.example, lambda repeat: lambda x, count: x.repeat(1, count, 1, 1)),
    )
