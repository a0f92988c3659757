"""Read and write configurations of every kind of run as YAML, with `--set` and relative paths."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from ppo_repro.base.errors import Mistakes, UserError
from ppo_repro.base.latest import LATEST, run_named
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.fields import types_of_fields
from ppo_repro.config.mistakes import mistakes
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import Foreign, PathText, ProgramText, Section
from ppo_repro.config.yaml_text import WITH_EXPONENT, parse_yaml, read_yaml, write_yaml

Kind = Literal["language", "control", "dpo"]
LANGUAGE: Final = "language"  # PPO on a language model
CONTROL: Final = "control"  # PPO on Gymnasium environments
DPO: Final = "dpo"  # DPO on preference pairs

AnyConfig = RunConfig | ControlConfig | DPOConfig
Model = TypeVar("Model", bound=BaseModel)
MODELS: dict[Kind, type[AnyConfig]] = {LANGUAGE: RunConfig, CONTROL: ControlConfig, DPO: DPOConfig}
# Names of fields. A tree is searched by name before it is checked, so a name has one type in all sections.
_TYPES = [pair for model in MODELS.values() for pair in types_of_fields(model)]
PATHS, PROGRAMS, FOREIGN = (
    frozenset(name for name, declared in _TYPES if declared == wanted) for wanted in (PathText, ProgramText, Foreign)
)
# fields by which a kind of file is known, because no other kind has them
GRID: Final = "grid"
KIND_OF_FIELD = {"rollout": LANGUAGE, "environment": CONTROL, "dpo": DPO, "axes": GRID, "base": GRID}
_PACKAGE = Path(__file__).parent.parent


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML configuration of PPO and apply `a.b=c` overrides. Raises UserError if anything is wrong."""
    return build_config(read_tree(path, overrides, (LANGUAGE,)), str(path))


def load_any(path: Path, overrides: Sequence[str] = ()) -> tuple[Kind, AnyConfig]:
    """Return the configuration of a run of any kind, with its kind. Raises UserError if anything is wrong."""
    tree = read_tree(path, overrides, tuple(MODELS))
    kind = kind_of(tree)
    return kind, validated(MODELS[kind], tree, str(path))


def kind_of(tree: object) -> Kind:
    """Return the kind of run of a parsed file, by its fields; LANGUAGE if they do not decide."""
    return next((kind for kind in MODELS if kind == _kind_of_file(tree)), LANGUAGE)


def _kind_of_file(tree: object) -> str | None:
    """Return the kind of a parsed file, by its fields; None if they do not decide."""
    kinds = {KIND_OF_FIELD[name] for name in KIND_OF_FIELD if isinstance(tree, dict) and name in tree}
    return kinds.pop() if len(kinds) == 1 else None


def build_config(tree: Any, source: str) -> RunConfig:
    """Return the PPO configuration of a parsed tree. Raises UserError with a line for every mistake."""
    return validated(RunConfig, tree, source)


def validated(model: type[Model], tree: Any, source: str) -> Model:
    """Check a parsed tree and return it as a `model` with absolute paths, which do not depend on the current folder.

    Raises UserError with a line for every mistake: field, value, what is allowed.
    """
    return as_written(model, from_folder(tree, Path.cwd()), source)


def as_written(model: type[Model], tree: Any, source: str) -> Model:
    """Check a parsed tree and return it as a `model`, with its paths as they are. Raises UserError as `validated`."""
    if not isinstance(tree, dict):
        raise UserError(f"{source}: must be a mapping of fields, found {type(tree).__name__}")
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise Mistakes([f"{source}: {line}" for line in mistakes(model, tree, error)]) from error


def read_tree(path: Path, overrides: Sequence[str] = (), kinds: Sequence[str] = ()) -> Any:
    """Parse a YAML file and apply `a.b=c` overrides. The file must be of one of `kinds`, or of any if it is empty.

    Relative paths in the file start at its folder, paths in overrides at the current folder. Raises UserError if
    anything is wrong.
    """
    file = found(path)
    tree = from_folder(read_yaml(file), file.parent)
    if isinstance(tree, dict):
        apply_overrides(tree, overrides)
    other = _kind_of_file(tree)
    if kinds and other not in (None, *kinds):
        raise UserError(f"{path}: is a {other} file; give it to `ppo-repro {GRID if other == GRID else 'run'}`")
    return tree


