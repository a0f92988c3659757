"""Execute a user's Python file and the modules beside it, in any process, and report mistakes by file and line."""

from __future__ import annotations

import builtins
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ppo_repro.base.beside import is_beside
from ppo_repro.base.errors import FunctionFailed, UserError, is_out_of_memory
from ppo_repro.base.output import shown

_PREFIX = "ppo_repro_user_"
_numbers = count()


class RefusedError(Exception):
    """A user's function has a wrong signature or returned a wrong value. The message tells what is allowed."""


@dataclass(frozen=True)
class Named:
    """A function or class of a user's file."""

    field: str  # of the configuration, which names the function
    file: Path
    name: str
    line: str  # `:LINE`, where the function begins; "" if unknown

    @property
    def where(self) -> str:
        """Return field, file and line as text."""
        return f"{self.field}: {self.file}{self.line}"


@dataclass(frozen=True)
class UserCallable(Named):
    """A function or class of a user's file, called in this process."""

    value: Callable[..., Any]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the user's function. Raises UserError, naming the line of the file, if it raises."""
        return self.guarded(self.value, *arguments, **named)

    def guarded(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call `call`, such as a method of an object of this class, as `__call__` does.

        Ctrl-C, a UserError and a lack of memory pass unchanged.
        """
        try:
            with redirect_stdout(sys.stderr):
                return call(*arguments, **named)
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit of the user's code included
            if is_out_of_memory(error):
                raise
            file = str(self.file)
            raise self.refused(f"raised {described(error, file)}", line_of(error, file)) from error

    def refused(self, what: str, line: str = "") -> FunctionFailed:
        """Return an error that names field, file, line (by default the function's first) and the mistake `what`."""
        return FunctionFailed(f"{self.field}: {self.file}{line or self.line}: {self.name} {what}", self.field)


def file_and_name(field: str, path: str) -> tuple[Path, str]:
    """Split `FILE.py:NAME` into file and name. Raises UserError for another form, or if there is no such file."""
    file, colon, name = path.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise UserError(f"{field} = {path!r}: must be FILE.py:NAME, with the name of a function or class in the file")
    if not Path(file).is_file():
        raise UserError(f"{field} = {path!r}: there is no file {file}")
    return Path(file), name


def load_callable(
    field: str, path: str, positions: Sequence[str], parameters: Mapping[str, Any] | None = None
) -> UserCallable:
    """Execute the file of `path`, which is `FILE.py:NAME`, in this process and return the function or class NAME.

    Raises UserError, with field, file and line, if the file fails to load, has no such name, or NAME cannot be called
    with arguments named `positions` and `parameters`.
    """
    file, name = file_and_name(field, path)
    try:
        module = execute(file)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit of the user's code included
        raise UserError(not_loaded(field, str(file), error)) from error
    value = getattr(module, name, None)
    if value is None:
        raise UserError(f"{field} = {path!r}: {file} has no {name}")
    loaded = UserCallable(field, file, name, begin_of(value, file), value)
    try:
        check_call(name, value, positions, parameters or {})
    except RefusedError as error:
        raise UserError(f"{loaded.where}: {error}") from None
    return loaded


def not_loaded(field: str, file: str, error: BaseException) -> str:
    """Return a line about an error of a file that was executed."""
    return f"{field}: {file}{line_of(error, file)} fails to load ({described(error, file)})"


def require_function(name: str, value: Any) -> None:
    """Raise RefusedError unless a value of a user's file can be called."""
    if not callable(value):
        raise RefusedError(f"{name} is no function; make it one or rename it")


def check_call(name: str, value: Any, positions: Sequence[str], parameters: Mapping[str, Any]) -> None:
    """Raise RefusedError unless a function accepts the arguments it will be called with."""
    require_function(name, value)
    gets = ", ".join([*positions, *(f"{parameter} by name" for parameter in parameters)]) or "nothing"
    try:
        inspect.signature(value).bind(*positions, **parameters)
    except TypeError as error:
        raise RefusedError(f"{name} cannot be called ({error}); it gets {gets}") from None
    except ValueError:  # some built-in functions have no signature
        return


def begin_of(value: object, file: Path) -> str:
    """Return `:LINE`, the first line of a function or class; "" if the file does not contain it."""
    if inspect.isclass(value):
        try:
            return f":{inspect.getsourcelines(value)[1]}"
        except (OSError, TypeError):
            return ""
    code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    return f":{code.co_firstlineno}" if code is not None and code.co_filename == str(file) else ""


def execute(file: Path) -> ModuleType:
    """Execute a file as it is now and return its module. Raises what the file raises.

    Its imports are looked up beside the file first, then on Python's path. Each file has its own modules, so that the
    folders of two files may have different modules of one name. Folders on sys.path cannot do this, because sys.modules
    has one module of a name. So the file gets an `__import__` that turns `helper` into `ppo_repro_user_N.helper`.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    importlib.invalidate_caches()
    name = f"{_PREFIX}{next(_numbers)}"
    module = ModuleType(name)
    module.__file__, module.__path__, module.__package__ = str(file), [str(file.parent)], name
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _importer(name, file.parent)}
    sys.modules[name] = module  # dataclasses look up their module here, and imports the path of modules beside it
    with redirect_stdout(sys.stderr):
        exec(_compiled(str(file)), module.__dict__)
    return module


def _importer(package: str, folder: Path) -> Callable[..., ModuleType]:
    """Return the `__import__` for the files in a folder, whose modules are loaded below `package`."""

    def find(
        name: str,
        namespace: Mapping[str, Any] | None = None,
        local: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        first = name.partition(".")[0]
        if level or not is_beside(folder, first):
            return builtins.__import__(name, namespace, local, fromlist, level)
        module = builtins.__import__(f"{package}.{name}", namespace, local, fromlist)
        return module if fromlist else sys.modules[f"{package}.{first}"]

    return find


class _Finder(MetaPathFinder):
    """A finder of the modules beside a user's file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """A loader that reads a module's current source, and gives it the imports of the user's file beside it."""

    def get_code(self, fullname: str) -> CodeType:
        return _compiled(str(self.path))

    def exec_module(self, module: ModuleType) -> None:
        user = sys.modules[module.__name__.partition(".")[0]]
        module.__dict__["__builtins__"] = user.__dict__["__builtins__"]
        super().exec_module(module)


def _compiled(file: str) -> CodeType:
    return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)


def raised_by_user(error: BaseException) -> str | None:
    """Return `FILE:LINE` of the last line of a user's file in the traceback of an error; None without such a line."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = zip(frames, traceback.extract_tb(error.__traceback__), strict=True)
    users = [line for frame, line in lines if str(frame.f_globals.get("__name__")).startswith(_PREFIX)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else None


def line_of(error: BaseException, file: str) -> str:
    """Return `:LINE`, the last line of the file in the traceback of an error; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f":{lines[-1]}" if lines else ""


def uncopied(before: Collection[str]) -> list[str]:
    """Return the files of modules that `before` lacks, and that are neither installed nor beside the user's file."""
    homes = Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[1]
    new = {name: module for name, module in list(sys.modules.items()) if name not in before}
    files = [getattr(module, "__file__", None) for name, module in new.items() if not name.startswith(_PREFIX)]
    # some modules of torch have a bare name as `__file__`
    paths = [Path(file) for file in files if file and "site-packages" not in file and Path(file).is_absolute()]
    return sorted(str(file) for file in paths if not any(map(file.is_relative_to, homes)))


def described(error: BaseException, file: str | None = None) -> str:
    """Return type and message of an error on one line, with the version of Python or advice on a missing module.

    The line ends with `, NAME.py:LINE` if a module beside `file` raised the error.
    """
    try:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
    except BaseException:  # the message is made by the user's code
        message = ""
    name = type(error).__name__ + (f" in Python {sys.version.split()[0]}" if isinstance(error, SyntaxError) else "")
    advice = "; install it, or put it beside the file" if isinstance(error, ModuleNotFoundError) else ""
    place = "" if file is None else _place_beside(error, file)
    return (f"{name}: {shown(message)}{advice}" if message else name) + place


def _place_beside(error: BaseException, file: str) -> str:
    frames, folder = traceback.extract_tb(error.__traceback__), Path(file).parent
    name, line = (frames[-1].filename, frames[-1].lineno) if frames else ("", 0)
    if isinstance(error, SyntaxError) and error.filename:
        name, line = error.filename, error.lineno
    is_beside = name != file and Path(name).is_relative_to(folder)
    return f", {Path(name).relative_to(folder)}:{line}" if is_beside else ""
