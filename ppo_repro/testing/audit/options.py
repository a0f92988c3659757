"""Change one option of a model's architecture, because another stack may leave it out or compute it otherwise.

Nothing here knows a family. Options are the fields of its configuration that the model reads; its norms, biases and
vectors; and choices that no configuration says, for example the order of rotary pairs or the weights of experts.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn import Identity, LayerNorm, Module, Parameter
from torch.nn.functional import linear, rms_norm
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ppo_repro.base.errors import is_out_of_memory
from ppo_repro.models.reading import quiet
from ppo_repro.models.stock import with_config
from ppo_repro.testing.audit.measure import Format
from ppo_repro.testing.causes import CAUSES

WITHOUT = {  # what a field that is left out means; other fields are named by themselves
    "attention_bias": "attention without its biases",
    "attn_logit_softcapping": "attention without its soft cap",
    "clip_qkv": "queries, keys and values without their limit",
    "embedding_multiplier": "embeddings without their factor",
    "final_logit_softcapping": "logits without their soft cap",
    "logit_scale": "logits without their factor",
    "logits_scaling": "logits without their divisor",
    "residual_multiplier": "residuals without their factor",
    "rope_parameters.partial_rotary_factor": "rotary positions in whole heads",
    "rope_parameters.rope_type": "rotary positions without their scaling",
    "routed_scaling_factor": "experts without their factor",
    "sliding_window": "attention without its sliding window",
}
# what a configuration may ask for, and the class of a model may ignore
ASKED = (
    "alibi", "attention_multiplier", "attn_logit_softcapping", "clip_qkv", "embedding_multiplier",
    "final_logit_softcapping", "logit_scale", "logits_scaling", "parallel_attn", "qk_layernorm",
    "query_pre_attn_scalar", "residual_multiplier", "routed_scaling_factor", "scale_attn_by_inverse_layer_idx",
    "sliding_window", "use_parallel_residual", "use_qk_norm",
)  # fmt: skip
# fields of training, of tokens and of what is returned: no log-prob depends on them
_OTHER_FIELDS = re.compile(
    r"dropout|pdrop|initializ|init_|token_id|^output_|^return_|^use_cache$|^_|aux_loss|jitter|^dtype$|vocab_size|"
    r"is_encoder_decoder|max_position_embeddings|problem_type|label|^n?um_hidden_layers$|^n_layer$"
)
_USUAL: Mapping[str, Sequence[float]] = {  # of fields that end so; 0 and 1 say nothing there
    "eps": (1e-5, 1e-6, 1e-8, 1e-12),
    "epsilon": (1e-5, 1e-6, 1e-8, 1e-12),
    "theta": (1e4, 5e5, 1e6),
    "softcapping": (30.0, 50.0),
}
_SCALES = re.compile("scal|multiplier")  # their usual values are powers of a head's width
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu")
VECTORS = (0.0, 1.0, -math.inf)  # that may stand for a vector which a stack does not know
FEW = 16  # experts, groups or kinds of layers, of which others may be taken
_NO_CONSTANT = re.compile("eps|dropout|^p$|norm_type|embed_scale|aux_loss|attention_scaling|jitter")
_ROUTER = re.compile("(Router|Gate|Gating)$")
IN_BFLOAT16 = "computed in bfloat16, all else in float32"
# how torch, transformers and Python refuse a value of a field; what cannot be computed is no option
REFUSED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
PROBE = 4  # tokens that show whether a model computes
_SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class Option:
    """One change of the model. `make` returns a copy with shared weights, which nobody may write to."""

    words: str
    advice: str
    make: Callable[[], PreTrainedModel]
    count: int = 1  # of options that it leaves out
    format: Format | None = None  # of 16 bits, in which it computes one part of the model


def left_out(model: PreTrainedModel) -> dict[str, Option]:
    """Return each change of the model that can be built and gives finite logits, by its description."""
    found: dict[str, Option] = {}
    for option in (*_of_config(model), *_of_norms(model), *_of_vectors(model), *_of_constants(model), *_unsaid(model)):
        if option.words not in found and _computes(option):
            found[option.words] = option
    return found


def _computes(option: Option) -> bool:
    logits = computed(option.make)
    return logits is not None and bool(logits.isfinite().all())


@torch.no_grad()
def computed(make: Callable[[], PreTrainedModel]) -> Tensor | None:
    """Return logits [1, PROBE, V] of some tokens; None if the model cannot be built or its forward fails."""
    try:
        made: Any = make()
        ids = torch.arange(PROBE, device=made.device)[None] % int(made.config.get_text_config().vocab_size)
        logits: Tensor = made(ids, use_cache=False).logits
    except REFUSED as error:
        if is_out_of_memory(error):
            raise
        return None
    return logits


# the configuration


def _of_config(model: PreTrainedModel) -> Iterator[Option]:
    text, read = model.config.get_text_config(), fields_read(model)
    defaults = {f.name: f.default for f in dataclasses.fields(text) if f.default is not dataclasses.MISSING}
    left: dict[str, Change] = {}
    for field, value in sorted(text.to_dict().items()):
        if field in read and not _OTHER_FIELDS.search(field):
            for change in _changes(text, field, value, defaults.get(field)):
                option = _of_fields(model, [change])
                yield option
                if change.is_off and change.field not in left and _computes(option):
                    left[change.field] = change
    for count in sorted({2, len(left)} - {0, 1}):
        for some in itertools.combinations(left.values(), count):
            yield _of_fields(model, some)


def fields_read(model: PreTrainedModel) -> set[str]:
    """Return the names of the configuration's fields that a model reads in its constructor and its forward."""
    config, read = copy.deepcopy(model.config), set[str]()
    text = config.get_text_config()
    kind: Any = type(text)

    def reading(self: object, name: str) -> Any:
        read.add(kind.attribute_map.get(name, name))
        return kind.__getattribute__(self, name)

    text.__class__ = type(kind.__name__, (kind,), {"__getattribute__": reading})
    read.clear()
    with quiet(), torch.no_grad():
        stock: Any = with_config(model, config)
        stock(torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    return read


def not_computed(model: PreTrainedModel) -> dict[str, Any]:
    """Return the architecture's options that the configuration sets but the model's code never reads.

    transformers accepts unknown fields in config.json, and rotary factors that a type of scaling does not use.
    """
    config, read = model.config.get_text_config(), fields_read(model)
    asked = {field: getattr(config, field, None) for field in ASKED}
    if getattr(config, "layer_types", None):  # which say that no layer has a window
        del asked["sliding_window"]
    found = {field: value for field, value in asked.items() if not _is_off(value) and field not in read}
    rope = config.to_dict().get("rope_parameters") or {}
    of_kinds = {key: inner for key, inner in rope.items() if isinstance(inner, dict)} or {"": rope}
    for kind, inner in of_kinds.items():
        for key in [key for key, value in inner.items() if key.endswith("factor") and not _is_off(value)]:
            change = Change(("rope_parameters", *([kind] if kind else []), key), inner[key], None)
            without, whole = computed(_of_fields(model, [change]).make), computed(lambda: model)
            if without is not None and whole is not None and torch.equal(without, whole):
                found[change.field] = inner[key]
    return found


def _is_off(value: object) -> bool:
    return value in (None, False, 0, 1, "default")


@dataclass(frozen=True)
class Change:
    """Another value of a field, or of an entry of a field; the value None removes the entry."""

    path: tuple[str, ...]
    old: Any
    new: Any

    @property
    def field(self) -> str:
        """Return the path with dots, as in `rope_scaling.factor`."""
        return ".".join(self.path)

    @property
    def is_off(self) -> bool:
        """Return whether the change turns off an option of WITHOUT."""
        return self.field in WITHOUT and _is_off(self.new)

    @property
    def words(self) -> str:
        """Describe the change."""
        if self.is_off:
            return f"{WITHOUT[self.field]} ({self.field})"
        if isinstance(self.new, list):
            return f"{self.field} {self._order(self.new)}"
        return f"{self.field} {_short(self.new)} instead of {_short(self.old)}"

    def _order(self, new: list[Any]) -> str:
        if all(x == new[0] for x in new):
            return f"{_short(new[0])} everywhere"
        if new == self.old[::-1]:
            return "in the opposite order"
        return f"moved {'back' if new == [*self.old[1:], self.old[0]] else 'on'} by one place"

    def apply(self, config: PretrainedConfig) -> None:
        """Write the value into the configuration without its validation."""
        if len(self.path) == 1:
            setattr(config, self.path[0], self.new)
            return
        entry = copy.deepcopy(getattr(config, self.path[0]))
        inner = entry
        for key in self.path[1:-1]:
            inner = inner[key]
        if isinstance(inner, PretrainedConfig):
            setattr(inner, self.path[-1], self.new)
        elif self.new is None:
            del inner[self.path[-1]]
        else:
            inner[self.path[-1]] = self.new
        setattr(config, self.path[0], entry)


def _changes(config: PretrainedConfig, field: str, value: Any, default: Any) -> Iterator[Change]:
    """Yield the alternatives of a field; if its value is a dict, the alternatives of each entry."""
    if not isinstance(value, dict):
        yield from (Change((field,), value, other) for other in _others(config, field, value, default))
        return
    if value.get("rope_type", "default") != "default" and "attention_factor" not in value:
        yield Change((field, "attention_factor"), None, 1.0)
    for key, inner in sorted(value.items()):
        if not _OTHER_FIELDS.search(key):
            standard = "default" if key == "rope_type" else 1.0 if key.endswith("factor") else None
            for change in _changes(config, key, inner, standard):
                yield Change((field, *change.path), change.old, change.new)
    nested = {key: inner for key, inner in value.items() if isinstance(inner, dict)}
    for key, inner in nested.items():
        others = (other for name, other in nested.items() if name != key and other != inner)
        yield from (Change((field, key), inner, other) for other in others)


def _others(config: PretrainedConfig, field: str, value: Any, default: Any) -> list[Any]:
    usual = next((list(values) for end, values in _USUAL.items() if field.endswith(end)), None)
    candidates: list[Any] = []
    if isinstance(value, bool):
        candidates = [not value]
    elif isinstance(value, str):
        candidates = [*(ACTIVATIONS if value in ACT2FN else ()), default]
    elif isinstance(value, list) and value:
        kinds = [x for i, x in enumerate(value) if x not in value[:i]]
        whole = kinds if len(kinds) <= FEW else [1.0]  # as a factor of each frequency
        candidates = [[x] * len(value) for x in whole]
        candidates += [[*value[1:], *value[:1]], [*value[-1:], *value[:-1]], value[::-1]] * (len(kinds) <= FEW)
    elif isinstance(value, int | float):
        candidates = [default, *usual, None] if usual else [default, None, 1, 1.0, 0, 0.0]
        if _SCALES.search(field) and getattr(config, "num_attention_heads", None):
            own = config.hidden_size // config.num_attention_heads
            widths = {getattr(config, "head_dim", None) or own, own}
            candidates += [scale for w in widths for scale in (w, w**0.5, w**-0.5, 1 / w)]
        if field.endswith("window"):
            candidates = [None, value - 1, value + 1]
        elif isinstance(value, int) and value <= FEW:
            candidates += [value - 1, value + 1]
    else:
        candidates = [default, *(usual or ())] if value is None else []
    found: list[Any] = []
    for other in candidates:
        if other != value and not any(other == x and type(other) is type(x) for x in found):
            found.append(other)
    return [x for x in found if x is not None or value is not None]


def _of_fields(model: PreTrainedModel, changes: Sequence[Change]) -> Option:
    def make() -> PreTrainedModel:
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"
        with quiet(), warnings.catch_warnings(action="ignore"):  # of matrices without elements
            for change in changes:
                change.apply(config.get_text_config())
            return with_config(model, config)

    said = " and ".join(f"{change.field} {_short(change.old)}" for change in changes)
    words = " and ".join(change.words for change in changes)
    return Option(words, f"compute with {said} on both sides, as config.json says", make, len(changes))


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# norms, biases and vectors


def _kind(name: str) -> str:
    """Return the name with * in place of the index of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _kinds(names: Sequence[str]) -> dict[str, list[str]]:
    """Group names by kind."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_kind(name), []).append(name)
    return found


def _is_norm(module: Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.children())


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's parameters and saved buffers by name, without a copy."""
    return dict(model.state_dict(keep_vars=True))


def _changed(model: PreTrainedModel, change: Callable[[str, Tensor], Tensor | None]) -> Callable[[], PreTrainedModel]:
    """Return a function that copies the model with change(name, weight); if that is None, the weight is shared."""

    def make() -> PreTrainedModel:
        memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
        for name, x in _weights(model).items():
            other = change(name, x.detach())
            if other is not None:
                memo[id(x)] = Parameter(other, False) if isinstance(x, Parameter) else other
        return copy.deepcopy(model, memo)

    return make


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    return _changed(model, lambda name, x: None)()


def _without(model: PreTrainedModel, names: Sequence[str]) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        found = _copy(model)
        for name in names:
            found.set_submodule(name, Identity())
        return found

    return make


def _of_norms(model: PreTrainedModel) -> Iterator[Option]:
    kinds = _kinds([name for name, module in model.named_modules() if _is_norm(module)])
    advice = "compute the norms of the model on both sides"
    parents: dict[str, list[str]] = {}
    for kind in kinds:
        parents.setdefault(kind.rpartition(".")[0], []).append(kind)
    for parent, of in parents.items():
        if len(of) > 1 and ".*." in parent:  # inside a layer: the norms of queries and keys
            yield Option(
                f"without the norms {', '.join(of)}", advice, _without(model, [n for k in of for n in kinds[k]])
            )
    for kind, names in kinds.items():
        yield Option(f"without the norm {kind}", advice, _without(model, names))
    every = [name for names in kinds.values() for name in names]
    layer_norms = [name for name in every if isinstance(model.get_submodule(name), LayerNorm)]
    yield Option("norms that subtract the mean", advice, _wrapped(model, every, _centred))
    yield Option("norms that do not subtract the mean", advice, _wrapped(model, layer_norms, _not_centred))
    scales = {f"{name}.weight" for name in every}
    for words, by in (("norms that scale by weight, not 1 + weight", -1.0), ("by 1 + weight, not weight", 1.0)):
        words = words if by < 0 else f"norms that scale {words}"
        yield Option(words, advice, _changed(model, lambda name, x, by=by: x + by if name in scales else None))  # type: ignore[misc]


def _centred(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x - x.mean(-1, keepdim=True))


def _not_centred(forward: Any, x: Tensor) -> Tensor:
    norm = forward.__self__
    scaled = rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)
    return scaled if norm.bias is None else scaled + norm.bias


