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


def reward_path(reward: Reward | str, folder: Path) -> str:
    """`FILE.py:FUNCTION` of a reward: its own file, or for a notebook's function a new one in `folder`.

    The new file has the function's source, imports of the modules it uses, and the plain constants it uses. UserError
    for anything else that it needs, because the file would not compute the same.
    """
    if isinstance(reward, str):
        return reward
    if not isinstance(reward, FunctionType) or reward.__name__ == "<lambda>" or hasattr(reward, "__wrapped__"):
        raise UserError("reward: must be a function made by `def`, without decorators, or 'FILE.py:FUNCTION'")
    name, module = reward.__name__, sys.modules.get(reward.__module__)
    file = getattr(module, "__file__", None)
    if reward.__module__ != "__main__" and file and getattr(module, name, None) is reward:
        return f"{file}:{name}"
    used = inspect.getclosurevars(reward)
    lines = []
    for variable, value in sorted({**used.globals, **used.nonlocals}.items()):
        if isinstance(value, ModuleType):
            lines.append(f"import {value.__name__} as {variable}")
        elif isinstance(value, bool | int | float | str | None) and variable not in used.nonlocals:
            lines.append(f"{variable} = {value!r}")
        elif value is not reward:
            raise UserError(
                f"reward: {name} uses '{variable}' of the notebook; put it inside the function, or write a file and "
                "give reward='FILE.py:FUNCTION'"
            )
    try:
        source = "\n".join([*lines, "", "", textwrap.dedent(inspect.getsource(reward))])
    except (OSError, TypeError) as error:
        raise UserError(f"reward: the source of {name} cannot be read; give reward='FILE.py:FUNCTION'") from error
    path = folder / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(path, source.encode())
    return f"{path}:{name}"
