"""Variants of the kernels that this machine runs."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from ppo_repro.numerics import build, library

HERE = build.PLATFORMS[platform.system(), platform.machine()]
_FLAGS = frozenset(library.cpu_words("flags"))
ABLE = tuple(variant for variant in HERE.variants if variant.needs <= _FLAGS)
FASTEST = HERE._replace(variants=(library.choose(HERE, _FLAGS, None),))  # what a process chooses by itself


@cache
def opened(variant: build.Variant) -> library.Kernels:
    """The library of a variant; its known answer takes a second."""
    return library.open_library(library.locate(variant, build.SOURCES))


@contextmanager
def using(kernels: library.Kernels) -> Iterator[None]:
    """Let the process compute with these kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda: kernels)
        yield
