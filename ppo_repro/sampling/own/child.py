"""Run the user's class in a child process. `sampler.py` is the run's side.

The settings of the class for its process, for example torch's threads, do not affect the trainer.
"""

from __future__ import annotations

import inspect
import resource
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ppo_repro.sampling.responses import Response, UncutSampling, checked_responses
from ppo_repro.user.file import RefusedError, UserCallable, begin_of, check_call, load_callable

METHODS = {"load": ("folder",), "generate": ("prompts", "sampling", "seeds")}

_methods: dict[str, UserCallable] = {}  # the methods of this process's object


def make(field: str, path: str, parameters: Mapping[str, Any]) -> None:
    """Create the object of `FILE.py:CLASS`.

    Raises UserError if the class or one of its methods is missing or wrong.
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # a server may reserve more memory than it uses
    loaded = load_callable(field, path, (), parameters)
    if not inspect.isclass(loaded.value):
        raise loaded.refused(f"is no class; must be one with {' and '.join(METHODS)}")
    sampler = loaded(**parameters)
    for name, positions in METHODS.items():
        method = getattr(sampler, name, None)
        if method is None:
            raise loaded.refused(f"has no method {name}({', '.join(positions)}); add it")
        whole_name = f"{loaded.name}.{name}"
        described = replace(loaded, name=whole_name, line=begin_of(method, loaded.file) or loaded.line, value=method)
        try:
            check_call(whole_name, method, positions, {})
        except RefusedError as error:
            raise described.refused(str(error).removeprefix(f"{whole_name} ")) from None
        _methods[name] = described


def load(folder: str) -> None:
    """Call the class's `load` with a folder of weights."""
    _methods["load"](folder)


def generate(prompts: list[list[int]], sampling: Mapping[str, Any], seeds: list[int]) -> list[Response]:
    """Return one response per prompt. If the class returns anything else, raises UserError with file and line."""
    method, wanted = _methods["generate"], UncutSampling(**{**sampling, "end_ids": tuple(sampling["end_ids"])})
    value = method(prompts, wanted, seeds)
    try:
        return checked_responses(value, len(prompts), wanted)
    except RefusedError as error:
        raise method.refused(str(error)) from None