def found(path: Path) -> Path:
    """Return the path; `quickstart` is the package's configuration, unless a file here has that name."""
    return path if str(path) != "quickstart" or path.exists() else installed("quickstart.yaml")


def installed(name: str) -> Path:
    """Return a configuration, or a folder of them, of the package: a wheel has it inside, a checkout in experiments."""
    inside = _PACKAGE / "configurations" / name
    return inside if inside.exists() else _PACKAGE.parent / "experiments" / name


def path_fields(tree: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield for every path of an input in a parsed configuration its dotted field, its section, and its name there."""
    return _texts(tree, PATHS)


def _texts(tree: Any, names: frozenset[str], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted field, section and name of every path in a field with one of these names."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in children:
        if name in names and isinstance(value, str) and value and "://" not in value:
            yield f"{prefix}{name}", tree, name
        elif name not in FOREIGN:
            yield from _texts(value, names, f"{prefix}{name}.")


def from_pyyaml(tree: Any) -> Any:
    """Return plain data of PyYAML as `parse_yaml` reads it: texts such as `1e-3` are numbers, dates are texts.

    Texts in a FOREIGN field stay texts. A name may be dotted, as in overrides.
    """
    return _from_pyyaml(tree, is_foreign=False)


def _from_pyyaml(tree: Any, is_foreign: bool) -> Any:
    if isinstance(tree, Mapping):
        return {
            name: _from_pyyaml(value, is_foreign or not FOREIGN.isdisjoint(str(name).split(".")))
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [_from_pyyaml(value, is_foreign) for value in tree]
    if isinstance(tree, date):
        return tree.isoformat()
    return float(tree) if not is_foreign and isinstance(tree, str) and WITH_EXPONENT.fullmatch(tree) else tree


def from_folder(tree: Any, folder: Path) -> Any:
    """Return a parsed configuration whose relative paths start at `folder`; `run: latest` is the newest run here."""
    tree = copy.deepcopy(tree)
    for _, section, name in _texts(tree, PATHS | PROGRAMS):
        if name in PROGRAMS and "/" not in section[name]:
            continue
        is_latest = name == "run" and section[name] == LATEST
        section[name] = os.path.abspath(folder / (Path.cwd() / run_named(LATEST) if is_latest else section[name]))
    return tree


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply `a.b=c` overrides to a parsed configuration. Raises Mistakes with a line for each wrong override."""
    wrong = []
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            wrong.append(f"--set {override}: must be FIELD=VALUE, for example --set ppo.learning_rate=1e-4")
            continue
        try:
            set_field(tree, path, parse_yaml(text))
        except UserError as error:
            wrong.append(f"--set {override}: {error}")
    if wrong:
        raise Mistakes(wrong)


def set_field(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the dotted `path` of a parsed tree to `value`; missing groups and groups that are null are made.

    Raises UserError if the path leads through a plain value.
    """
    node: Any = tree
    *parents, leaf = path.split(".")
    if not leaf or not all(parents) or len(parents) > 20:
        raise UserError("a field is up to 20 names with a dot between them")
    for name in parents:
        child = _entry(node, name) if isinstance(node, list) else node.get(name)
        if child is None and isinstance(node, dict):
            child = node[name] = {}
        if not isinstance(child, dict | list):
            raise UserError(f"'{name}' is a value, not a group of fields")
        node = child
    if isinstance(node, list):
        _entry(node, leaf)
        node[int(leaf)] = value
    else:
        node[leaf] = value


def _entry(values: list[Any], index: str) -> Any:
    """Return an entry of a list by its number from 0. Raises UserError if there is none."""
    if not index.isdecimal() or int(index) >= len(values):
        raise UserError(f"'{index}' must be the number of an entry, from 0 to {len(values) - 1}")
    return values[int(index)]


def dump_yaml(config: Section) -> str:
    """Return the resolved configuration as YAML that reads back to an equal config."""
    return write_yaml(config.model_dump(mode="json"))
