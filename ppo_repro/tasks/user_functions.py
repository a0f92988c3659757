"""The user's functions: loaded from their file, called in containment, their mistakes named by file and line."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from ppo_repro.errors import UserError
from ppo_repro.output import shown
from ppo_repro.tasks import process_state
from ppo_repro.tasks.adapters import as_it_is
from ppo_repro.tasks.containment import Contained, contained
from ppo_repro.tasks.function_path import parse
from ppo_repro.tasks.process_state import ProcessState

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Texts:
    """What a function judges; the key names the prompt."""

    key: str
    prompt: str
    response: str
    answer: str
    fields: str = "{}"  # the prompt's other fields, a JSON object


@dataclass(frozen=True)
class UserFunction:
    """A function of the user's file."""

    field: str  # of the configuration
    file: Path
    line: int  # where it begins; 0 where that is unknown
    function: Callable[..., object]
    state: ProcessState  # of the process as the file left it; every call begins in it
    takes_fields: bool  # whether it has a parameter `fields`

    def __call__(self, texts: Texts) -> object:
        more = {"fields": json.loads(texts.fields)} if self.takes_fields else {}
        return self.function(texts.prompt, texts.response, texts.answer, **more)


def load(
    field: str, function: str, adapted: Callable[[Callable[..., object]], Callable[..., object]] = as_it_is
) -> UserFunction:
    """The function of `FILE.py:FUNCTION`, `adapted`; UserError names what is wrong with it, by file and line."""
    file, name = parse(field, function)

    def describe(error: BaseException) -> str:
        line = line_of(error, file)
        return f"{field}: {file}{f':{line}' if line else ''} fails to load ({described(error)})"

    with contained() as inside:
        module = inside.call(lambda: module_of(field, file), describe)
        loaded = inside.call(lambda: getattr(module, name, None), describe)
        if not callable(loaded):
            raise UserError(f"{field} = {function!r}: {file} has no function {name}")
        line = inside.call(lambda: first_line(loaded, file), describe)
        called = adapted(loaded)
        takes_fields = inside.call(lambda: "fields" in _parameters(called), describe)
        found = UserFunction(field, file, line, called, process_state.read(), takes_fields)
        refusal = inside.call(lambda: _refused_arguments(called, takes_fields), describe)
    if refusal:
        raise UserError(f"{field}: {_where(found)}: {name} cannot be called with prompt, response, answer ({refusal})")
    return found


def _parameters(function: Callable[..., object]) -> Collection[str]:
    """The names of the function's parameters; none where it has no signature to look at."""
    try:
        return inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):  # some built-in functions
        return ()


def _refused_arguments(function: Callable[..., object], takes_fields: bool) -> str:
    """Why the function cannot be called with three texts; empty where it can, or has no signature to look at."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions
        return ""
    try:
        signature.bind("prompt", "response", "answer", **({"fields": {}} if takes_fields else {}))
    except TypeError as error:
        return str(error)
    return ""


def module_of(field: str, file: Path) -> ModuleType:
    """Execute the file: always its present text, whose digest is recorded, never what an earlier process compiled."""
    name = "ppo_repro_user_" + re.sub(r"\W", "_", field)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in the user's file look up their module here
    exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), module.__dict__)
    return module


def first_line(function: Callable[..., object], file: Path) -> int:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_firstlineno if code is not None and code.co_filename == str(file) else 0


def _where(function: UserFunction) -> str:
    return f"{function.file}:{function.line}" if function.line else str(function.file)


def line_of(error: BaseException, file: Path) -> int:
    """The last line of the file that the error went through; 0 where it went through none."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 0 for frame in reversed(frames) if frame.filename == str(file)), 0)


def described(error: BaseException) -> str:
    """Type and message on one line."""
    try:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
    except BaseException:  # the message is made by the user's code
        message = ""
    name = type(error).__name__
    return f"{name}: {shown(message)}" if message else name


def _of_prompt(texts: Texts) -> str:
    return f"prompt key '{shown(texts.key)}'"


def numbers(function: UserFunction, rows: Sequence[Texts], seed: int | None = None) -> list[float]:
    """The function's number for each row, in this order; `seed`: of the global generators, else as the file left them.

    UserError names field, file, line and prompt key where the function raises anything, or returns what `number`
    refuses. Ctrl-C and SIGTERM of the user pass.
    """
    with contained(function.state) as inside:
        if seed is not None:
            process_state.seed_generators(seed)
        return [_ask(inside, function, texts) for texts in rows]


def _ask(inside: Contained, function: UserFunction, texts: Texts) -> float:
    def compute() -> float:
        return number(function(texts))

    def describe(error: BaseException) -> str:
        place = f"{function.field}: {function.file}:{line_of(error, function.file) or function.line}"
        if isinstance(error, NotANumber):
            return f"{place}: the function returned {error} for {_of_prompt(texts)}; must be {ALLOWED}"
        return f"{place}: the function raised {described(error)}; {_of_prompt(texts)}"

    return inside.call(compute, describe)


ALLOWED = "a finite number within float32 (3.4e+38)"


class NotANumber(Exception):
    """A value that is no score; the message shows value and type."""


def number(value: object) -> float:
    """The float that is exactly `value`: a bool, int, float, Fraction or Decimal, a scalar of NumPy, a 0-d tensor.

    Raises for any other type, for NaN and infinities, for what no float is, and beyond float32.
    """
    plain = value
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and not value.shape:
        plain = value.item()
    if not isinstance(plain, Real | Decimal):
        raise NotANumber(_value(value))
    try:
        converted = float(plain)
    except (OverflowError, ValueError):
        raise NotANumber(_value(value)) from None
    if not abs(converted) <= FLOAT32_MAX:
        raise NotANumber(_value(value))
    if converted != plain:
        raise NotANumber(f"{_value(value)}, which no float64 is exactly")
    return converted


def _value(value: object) -> str:
    """A value and its type, for a message."""
    kind = type(value).__name__
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor | np.ndarray) and value.shape:
        return f"a {kind} of shape {tuple(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an int of {value.bit_length()} bits"
    return f"{shown(repr(value))} of type {kind}"


def check_repeats(function: UserFunction, rows: Sequence[Texts]) -> None:
    """Call the function twice for each row; UserError where the scores differ.

    The second time in the opposite order and with other seeds of the global generators, so that neither state kept
    between calls nor an unseeded draw gives the same scores by chance.
    """
    first = numbers(function, rows, seed=1)
    second = numbers(function, rows[::-1], seed=2)[::-1]
    for texts, one, other in zip(rows, first, second, strict=True):
        if one != other:
            raise UserError(
                f"{function.field}: {_where(function)}: the function returned {one!r} and then {other!r} for the same "
                f"input ({_of_prompt(texts)}, response '{shown(texts.response)}'); "
                "a score must follow from prompt, response and answer alone"
            )
