"""Configurations that between them hold every variant of every section, and walks through their fields."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from ppo_repro.config.files import build_config
from ppo_repro.config.run import RunConfig, Section
from ppo_repro.config.yaml_text import parse_yaml
from tests.support.paths import SMALL

FOLDER = {"kind": "folder", "path": "some/model"}
MIXTURE = {"kind": "tiny", "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
MIXTURE |= {"intermediate_size": 8, "vocab_size": 20, "warm_start_steps": 0, "warm_start_batch_size": 4}
MIXTURE |= {"warm_start_learning_rate": 1e-3, "experts": {"family": "mixtral", "count": 4, "per_token": 2}}
JSONL = {"kind": "jsonl", "path": "some.jsonl", "num_eval_prompts": 3}
EVALUATED = {"num_eval_prompts": 3}
GYM = {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 9, **EVALUATED}
TRAINED = {"kind": "trained_model", "num_pairs": 8, "minibatch_size": 4, "learning_rate": 1e-3}
OWN_PAIRS = {"kind": "trained_model", "pairs": "pairs.jsonl", "minibatch_size": 4, "learning_rate": 1e-3}
ADAPTIVE = {"kind": "adaptive", "target_kl": 0.5}
WEIGHTS = {"kind": "truncated", "level": "sequence"}
REJECTION = [{"kind": "ratio", "low": 0.25, "high": 4.0}, {"kind": "divergence", "above": 1.0}, {"kind": "veto"}]
ROLLOUT = {"prompts_per_iteration": 24, "samples_per_prompt": 2, "max_response_tokens": 6}

# for every variant a configuration that has it, with what the variant needs; no two alike
TREES: dict[str, dict[str, Any]] = {
    "all usual": {},
    "model folder": {"model": FOLDER},
    "experts": {"model": MIXTURE},
    "task jsonl": {"model": FOLDER, "task": {**JSONL, "chat_template": True}},
    "task reasoning_gym": {"model": FOLDER, "task": {**GYM, "chat_template": True}},
    "task python": {"model": FOLDER, "task": {"kind": "python", "path": "task.py", "chat_template": True} | EVALUATED},
    "term format": {"reward": {"terms": [{"kind": "format"}]}},
    "term length": {"reward": {"terms": [{"kind": "exact_match"}, {"kind": "length", "target": 3}]}},
    "term function": {"reward": {"terms": [{"kind": "function", "path": "rewards.py:g"}]}},
    "term trl": {"reward": {"terms": [{"kind": "trl", "path": "rewards.py:h", "conversational": True}]}},
    "term verl": {"reward": {"terms": [{"kind": "verl", "path": "rewards.py:i", "data_source": "openai/gsm8k"}]}},
    "term model": {"reward": {"terms": [{"kind": "model", "path": "some/reward_model"}]}},
    "term trained model": {"reward": {"terms": [TRAINED]}},
    "pairs of one's own": {"reward": {"terms": [OWN_PAIRS]}},
    "kl in reward, adaptive": {"kl": {"controller": ADAPTIVE}},
    "kl in loss": {"kl": {"placement": "loss"}},
    "no kl": {"kl": {"placement": "none"}},
    "group": {"advantages": {"kind": "group"}, "value": {"kind": "none"}, "kl": {"placement": "none"}},
    "head": {"value": {"kind": "head"}},
    "adaptive clip": {"ppo": {"objective": {"kind": "adaptive_clip", "target_kl": 0.01}}},
    "penalty": {"ppo": {"objective": {"kind": "kl_penalty"}}},
    "unclipped": {"ppo": {"objective": {"kind": "unclipped"}}},
    "policy gradient": {"ppo": {"objective": {"kind": "policy_gradient"}}},
    "importance weights": {"ppo": {"ratio_anchor": "old", "importance_weights": WEIGHTS}},
    "rejection": {"ppo": {"rejection": REJECTION}},
    "sequence clip": {"ppo": {"objective": {"kind": "sequence_clip"}}},
    "cispo": {"ppo": {"objective": {"kind": "cispo"}}},
    "clip cov": {"ppo": {"objective": {"kind": "clip_cov"}}},
    "kl cov": {"ppo": {"objective": {"kind": "kl_cov"}}},
    "lora": {"lora": {"rank": 2, "alpha": 4.0}},
    "value lora": {"value": {"learning_rate": 1e-3, "lora": {"rank": 2, "alpha": 4.0}}},
    "lag": {"mismatch": {"sampler": {"lag": 2}}},
    "cut and cold": {"rollout": {**ROLLOUT, "top_p": 0.9, "temperature": 0.7}},
    "rounded": {"mismatch": {"sampler": {"precision": {"weights": "int8", "rest": "bfloat16"}}}},
    "sampler stock": {"mismatch": {"sampler": {"stock": "bfloat16"}}},
    "sglang": {"rollout": {**ROLLOUT, "engine": {"kind": "sglang"}}, "kl": {"placement": "none"}},
    "stock sglang": {"rollout": {**ROLLOUT, "engine": {"kind": "sglang", "numerics": "stock"}}},
    "native": {"numerics": {"mode": "native", "max_context": 24}},
}

Path = tuple[str | int, ...]
Key = tuple[str, str]  # section and field


def tree(name: str = "all usual") -> dict[str, Any]:
    """`small.yaml` with the changes of TREES: other groups than `ppo` are replaced as a whole."""
    found: dict[str, Any] = parse_yaml(SMALL.read_text(encoding="utf-8"))
    changes = copy.deepcopy(TREES[name])
    return {**found, **changes, "ppo": {**found["ppo"], **changes.get("ppo", {})}}


def config_of(name: str) -> RunConfig:
    """That configuration."""
    return build_config(tree(name), "file")


def parts(annotation: Any) -> list[Any]:
    """What an annotation is made of: members of unions and tuples, the types inside `Annotated`."""
    arguments = typing.get_args(annotation)
    if not arguments or typing.get_origin(annotation) is Literal:
        return [annotation]
    return [part for argument in arguments for part in parts(argument)]


def sections_in(field: FieldInfo) -> list[type[Section]]:
    """The sections that a field can hold; none if it is a leaf."""
    return [part for part in parts(field.annotation) if isinstance(part, type) and issubclass(part, Section)]


def leaf_fields(model: type[Section], prefix: str = "") -> dict[Key, tuple[str, FieldInfo]]:
    """Path and field of everything a user can write, in every variant of every section."""
    found = {}
    for name, field in model.model_fields.items():
        for section in sections_in(field):
            found |= leaf_fields(section, f"{prefix}{name}.")
        if not sections_in(field):
            found[model.__name__, name] = prefix + name, field
    return found


def choosers(model: type[Section]) -> set[Key]:
    """The leaves that allow a single word: by them the variant of a section is chosen."""
    return {
        key
        for key, (_, field) in leaf_fields(model).items()
        if typing.get_origin(field.annotation) is Literal and len(typing.get_args(field.annotation)) == 1
    }


def variants(model: type[Section]) -> dict[Key, set[str]]:
    """What each field that holds sections can hold, `NoneType` included."""
    found: dict[Key, set[str]] = {}
    for name, field in model.model_fields.items():
        sections = sections_in(field)
        if sections:
            nothing = {NoneType.__name__} if NoneType in parts(field.annotation) else set()
            found[model.__name__, name] = {section.__name__ for section in sections} | nothing
        for section in sections:
            found |= variants(section)
    return found


@dataclass(frozen=True)
class Held:
    """A section, or nothing, where a configuration can hold a section."""

    path: Path  # as it is written
    holder: Key  # by which section and field it is held
    section: Section | None


def held(section: Section, path: Path = ()) -> Iterator[Held]:
    """Everything below a section that is held as a section."""
    for name, field in type(section).model_fields.items():
        if not sections_in(field):
            continue
        value = getattr(section, name)
        entries = [((*path, name), value)]
        if isinstance(value, tuple):
            entries = [((*path, name, index), item) for index, item in enumerate(value)]
        for place, item in entries:
            yield Held(place, (type(section).__name__, name), item)
            if item is not None:
                yield from held(item, place)


@dataclass(frozen=True)
class Leaf:
    """A field that a user can write, in one configuration."""

    path: Path
    key: Key
    annotation: Any
    value: Any  # as in JSON
    is_written: bool  # not left out because it has its default


def leaves(config: RunConfig) -> Iterator[Leaf]:
    """All of them."""
    whole = config.model_dump(mode="json")
    below = [((), config), *((there.path, there.section) for there in held(config) if there.section is not None)]
    for path, section in below:
        # a field that is not written down at its default has it
        usual = {name: type(section).model_fields[name].default for name in section.absent_at_default}
        written_down = section.model_dump(mode="json")
        values = {**to_jsonable_python(usual), **written_down}
        for name, field in type(section).model_fields.items():
            if not sections_in(field):
                key = type(section).__name__, name
                yield Leaf((*path, name), key, field.annotation, values[name], has(whole, (*path, name)))


def has(node: Any, path: Path) -> bool:
    """Whether a path is in a tree: a section that has its default may be left out as a whole."""
    for step in path:
        if isinstance(node, dict) and step not in node:
            return False
        node = node[step]
    return True


def written(path: Path) -> str:
    """As an error message names it."""
    return ".".join(str(step) for step in path)


def at(node: Any, path: Path) -> Any:
    """The value at a path of a tree."""
    for step in path:
        node = node[step]
    return node


def with_value(node: Any, path: Path, value: Any) -> Any:
    """A copy of a tree in which one value is another one."""
    step, *rest = path
    copied = copy.copy(node)
    below = node.get(step, {}) if isinstance(node, dict) else node[step]  # a section may be left out
    copied[step] = with_value(below, tuple(rest), value) if rest else value
    return copied
