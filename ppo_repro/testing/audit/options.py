"""The model of an audit with one option of its architecture left out or changed, as another stack may compute it.

Nothing here knows a family. Options are the fields of its configuration that the model reads; its norms, biases and
vectors; and choices that no configuration says: the order of rotary pairs, the factor of embeddings, the output matrix.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Identity, Module, Parameter
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ppo_repro.models.load import quiet
from ppo_repro.models.stock import with_config
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
FEW = 16  # experts and groups, of which one more or less may be taken
_ROUTER = re.compile("(Router|Gate|Gating)$")
IN_BFLOAT16 = "computed in bfloat16, all else in float32"
PROBE = 4  # tokens that show whether a model computes
_SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class Option:
    """One change of the model. `make` returns a copy that shares the weights; nothing may write to them."""

    words: str
    advice: str
    make: Callable[[], PreTrainedModel]


def left_out(model: PreTrainedModel) -> dict[str, Option]:
    """Return by its words each change of the model that can be built and gives finite logits."""
    found: dict[str, Option] = {}
    for option in (*_of_config(model), *_of_norms(model), *_of_vectors(model), *_unsaid(model)):
        if option.words not in found and _computes(option):
            found[option.words] = option
    return found


def _computes(option: Option) -> bool:
    logits = _logits(option.make)
    return logits is not None and bool(logits.isfinite().all())


@torch.no_grad()
def _logits(make: Callable[[], PreTrainedModel]) -> Tensor | None:
    """Return logits of some tokens; None for a model that cannot be built or does not compute."""
    try:
        made: Any = make()
        ids = torch.arange(PROBE, device=made.device)[None] % int(made.config.get_text_config().vocab_size)
        logits: Tensor = made(ids, use_cache=False).logits
    except Exception:  # any value of any field of any model: what does not compute is no option
        return None
    return logits


# the configuration


def _of_config(model: PreTrainedModel) -> Iterator[Option]:
    text, read = model.config.get_text_config(), fields_read(model)
    defaults = {f.name: f.default for f in dataclasses.fields(text) if f.default is not dataclasses.MISSING}
    for field, value in sorted(text.to_dict().items()):
        if field in read and not _OTHER_FIELDS.search(field):
            for path, old, new in _changes(text, field, value, defaults.get(field)):
                yield _of_field(model, path, old, new)


def fields_read(model: PreTrainedModel) -> set[str]:
    """Return the names of the fields of its configuration that a model reads while it is built and computes."""
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
    """Return the options of architecture that the configuration of a model sets and its code does not read.

    transformers keeps fields of config.json that a class does not know, and factors of rotary positions that a type of
    scaling does not have.
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
            path = ("rope_parameters", *([kind] if kind else []), key)
            without, whole = _logits(_of_field(model, path, inner[key], None).make), _logits(lambda: model)
            if without is not None and whole is not None and torch.equal(without, whole):
                found[".".join(path)] = inner[key]
    return found


def _is_off(value: object) -> bool:
    return value in (None, False, 0, 1, "default")


Path = tuple[str, ...]


def _changes(config: PretrainedConfig, field: str, value: Any, default: Any) -> Iterator[tuple[Path, Any, Any]]:
    """Return the path, the value and another value for each of a field's alternatives, in a dict of each entry's."""
    if not isinstance(value, dict):
        yield from (((field,), value, other) for other in _others(config, field, value, default))
        return
    if value.get("rope_type", "default") != "default" and "attention_factor" not in value:
        yield (field, "attention_factor"), None, 1.0
    for key, inner in sorted(value.items()):
        standard = "default" if key == "rope_type" else 1.0 if key.endswith("factor") else None
        for path, old, new in _changes(config, key, inner, standard):
            yield (field, *path), old, new
    nested = {key: inner for key, inner in value.items() if isinstance(inner, dict)}
    for key, inner in nested.items():
        yield from (((field, key), inner, other) for name, other in nested.items() if name != key and other != inner)


def _others(config: PretrainedConfig, field: str, value: Any, default: Any) -> list[Any]:
    usual = next((list(values) for end, values in _USUAL.items() if field.endswith(end)), None)
    candidates: list[Any] = []
    if isinstance(value, bool):
        candidates = [not value]
    elif isinstance(value, str):
        candidates = [*(ACTIVATIONS if value in ACT2FN else ()), default]
    elif isinstance(value, list) and value:
        kinds = list(dict.fromkeys(map(str, value)))
        whole = [[x] * len(value) for x in value if str(x) in kinds]
        turned = [[*value[k:], *value[:k]] for k in (1, -1)]
        swapped = [[value[len(value) - 1 - i] for i in range(len(value))]]
        candidates = [x for i, x in enumerate([*whole, *turned, *swapped]) if x not in whole[:i]]
    elif isinstance(value, int | float):
        candidates = [default, *usual, None] if usual else [default, None, 1, 1.0, 0, 0.0]
        if _SCALES.search(field):
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