def _of_vectors(model: PreTrainedModel) -> Iterator[Option]:
    scales = {f"{name}.weight" for name, module in model.named_modules() if _is_norm(module)}
    kinds = _kinds([name for name, x in _weights(model).items() if x.dim() < 2 and name not in scales])
    advice = "load every tensor of the folder on both sides"
    biases = [kind for kind in kinds if kind.endswith("bias")]
    together: dict[str, list[str]] = {}
    for kind in biases:
        together.setdefault(kind.rpartition(".")[0].rpartition(".")[0], []).append(kind)
    for of in (biases, *together.values()):
        if len(of) > 1:
            names = {name for kind in of for name in kinds[kind]}
            words = f"without {', '.join(of)}" if len(of) < len(biases) else "without any bias"
            yield Option(words, advice, _filled(model, names, 0.0))
    for kind, of_kind in kinds.items():
        for value in (0.0,) if kind in biases else VECTORS:
            words = f"without {kind}" if kind in biases else f"{kind} {value} instead of its values"
            yield Option(words, advice, _filled(model, set(of_kind), value))


def _filled(model: PreTrainedModel, names: set[str], value: float) -> Callable[[], PreTrainedModel]:
    return _changed(model, lambda name, x: torch.full_like(x, value) if name in names else None)


# what no configuration says


