"""Where the machine code of kernels is kept: found again by the text of the sources, not by place and date.

So one compilation serves every checkout, clone and environment of a machine that has the same sources. Numba's own
cache believes its files, checks only the file that defines a kernel, and may write beside the sources.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite.binding import llvm_version_info
from numba.core import config as numba_config
from numba.core import serialize
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target

from ppo_repro.errors import UserError
from ppo_repro.numerics.kernels.core import claims, entries

NUMERICS = Path(__file__).resolve().parents[2]
# Numba's settings that change the machine code, beside those of the processor
_SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK")


def sources_digest(numerics: Path) -> str:
    """SHA-256 over the names and bytes of all files in `kernels` and `arithmetic`.

    Kernels take constants and functions from no other folder of the package.
    """
    digest = hashlib.sha256()
    for folder in ("arithmetic", "kernels"):
        for source in sorted((numerics / folder).rglob("*.py")):
            digest.update(f"{source.relative_to(numerics).as_posix()} {len(source.read_bytes())}\n".encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()


def compiler_digest() -> str:
    """SHA-256 over what makes other machine code of the same sources: versions, and the processor as Numba sees it."""
    versions = (numba.__version__, llvmlite.__version__, llvm_version_info, platform.python_version())
    settings = [getattr(numba_config, name, None) for name in _SETTINGS]
    processor = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((versions, settings, processor)).encode()).hexdigest()


@cache
def cache_folder() -> Path:
    """A folder of its own for each state of sources, compiler and processor.

    UserError where the user has no home folder and names no other.
    """
    given = numba_config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(given).absolute() if given else Path.home() / ".cache"
    except RuntimeError as error:  # a user whom the system does not know
        raise UserError(
            "there is no home folder to keep compiled kernels in; set XDG_CACHE_HOME to a folder of your own"
        ) from error
    state = hashlib.sha256(f"{sources_digest(NUMERICS)} {compiler_digest()}".encode()).hexdigest()
    return base / "ppo_repro" / f"kernels-{state[:16]}"


def _stamp(path: Path) -> tuple[int, int] | None:
    """What tells a file from the one that was there before; None where there is none that can be looked at."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


class KernelCache(_Cache):
    """The machine code of one function, an entry for each signature. Takes the place of Numba's in its dispatcher.

    An entry is a pickle, which could run anything: see `entries` for whose are read.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._claimed: set[tuple[Path, str]] = set()

    @property
    def cache_path(self) -> str:
        return str(cache_folder())

    def load_overload(self, sig: object, target_context: Any) -> CompileResult | None:
        """The compiled function of a signature, or None; then this process has its claim."""
        target_context.refresh()
        folder, name = cache_folder(), self._name(sig)
        before = _stamp(folder / name)
        content = entries.read(folder, name)
        if content is None:
            claims.take(folder, name)
            self._claimed.add((folder, name))
            if _stamp(folder / name) != before:  # another process has written it meanwhile
                content = entries.read(folder, name)
            if content is not None:
                self.give_up()
        return None if content is None else CompileResult._rebuild(target_context, *pickle.loads(content))

    def save_overload(self, sig: object, data: CompileResult) -> None:
        """Keep a compiled function."""
        assert not data.lifted and not data.library.has_dynamic_globals, "it would hold addresses of this process"
        try:
            entries.write(cache_folder(), self._name(sig), serialize.dumps(data._reduce()))
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Release the claims of this function, whether it was compiled or not."""
        while self._claimed:
            claims.release(*self._claimed.pop())

    def _name(self, sig: object) -> str:
        """A file's name: legible, then a digest of what tells this function and signature from others."""
        code = self._function.__code__
        source = Path(inspect.getfile(self._function)).resolve()
        if source.is_relative_to(NUMERICS):
            where, content = source.relative_to(NUMERICS).as_posix(), ""  # the folder stands for the content
        else:
            where, content = str(source), hashlib.sha256(source.read_bytes()).hexdigest()
        cells = [cell.cell_contents for cell in self._function.__closure__ or ()]
        captured = hashlib.sha256(serialize.dumps(cells)).hexdigest() if cells else ""
        key = (where, content, self._function.__qualname__, code.co_firstlineno, captured, str(sig))
        return f"{source.stem}.{self._function.__name__}.{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"

    def enable(self) -> None:
        """It always is."""

    def disable(self) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        raise NotImplementedError