def _of_field(model: PreTrainedModel, path: Path, old: Any, new: Any) -> Option:
    def make() -> PreTrainedModel:
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"
        text = config.get_text_config()
        entry = copy.deepcopy(getattr(text, path[0]))
        inner = entry
        for key in path[1:-1]:
            inner = inner[key]
        if len(path) > 1:
            inner[path[-1]] = new
            if new is None:
                del inner[path[-1]]
        with quiet():
            setattr(text, path[0], entry if len(path) > 1 else new)
            return with_config(model, config)

    field = ".".join(path)
    is_off = _is_off(new) and field in WITHOUT
    words = f"{WITHOUT[field]} ({field})" if is_off else f"{field} {_short(new)} instead of {_short(old)}"
    return Option(words, f"compute with {field} {_short(old)} on both sides, as config.json says", make)


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# norms, biases and vectors


def _kind(name: str) -> str:
    """Return the name with * for the index of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _kinds(names: Sequence[str]) -> dict[str, list[str]]:
    """Group names by kind, and the kinds of one attention or one layer of experts together."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_kind(name), []).append(name)
    return found


def _is_norm(module: Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.children())


def _changed(model: PreTrainedModel, change: Callable[[str, Tensor], Tensor | None]) -> Callable[[], PreTrainedModel]:
    """Return what makes a copy with other parameters where `change` gives one, and which shares all others."""

    def make() -> PreTrainedModel:
        memo: dict[int, Any] = {}
        for name, parameter in model.named_parameters():
            other = change(name, parameter.detach())
            memo[id(parameter)] = parameter if other is None else Parameter(other, False)
        return copy.deepcopy(model, memo)

    return make


def _without(model: PreTrainedModel, names: Sequence[str]) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        found = _changed(model, lambda name, x: None)()
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
    scales = {f"{name}.weight" for names in kinds.values() for name in names}
    for words, by in (("norms that scale by weight, not 1 + weight", -1.0), ("by 1 + weight, not weight", 1.0)):
        words = words if by < 0 else f"norms that scale {words}"
        yield Option(words, advice, _changed(model, lambda name, x, by=by: x + by if name in scales else None))  # type: ignore[misc]


def _of_vectors(model: PreTrainedModel) -> Iterator[Option]:
    scales = {f"{name}.weight" for name, module in model.named_modules() if _is_norm(module)}
    kinds = _kinds([name for name, x in model.named_parameters() if x.dim() < 2 and name not in scales])
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
    """Multiplies by matrices in bfloat16."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        narrow = [x.bfloat16() if isinstance(x, Tensor) else x for x in (*args, *(kwargs or {}).values())]
        return func(*narrow).to(args[0].dtype)


def _in_bfloat16(model: PreTrainedModel, names: Sequence[str]) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        found = _changed(model, lambda name, x: None)()
        for name in names:
            module = found.get_submodule(name)
            module.forward = functools.partial(_narrowly, module.forward)
        return found

    return make


def _narrowly(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Narrow():
        return forward(*args, **kwargs)


def _unsaid(model: PreTrainedModel) -> Iterator[Option]:
    same: Any = functools.partial(_changed, model, lambda name, x: None)

    def tied() -> PreTrainedModel:
        found = same()()
        found.get_output_embeddings().weight = found.get_input_embeddings().weight
        return found

    def scaled(by: Callable[[Tensor], Tensor]) -> Callable[[], PreTrainedModel]:
        def make() -> PreTrainedModel:
            found = same()()
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
            yield Option(f"{part} {IN_BFLOAT16}", of_dtype, _in_bfloat16(model, names))
    yield Option(
        "rotary positions in the other order of pairs",
        "rotate the same pairs on both sides: halves of a head, or neighbours",
        lambda: _other_pairs(same()()),
    )


def _other_pairs(model: PreTrainedModel) -> PreTrainedModel:
    """Let rotary positions turn neighbours where the model turns halves of a head, and the other way round."""
    code: Any = sys.modules[type(model).__module__]
    rotate: Callable[..., tuple[Tensor, Tensor]] = code.apply_rotary_pos_emb
    forward = model.forward

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        width, one = cos.shape[-1], torch.zeros_like(q)
        one[..., 0] = 1.0
        swapped, _ = rotate(one, k, torch.zeros_like(cos), torch.ones_like(sin), *args, **kwargs)
        is_halves = not bool(swapped[..., 1].any())
        order = torch.arange(width, device=q.device).view(*((-1, 2) if is_halves else (2, -1))).T.reshape(-1)
        there = torch.cat([order, torch.arange(width, q.shape[-1], device=q.device)])
        rotated = rotate(q[..., there], k[..., there], cos, sin, *args, **kwargs)
        return rotated[0][..., there.argsort()], rotated[1][..., there.argsort()]

    @functools.wraps(forward)
    def forward_so(*args: Any, **kwargs: Any) -> Any:
        code.apply_rotary_pos_emb = turned
        try:
            return forward(*args, **kwargs)
        finally:
            code.apply_rotary_pos_emb = rotate

    model.forward = forward_so
    return model