class _Narrow(TorchFunctionMode):
    """Run matrix products in bfloat16 while the block runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        narrow = [x.bfloat16() if isinstance(x, Tensor) else x for x in (*args, *(kwargs or {}).values())]
        return func(*narrow).to(args[0].dtype)


def _in_bfloat16(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Narrow():
        return forward(*args, **kwargs)


def _wrapped(
    model: PreTrainedModel, names: Sequence[str], wrapper: Callable[..., Any], *first: Any
) -> Callable[[], PreTrainedModel]:
    """Return a function that copies the model with wrapper(*first, forward, *args) as some modules' forward."""

    def make() -> PreTrainedModel:
        found = _copy(model)
        for name in names:
            module = found.get_submodule(name)
            module.forward = functools.partial(wrapper, *first, module.forward)
        return found

    return make


def _table_in_bfloat16(forward: Callable[..., tuple[Tensor, Tensor]], rotary: Module, *args: Any) -> tuple[Tensor, ...]:
    cos, sin = forward(rotary, *args)
    return cos.bfloat16().to(cos.dtype), sin.bfloat16().to(sin.dtype)


def _frequencies_in_bfloat16(forward: Callable[..., Any], rotary: Module, *args: Any) -> Any:
    for name in _frequencies(rotary):
        exact: Any = rotary._buffers[name]
        rotary._buffers[name] = exact.bfloat16().to(exact.dtype)
    return forward(rotary, *args)


