"""Variants of the kernels that this machine runs, and the one for AMX with emulated instructions."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ppo_repro.numerics import build, library

HERE = build.PLATFORMS[platform.system(), platform.machine()]
_FLAGS = frozenset(library.cpu_words("flags"))
ABLE = tuple(variant for variant in HERE.variants if variant.needs <= _FLAGS)
FASTEST = HERE._replace(variants=(library.choose(HERE, _FLAGS, None),))  # what a process chooses by itself
_AMX = Path(__file__).with_name("emulated_amx.h")
EMULATED = build.Variant("amx_emulated", (*FASTEST.variants[0].flags, "-include", str(_AMX)))
EVERY = (*ABLE, EMULATED)


@cache
def opened(variant: build.Variant) -> library.Kernels:
    """The library of a variant, of an emulated one compiled now; its known answer takes a second."""
    if variant in ABLE:
        return library.open_library(library.locate(variant, build.SOURCES))
    with TemporaryDirectory() as folder:
        (path,) = build.compile_variants(HERE._replace(variants=(variant,)), Path(folder))
        return library.open_library(path)


@contextmanager
def using(kernels: library.Kernels) -> Iterator[None]:
    """Let the process compute with these kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda: kernels)
        yield
