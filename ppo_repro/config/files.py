"""Configurations from YAML and to YAML: numbers parse as numbers, every mistake is one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.engine import SGLangServers
from ppo_repro.config.reward import FunctionReward, RewardModelFolder
from ppo_repro.config.run import JsonlTask, ModelFolder, RolloutConfig, RunConfig
from ppo_repro.config.section import Section
from ppo_repro.errors import UserError

Model = TypeVar("Model", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `1e-3` is a number, `no` and `on` are words, a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"line {key.start_mark.line + 1}: a field name must be a word, not a list or group")
            if key.value in names:
                raise UserError(f"line {key.start_mark.line + 1}: field '{key.value}' is given twice; keep one")
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))  # PyYAML reads 010 as octal


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|false)$", "tf"),
    ("null", r"^(?:null|~|)$", "n~\0"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
):
    for _character in _first:
        _Loader.yaml_implicit_resolvers.setdefault("" if _character == "\0" else _character, []).append(
            (f"tag:yaml.org,2002:{_tag}", re.compile(_pattern))
        )


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a YAML 1.1 reader or `_Loader` would read as something else."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML's other styles lose line breaks such as U+0085
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


for _character, _resolvers in _Loader.yaml_implicit_resolvers.items():
    for _tag, _regexp in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _regexp, [_character])
_Dumper.add_representer(str, _Dumper.represent_str)


def parse_yaml(text: str) -> Any:
    """Parse YAML with numbers as numbers; raises UserError with the line on bad syntax."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        reason = " ".join(str(getattr(error, "problem", error)).split())
        raise UserError(f"{where}not valid YAML: {reason}") from error
    except ValueError as error:  # the value does not fit its tag, as in `!!int x`
        raise UserError(f"not valid YAML: {error}") from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"--set {override}: must be FIELD=VALUE, for example --set ppo.learning_rate=1e-4")
    try:
        value = parse_yaml(text)
        if path == ENGINE_KIND:
            # another engine has other fields, and a recorded run may be repeated with either
            path, value = path.removesuffix(".kind"), _of_kind(tree, value)
        set_field(tree, path, value)
    except UserError as error:
        raise UserError(f"--set {override}: {error}") from error


def _of_kind(tree: dict[str, Any], kind: Any) -> dict[str, Any]:
    rollout = tree.get("rollout")
    engine = rollout.get("engine") if isinstance(rollout, dict) else None
    return {**engine, "kind": kind} if isinstance(engine, dict) and engine.get("kind") == kind else {"kind": kind}


def set_field(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put `value` at the dotted `path` of a parsed tree; raises UserError where a value is in the way."""
    node = tree
    *parents, leaf = path.split(".")
    for name in parents:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise UserError(f"'{name}' is a value, not a group of fields")
        node = child
    node[leaf] = value


def absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths: a recorded one must not depend on the current directory."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute())

    model, task, reward = config.model, config.task, config.reward
    if isinstance(model, ModelFolder):
        model = model.model_copy(update={"path": absolute(model.path)})
    if isinstance(task, JsonlTask):
        task = task.model_copy(update={"path": absolute(task.path)})
    terms = tuple(
        term.model_copy(update={"path": absolute(term.path)})
        if isinstance(term, FunctionReward | RewardModelFolder)
        else term
        for term in reward.terms
    )
    potential = None if reward.potential is None else absolute(reward.potential)
    reward = reward.model_copy(update={"terms": terms, "potential": potential})
    changes = {"model": model, "task": task, "reward": reward, "rollout": _absolute_python(config.rollout)}
    return config.model_copy(update=changes)


def _absolute_python(rollout: RolloutConfig) -> RolloutConfig:
    """SGLang's interpreter as an absolute path; a name without a folder is looked up on PATH."""
    engine = rollout.engine
    if not isinstance(engine, SGLangServers) or engine.python is None or "/" not in engine.python:
        return rollout
    python = str(Path(engine.python).absolute())
    return rollout.model_copy(update={"engine": engine.model_copy(update={"python": python})})


ENGINE_KIND = "rollout.engine.kind"
# the words that choose the variant of a field
VARIANTS = {
    "engine": ("torch", "sglang"),
    "model": ("tiny", "folder"),
    "task": ("arithmetic", "jsonl"),
    "kl": ("reward", "loss", "none"),
    "controller": ("fixed", "adaptive"),
    "advantages": ("gae", "group"),
    "value": ("separate", "head", "none"),
    "objective": ("clip", "adaptive_clip", "kl_penalty", "unclipped", "policy_gradient"),
    "terms": ("exact_match", "format", "length", "function", "model", "trained_model"),
}


def _field(steps: list[str]) -> str:
    """The last name of a path; indices of lists are skipped."""
    return next((step for step in reversed(steps) if not step.isdigit()), "")


def _chooser(error: ErrorDetails) -> str:
    return str(error["ctx"]["discriminator"]).strip("'")


def describe(error: ValidationError, source: str) -> str:
    """One line: field path, its value, what is allowed, what to do."""
    first, *rest = error.errors(include_url=False)
    steps = [str(step) for step in first["loc"]]
    # pydantic names the chosen variant of a union in the path; users do not write it
    path = ".".join(s for i, s in enumerate(steps) if not (i and s in VARIANTS.get(_field(steps[:i]), ())))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        text = f"{path}: missing; add it"
    elif first["type"] == "extra_forbidden":
        text = f"{path}: unknown field; remove it or correct its name"
    elif first["type"] == "union_tag_invalid":
        text = f"{path}.{_chooser(first)} = {first['ctx']['tag']!r}: must be one of {first['ctx']['expected_tags']}"
    elif first["type"] == "union_tag_not_found":
        text = f"{path}.{_chooser(first)}: missing; add it"
    elif not path:
        text = message
    elif isinstance(first["input"], dict):
        text = f"{path}: {message}"
    else:
        text = f"{path} = {first['input']!r}: {message[0].lower()}{message[1:]}"
    more = f" (and {len(rest)} more)" if rest else ""
    return f"{source}: {text}{more}"


def validated(kind: type[Model], tree: Any, source: str) -> Model:
    """A parsed tree as a model; raises UserError naming field, value and what is allowed."""
    if not isinstance(tree, dict):
        raise UserError(f"{source}: must be a mapping of fields, found {type(tree).__name__}")
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UserError(describe(error, source)) from error


def build_config(tree: Any, source: str) -> RunConfig:
    """The configuration of a run from a parsed tree; raises UserError as `validated` does."""
    return validated(RunConfig, tree, source)


def read_tree(path: Path, overrides: Sequence[str] = ()) -> Any:
    """Parse a YAML file and apply `a.b=c` overrides; raises UserError on anything wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text; give the path of a YAML file") from error
    try:
        tree = parse_yaml(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if isinstance(tree, dict):
        for override in overrides:
            _apply_override(tree, override)
    return tree


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML configuration and apply `a.b=c` overrides; raises UserError on anything wrong."""
    return absolute_paths(build_config(read_tree(path, overrides), str(path)))


def load_dpo_config(path: Path, overrides: Sequence[str] = ()) -> DPOConfig:
    """`load_config` for a DPO configuration."""
    config = validated(DPOConfig, read_tree(path, overrides), str(path))
    return config.model_copy(update={"run": str(Path(config.run).absolute())})


def describe_value(value: Any) -> str:
    """A value as one would write it in a YAML file, on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def dump_yaml(config: Section) -> str:
    """The resolved configuration as YAML that reads back to an equal config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
