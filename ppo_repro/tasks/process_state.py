"""What a process has once and any code in it can change: read, compared, written back."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ppo_repro.errors import UserError
from ppo_repro.numerics.library import flushes_denormals

# Ctrl-C and SIGTERM are for the run, whatever the user's file does with them
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)


@dataclass(frozen=True)
class _Part:
    read: Callable[[], Any]
    write: Callable[[Any], object]


@dataclass(frozen=True)
class ProcessState:
    """The values of all parts at one moment."""

    values: tuple[Any, ...]
    generators: tuple[Any, ...]


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody removed it
        return ""


def _enter_folder(folder: str) -> None:
    try:
        if folder:
            os.chdir(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be the current directory any more ({error.strerror})") from error


def _write_environment(wanted: dict[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})


def _handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals() if number not in _OURS}


def _write_handlers(handlers: dict[signal.Signals, Any]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread can have changed one
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) != handler:  # None: not installed from Python
            signal.signal(number, handler)


def _write_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None slows no call down


def _write_deterministic(flags: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch cannot put into a word what its newer settings were set to
        return None


def _write_matmul_precision(name: str | None) -> None:
    if name is not None:
        torch.set_float32_matmul_precision(name)


def _field(of: Any, name: str) -> _Part:
    return _Part(lambda: getattr(of, name), lambda value: setattr(of, name, value))


_PARTS = (
    _Part(_folder, _enter_folder),
    _Part(lambda: dict(os.environ), _write_environment),
    _Part(_handlers, _write_handlers),
    _Part(np.geterr, lambda settings: np.seterr(**settings)),
    _Part(torch.get_default_dtype, torch.set_default_dtype),
    _Part(torch.get_default_device, _write_device),
    _Part(torch.is_grad_enabled, torch.set_grad_enabled),
    _Part(torch.get_num_threads, torch.set_num_threads),
    _Part(lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    _Part(flushes_denormals, torch.set_flush_denormal),
    _Part(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _write_deterministic,
    ),
    _field(torch.utils.deterministic, "fill_uninitialized_memory"),
    _field(torch.backends.cudnn, "benchmark"),
    _field(torch.backends.cudnn, "deterministic"),
    _Part(_matmul_precision, _write_matmul_precision),  # before the newer settings, which it changes
    _field(torch.backends, "fp32_precision"),
    _field(torch.backends.mkldnn, "fp32_precision"),
    _field(torch.backends.mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined] # set at import
    _field(torch.backends.cuda.matmul, "fp32_precision"),
)


def read() -> ProcessState:
    """The state now."""
    generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002 - the user's
    return ProcessState(tuple(part.read() for part in _PARTS), generators)


def write(state: ProcessState) -> None:
    """Make the state what it was; only what differs is touched."""
    for part, value in zip(_PARTS, state.values, strict=True):
        if part.read() != value:
            part.write(value)
    python, numpy, torch_state = state.generators
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(torch_state)


def seed_generators(seed: int) -> None:
    """Seed the global generators, which nothing but the user's code uses."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
