"""Variants of the kernels that this machine runs."""

from __future__ import annotations

import platform

from ppo_repro.numerics import build, library

HERE = build.PLATFORMS[platform.system(), platform.machine()]
ABLE = tuple(variant for variant in HERE.variants if variant.needs <= frozenset(library.cpu_words("flags")))
FASTEST = HERE._replace(variants=ABLE[:1])
