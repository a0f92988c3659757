"""How kernels are compiled: every operation rounded as written, the GIL released, machine code kept on disk.

Fast-math flags are used only for sums that are exact in every order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import types
from numba.core import config as numba_config
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from ppo_repro.numerics.kernels.core.cache import KernelCache

F = TypeVar("F", bound=Callable[..., Any])

# a wrapper for calls from C, which nobody makes, would be a tenth of the time of compiling
_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": False, "no_cfunc_wrapper": True}


def kernel(function: F) -> F:
    """Compile at the first call; every operation is rounded by itself, in the order written.

    `error_model="numpy"`: Python's check for a zero divisor would prevent loops from being vectorised.
    """
    compiled = numba.njit(**_OPTIONS)(function)
    if not numba_config.DISABLE_JIT:
        compiled._cache = cache = KernelCache(function)  # Numba has no public way to name another cache
        compiled._compiler.compile = _giving_up(compiled._compiler.compile, cache)
    return compiled


def _giving_up(compile_signature: Callable[..., Any], cache: KernelCache) -> Callable[..., Any]:
    """`compile_signature`, after whose failure no other process waits for what it was to make."""

    def compile_or_give_up(args: object, return_type: object) -> Any:
        try:
            return compile_signature(args, return_type)
        except BaseException:
            cache.give_up()
            raise

    return compile_or_give_up


def kernel_part(function: Callable[..., Any]) -> Any:
    """Like `kernel`, for a function that only kernels call: it is optimised and made into machine code within them."""
    return _part(function, False)


def exact_sum(function: Callable[..., Any]) -> Any:
    """Like `kernel_part`, for sums that are exact in every order.

    The compiler may reorder them and fuse multiply and add. `nsz` stays off, because it may change the sign of a zero.
    """
    return _part(function, {"reassoc", "contract"})


def inline(function: F) -> F:
    """A small function that is inlined into its callers before they are compiled."""
    return numba.njit(inline="always", error_model="numpy")(function)


def _part(function: Callable[..., Any], fastmath: set[str] | bool) -> Any:
    options = {**_OPTIONS, "fastmath": fastmath, "no_cpython_wrapper": True, "pipeline_class": _PartCompiler}
    return function if numba_config.DISABLE_JIT else _Part(numba.njit(**options)(function))


class _Part:
    """What kernels call, but Python cannot: there is no machine code of it alone."""

    def __init__(self, compiled: Any) -> None:
        self.py_func, self.compiled = compiled.py_func, compiled
        self._numba_type_ = types.Dispatcher(compiled)  # which refers to it weakly


class _PartCompiler(Compiler):
    def __init__(self, typing: Any, target: Any, library: None, *others: Any) -> None:
        super().__init__(typing, target, _PartLibrary(target.codegen(), "part"), *others)


class _PartLibrary(JITCodeLibrary):
    """Code that waits to be linked into that of a kernel, where all of it is optimised together."""

    def _optimize_functions(self, ll_module: Any) -> None:
        """Left to the kernel, as `_optimize_final_module`: what is compiled once need not be optimised twice."""
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Left to the kernel."""

    def _finalize_final_module(self) -> None:
        self._finalized = True  # without machine code

    def get_pointer_to_function(self, name: str) -> int:
        """There is none."""
        return 0

    @property
    def codegen(self) -> _NoEnvironment:
        """Asked only to set the environment of machine code."""
        return _NoEnvironment()


class _NoEnvironment:
    def set_env(self, name: str, environment: object) -> None:
        """There is nothing to set it in."""