def _frequencies(rotary: Module) -> list[str]:
    return [name for name in rotary._buffers if name.endswith("inv_freq")]


def _rotated(make: Callable[[], PreTrainedModel], names: Sequence[str], wrapper: Callable[..., Any]) -> PreTrainedModel:
    """Return a model whose rotary modules have a class with wrapper(forward, module, *args) as forward.

    In float64 a new object of the same class replaces each rotary module, so the forward of an object would be lost.
    """
    found = make()
    for name in names:
        module = found.get_submodule(name)
        kind: Any = type(module)

        def forward(self: Module, *args: Any, kind: Any = kind, **named: Any) -> Any:
            return wrapper(functools.partial(kind.forward, **named), self, *args)

        module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return found


def _weighted(weigh: Callable[[Tensor, Tensor], Tensor], forward: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Replace a router's weights by weigh(logits [n, E], logits of the chosen experts [n, k]) -> [n, k]."""
    logits, weights, experts = forward(hidden)
    router = forward.__self__
    exact = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, "bias", None))
    return logits, weigh(exact, exact.gather(-1, experts)).to(weights.dtype), experts


_WEIGHTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by the softmax over all experts": lambda every, taken: (taken - every.logsumexp(-1, keepdim=True)).exp(),
    "by the softmax over the experts taken": lambda every, taken: taken.softmax(-1),
    "by the sigmoid": lambda every, taken: taken.sigmoid(),
    "equally": lambda every, taken: torch.full_like(taken, 1 / taken.shape[-1]),
}


