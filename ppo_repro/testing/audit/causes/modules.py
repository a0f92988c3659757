"""Change one part of a model: norms, vectors, constants of its code, experts, embeddings, rotary positions or heads.

Nothing here knows a family: parts are found by a model's modules, its tensors and its code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Identity, LayerNorm, Module
from torch.nn.functional import linear, rms_norm
from transformers import PreTrainedModel

from ppo_repro.testing.advice import ADVICE
from ppo_repro.testing.audit.causes.cause import Cause, Rounded, option
from ppo_repro.testing.audit.causes.copies import (
    by_kind,
    copied,
    narrow_products,
    rounded,
    weights,
    with_forward,
    with_function,
    with_modules,
    with_weights,
)

NORMS = "compute the norms of the model on both sides"
VECTORS = "load every tensor of the folder on both sides"
FACTOR = "multiply embeddings by the same factor on both sides"
ROUTER = "weigh the experts by the same function of the router's logits on both sides"
FLOAT32 = ADVICE["reduced_precision"].mend
CONSTANTS = (0.0, 1.0, -math.inf)  # that may stand for a vector which a stack does not know
_NO_CONSTANT = re.compile("eps|dropout|^p$|norm_type|embed_scale|aux_loss|attention_scaling|jitter")
_ROUTER = re.compile("(Router|Gate|Gating)$")
_SHARED = re.compile("shared_experts?$")


def of_modules(model: PreTrainedModel) -> Iterator[Cause]:
    """Yield changes of each part of the model."""
    yield from _of_norms(model)
    yield from _of_vectors(model)
    yield from _of_constants(model)
    yield from _of_experts(model)
    yield from _of_embeddings(model)
    yield from _of_rotary_positions(model)
    yield from _of_heads(model)


def _in_bfloat16(part: str, make: Callable[[], PreTrainedModel]) -> Cause:
    """Return the cause that computes a part of the model in bfloat16."""
    words = f"{part} computed in bfloat16, all else in float32"
    return replace(option(words, FLOAT32, make), rounded=Rounded("part", "bfloat16"))


# norms


def _of_norms(model: PreTrainedModel) -> Iterator[Cause]:
    every = _norms(model)
    kinds = by_kind(every)
    for parent in dict.fromkeys(kind.rpartition(".")[0] for kind in kinds):
        of = [kind for kind in kinds if kind.rpartition(".")[0] == parent]
        if len(of) > 1 and ".*." in parent:  # inside a layer: the norms of queries and keys
            names = [name for kind in of for name in kinds[kind]]
            yield option(f"without the norms {', '.join(of)}", NORMS, partial(with_modules, model, names, Identity))
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
    return "norm" in type(module).__name__.lower() and not list(module.children())


def _centred(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x - x.mean(-1, keepdim=True))


def _not_centred(forward: Any, x: Tensor) -> Tensor:
    norm = forward.__self__
    scaled = rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    return scaled if norm.bias is None else scaled + norm.bias


def _with_added(model: PreTrainedModel, names: Set[str], by: float) -> PreTrainedModel:
    return with_weights(model, lambda name, x: x + by if name in names else None)


# biases, and vectors that a stack may not know, such as sinks


def _of_vectors(model: PreTrainedModel) -> Iterator[Cause]:
    scales = {f"{name}.weight" for name in _norms(model)}
    kinds = by_kind(name for name, x in weights(model).items() if x.dim() < 2 and name not in scales)
    biases = [kind for kind in kinds if kind.endswith("bias")]
    together: dict[str, list[str]] = {}
    for kind in biases:
        together.setdefault(kind.rpartition(".")[0].rpartition(".")[0], []).append(kind)
    for of in (biases, *(some for some in together.values() if some != biases)):
        if len(of) > 1:
            names = {name for kind in of for name in kinds[kind]}
            words = f"without {', '.join(of)}" if len(of) < len(biases) else "without any bias"
            yield option(words, VECTORS, partial(_filled, model, names, 0.0))
    for kind, of_kind in kinds.items():
        for value in (0.0,) if kind in biases else CONSTANTS:
            words = f"without {kind}" if kind in biases else f"{kind} {value} instead of its values"
            yield option(words, VECTORS, partial(_filled, model, set(of_kind), value))


def _filled(model: PreTrainedModel, names: Set[str], value: float) -> PreTrainedModel:
    return with_weights(model, lambda name, x: torch.full_like(x, value) if name in names else None)


# numbers that the code contains or computes from sizes, such as the scale of attention


def _of_constants(model: PreTrainedModel) -> Iterator[Cause]:
    """Yield changes of each number of a module that is no field of the configuration."""
    fields = set(model.config.get_text_config().to_dict())
    numbers = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, float) and key not in fields and not _NO_CONSTANT.search(key)
    ]
    for kind, names in by_kind(numbers).items():
        first, _, key = names[0].rpartition(".")
        old = f"{getattr(model.get_submodule(first), key):.4g}"
        advice = f"compute with {kind} {old} on both sides"
        for value in (1.0, math.inf):
            yield option(f"{kind} {value} instead of {old}", advice, partial(_with_number, model, names, value))


def _with_number(model: PreTrainedModel, names: Sequence[str], value: float) -> PreTrainedModel:
    found = copied(model)
    for name in names:
        module, _, key = name.rpartition(".")
        setattr(found.get_submodule(module), key, value)
    return found


# routers and shared experts


# of the logits [n, E] of all experts, and the logits [n, k] of the experts taken: weights [n, k]
_WEIGHTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by the softmax over all experts": lambda every, taken: (taken - every.logsumexp(-1, keepdim=True)).exp(),
    "by the softmax over the experts taken": lambda every, taken: taken.softmax(-1),
    "by the sigmoid": lambda every, taken: taken.sigmoid(),
    "equally": lambda every, taken: torch.full_like(taken, 1 / taken.shape[-1]),
}


def _of_experts(model: PreTrainedModel) -> Iterator[Cause]:
    routers = [name for name, module in model.named_modules() if _ROUTER.search(type(module).__name__)]
    if routers:
        yield _in_bfloat16("router", partial(with_forward, model, routers, narrow_products))
        for words, weigh in _WEIGHTS.items():
            yield option(f"experts weighed {words}", ROUTER, partial(with_forward, model, routers, _weighted, weigh))
    shared = [name for name, _ in model.named_modules() if _SHARED.search(name)]
    if shared:
        without = partial(with_modules, model, shared, _Nothing)
        yield option("without the shared experts", "compute the shared experts on both sides", without)


def _weighted(weigh: Callable[[Tensor, Tensor], Tensor], forward: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Replace the weights of a router by `weigh` of its logits."""
    logits, weights, experts = forward(hidden)
    router = forward.__self__
    exact = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, "bias", None))
    return logits, weigh(exact, exact.gather(-1, experts)).to(weights.dtype), experts


