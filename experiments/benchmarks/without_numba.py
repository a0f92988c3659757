"""A stand-in for Numba on a machine that lacks it: kernels for CPUs can be imported, and any call of one is an error.

The eager code and Triton's kernels never call them, so a card can be compared with the CPU's eager code without Numba.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar

NAMES = ("numba", "llvmlite")


class _Kind(type):
    """What any name in Numba is: a class with every attribute, which decorates, is subclassed and is called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return Absent

    def __getitem__(cls, _: Any) -> Any:
        return Absent

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Absent(metaclass=_Kind):
    """Something of Numba, which is not installed."""


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        is_ours = fullname.partition(".")[0] in NAMES
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> bool:
    """Whether Numba is missing and this takes its place, from now on in this process."""
    if importlib.util.find_spec("numba") is not None:
        return False
    sys.meta_path.insert(0, _Finder())
    return True
