"""A reward written in a notebook, as a file: a run that is recorded must find its reward again."""

from __future__ import annotations

import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType

from ppo_repro.errors import UserError
from ppo_repro.files import atomic_write

Reward = Callable[[str, str, str], float]
_PLAIN = (bool, int, float, str, type(None))
_ADVICE = "put it inside the function, or write a file and give reward='FILE.py:FUNCTION'"


def reward_path(reward: Reward | str, folder: Path) -> str:
    """`FILE.py:FUNCTION` of a reward: its own file, or for a notebook's function a new one in `folder`.

    The new file holds the function's source, imports of the modules it uses, and the plain constants it uses.
    UserError for anything else that it needs, because the file would not compute the same.
    """
    if isinstance(reward, str):
        return reward
    if not isinstance(reward, FunctionType) or reward.__name__ == "<lambda>" or hasattr(reward, "__wrapped__"):
        raise UserError("reward: must be a function made by `def`, without decorators, or 'FILE.py:FUNCTION'")
    module = sys.modules.get(reward.__module__)
    file = getattr(module, "__file__", None)
    if reward.__module__ != "__main__" and file and getattr(module, reward.__name__, None) is reward:
        return f"{file}:{reward.__name__}"
    source = _source(reward)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    path = folder / f"{reward.__name__}-{digest}.py"
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(path, source.encode())
    return f"{path}:{reward.__name__}"


def _source(reward: FunctionType) -> str:
    try:
        body = textwrap.dedent(inspect.getsource(reward))
    except (OSError, TypeError) as error:
        raise UserError(f"reward: the source of {reward.__name__} cannot be read; {_ADVICE}") from error
    used = inspect.getclosurevars(reward)
    if used.nonlocals:
        raise UserError(f"reward: {reward.__name__} uses '{next(iter(used.nonlocals))}' from around it; {_ADVICE}")
    lines = []
    for name, value in sorted(used.globals.items()):
        if value is reward:
            continue
        if isinstance(value, ModuleType):
            lines.append(f"import {value.__name__} as {name}")
        elif type(value) in _PLAIN:
            lines.append(f"{name} = {value!r}")
        else:
            raise UserError(f"reward: {reward.__name__} uses '{name}' of the notebook; {_ADVICE}")
    return "\n".join([*lines, "", "", body]) if lines else body
