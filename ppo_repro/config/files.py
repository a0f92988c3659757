"""Read configurations of every kind of run from YAML files, check them, and write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ppo_repro.base.errors import Mistakes, UserError
from ppo_repro.config.kinds import CONFIGS, GRID, LANGUAGE, AnyConfig, Kind, kind_of, kind_of_file
from ppo_repro.config.mistakes import mistakes
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import Section
from ppo_repro.config.tree import apply_overrides, from_folder
from ppo_repro.config.yaml_text import read_yaml, write_yaml

Model = TypeVar("Model", bound=BaseModel)
_PACKAGE = Path(__file__).parent.parent


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML configuration of PPO and apply `a.b=c` overrides. Raises UserError if anything is wrong."""
    return build_config(read_tree(path, overrides, (LANGUAGE,)), str(path))


def load_any(path: Path, overrides: Sequence[str] = ()) -> tuple[Kind, AnyConfig]:
    """Return the configuration of a run of any kind, with its kind. Raises UserError if anything is wrong."""
    tree = read_tree(path, overrides, tuple(CONFIGS))
    kind = kind_of(tree)
    return kind, validated(CONFIGS[kind], tree, str(path))


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
    other = kind_of_file(tree)
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


def dump_yaml(config: Section) -> str:
    """Return the resolved configuration as YAML that reads back to an equal config."""
    return write_yaml(config.model_dump(mode="json"))