class _Nothing(Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


# embedding and output matrix


def _of_embeddings(model: PreTrainedModel) -> Iterator[Cause]:
    tied = partial(_with_tied_output, model)
    yield option("the embedding as output matrix", "use the output matrix of the folder on both sides", tied)
    yield option("embeddings without their factor", FACTOR, partial(_with_factor, model, torch.ones_like))
    words = "embeddings with their factor rounded to bfloat16"
    yield option(words, FACTOR, partial(_with_factor, model, rounded))
    heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    if heads:
        yield _in_bfloat16("output matrix", partial(with_forward, model, heads, narrow_products))


def _with_tied_output(model: PreTrainedModel) -> PreTrainedModel:
    found: Any = copied(model)
    found.get_output_embeddings().weight = found.get_input_embeddings().weight
    return found


def _with_factor(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    found: Any = copied(model)
    embeddings = found.get_input_embeddings()
    embeddings.embed_scale = change(embeddings.embed_scale)
    embeddings._non_persistent_buffers_set.discard("embed_scale")  # not to be computed again
    return found


# rotary positions


def _of_rotary_positions(model: PreTrainedModel) -> Iterator[Cause]:
    names = [name for name, module in model.named_modules() if _frequencies(module)]
    if names:
        yield _in_bfloat16("rotary table", partial(_with_rotary, model, names, _table_in_bfloat16))
        with_rounded = partial(_with_rotary, model, names, _frequencies_in_bfloat16)
        yield option("rotary frequencies rounded to bfloat16", FLOAT32, with_rounded)
        with_both = partial(_with_rotary, model, names, _frequencies_in_bfloat16, _weight_in_bfloat16)
        yield option("weights and rotary frequencies rounded to bfloat16", FLOAT32, with_both)
    yield option(
        "rotary positions in the other order of pairs",
        "rotate the same pairs on both sides: halves of a head, or neighbours",
        partial(with_function, model, "apply_rotary_pos_emb", _other_pairs),
    )


def _frequencies(rotary: Module) -> list[str]:
    return [name for name in rotary._buffers if name.endswith("inv_freq")]


def _weight_in_bfloat16(name: str, x: Tensor) -> Tensor | None:
    return rounded(x) if x.is_floating_point() else None


def _table_in_bfloat16(forward: Callable[..., tuple[Tensor, Tensor]], rotary: Module, *args: Any) -> tuple[Tensor, ...]:
    cos, sin = forward(rotary, *args)
    return rounded(cos), rounded(sin)


def _frequencies_in_bfloat16(forward: Callable[..., Any], rotary: Module, *args: Any) -> Any:
    for name in _frequencies(rotary):
        exact: Any = rotary._buffers[name]
        rotary._buffers[name] = rounded(exact)
    return forward(rotary, *args)


def _with_rotary(
    model: PreTrainedModel,
    names: Sequence[str],
    wrapper: Callable[..., Any],
    weight: Callable[[str, Tensor], Tensor | None] = lambda name, x: None,
) -> PreTrainedModel:
    """Copy the model with weight(name, weight) as weights, and wrapper(forward, module, *args) in rotary modules.

    In float64 a new object of the same class replaces each rotary module, so the forward of an object would be lost.
    The wrapper is therefore a method of a new class.
    """
    found = with_weights(model, weight)
    for name in names:
        module = found.get_submodule(name)
        kind: Any = type(module)

        def forward(self: Module, *args: Any, kind: Any = kind, **named: Any) -> Any:
            return wrapper(partial(kind.forward, **named), self, *args)

        module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return found


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


def _of_heads(model: PreTrainedModel) -> Iterator[Cause]:
    """Yield the repetition of all heads in turn, in place of each head by itself."""
    yield option(
        "queries with the keys of other heads",
        "let neighbouring heads of queries share a head of keys and values on both sides",
        partial(with_function, model, "repeat_kv", lambda repeat: lambda x, count: x.repeat(1, count, 1, 1)),
    )