class _Nothing(Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


def _of_constants(model: PreTrainedModel) -> Iterator[Option]:
    """Yield changes of constants that the model's code contains or computes from sizes."""
    fields = set(model.config.get_text_config().to_dict())
    numbers: dict[tuple[str, str], list[str]] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and key not in fields and not _NO_CONSTANT.search(key):
                numbers.setdefault((_kind(name), key), []).append(name)
    for (kind, key), names in numbers.items():
        for value in (1.0, math.inf):

            def make(key: str = key, names: Sequence[str] = names, value: float = value) -> PreTrainedModel:
                found = _copy(model)
                for name in names:
                    setattr(found.get_submodule(name), key, value)
                return found

            old = getattr(model.get_submodule(names[0]), key)
            words = f"{kind}.{key} {value} instead of {_short(old)}"
            yield Option(words, f"compute with {kind}.{key} {_short(old)} on both sides", make)


def _unsaid(model: PreTrainedModel) -> Iterator[Option]:
    same: Any = functools.partial(_copy, model)

    def tied() -> PreTrainedModel:
        found = same()
        found.get_output_embeddings().weight = found.get_input_embeddings().weight
        return found

    def scaled(by: Callable[[Tensor], Tensor]) -> Callable[[], PreTrainedModel]:
        def make() -> PreTrainedModel:
            found = same()
            embeddings = found.get_input_embeddings()
            embeddings.embed_scale = by(embeddings.embed_scale)
            embeddings._non_persistent_buffers_set.discard("embed_scale")  # not to be computed again
            return found

        return make

    yield Option("the embedding as output matrix", "use the output matrix of the folder on both sides", tied)
    factor = "multiply embeddings by the same factor on both sides"
    yield Option("embeddings without their factor", factor, scaled(torch.ones_like))
    rounded = "embeddings with their factor rounded to bfloat16"
    yield Option(rounded, factor, scaled(lambda x: x.bfloat16().to(x.dtype)))
    of_dtype = CAUSES["reduced_precision"].mend
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    routers = [name for name, kind in kinds.items() if _ROUTER.search(kind)]
    heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    for part, names in (("router", routers), ("output matrix", heads)):
        if names:
            yield Option(f"{part} {IN_BFLOAT16}", of_dtype, _wrapped(model, names, _in_bfloat16), format="bfloat16")
    rotary = [name for name, module in model.named_modules() if _frequencies(module)]
    cast = _changed(model, lambda name, x: x.bfloat16().to(x.dtype) if x.is_floating_point() else None)
    if rotary:
        table = functools.partial(_rotated, same, rotary, _table_in_bfloat16)
        yield Option(f"rotary table {IN_BFLOAT16}", of_dtype, table, format="bfloat16")
        for words, start in (("rotary frequencies", same), ("weights and rotary frequencies", cast)):
            narrow = functools.partial(_rotated, start, rotary, _frequencies_in_bfloat16)
            yield Option(f"{words} rounded to bfloat16", of_dtype, narrow)
    for words, weigh in _WEIGHTS.items() if routers else ():
        advice = "weigh the experts by the same function of the router's logits on both sides"
        yield Option(f"experts weighed {words}", advice, _wrapped(model, routers, _weighted, weigh))
    shared = [name for name in kinds if re.search(r"shared_experts?$", name)]
    if shared:

        def unshared() -> PreTrainedModel:
            found = _copy(model)
            for name in shared:
                found.set_submodule(name, _Nothing())
            return found

        yield Option("without the shared experts", "compute the shared experts on both sides", unshared)
    yield Option(
        "rotary positions in the other order of pairs",
        "rotate the same pairs on both sides: halves of a head, or neighbours",
        lambda: _patched(same(), "apply_rotary_pos_emb", _other_pairs),
    )
    yield Option(
        "queries with the keys of other heads",
        "let neighbouring heads of queries share a head of keys and values on both sides",
        lambda: _patched(same(), "repeat_kv", lambda repeat: lambda x, count: x.repeat(1, count, 1, 1)),
    )


def _patched(model: PreTrainedModel, name: str, change: Callable[[Any], Any]) -> PreTrainedModel:
    """Replace a function that the model's code calls by name with `change` of it, and return the model."""
    code: Any = sys.modules[type(model).__module__]
    own, forward = getattr(code, name), model.forward
    other = change(own)
    model.config._attn_implementation = "eager"  # torch's fused attention repeats heads by itself

    @functools.wraps(forward)
    def forward_so(*args: Any, **kwargs: Any) -> Any:
        setattr(code, name, other)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(code, name, own)

    model.forward = forward_so
    return model


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
