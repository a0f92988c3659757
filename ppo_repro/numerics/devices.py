"""Choose the kernels for a device: the kernels of this CPU, or of one NVIDIA GPU.

The library for a GPU (`c/gpu/host.c`) has the functions of the CPU's library. Tensors are on the GPU. The calling
thread only starts kernels. A process computes on one GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ppo_repro.base.errors import UserError
from ppo_repro.numerics import build, library
from ppo_repro.numerics.interface import CPU, Struct, ffi
from ppo_repro.numerics.library import KNOWN_ANSWERS, Kernels

DRIVER = "libcuda.so.1"
_INSTEAD = "take layout.device = cpu"


class Card(Kernels):
    """Functions of `c/interface.h` on one GPU. Every call uses torch's current stream."""

    def __init__(self, functions: Any, facts: Any, index: int) -> None:
        """Wrap the functions of the GPU's library. `facts` has name, capability and driver of the GPU."""
        super().__init__(functions)
        self.index = index
        self.name = ffi.string(facts.name).decode()
        self.capability = f"{facts.major}.{facts.minor}"
        self.driver = f"CUDA {facts.driver // 1000}.{facts.driver % 1000 // 10}"

    def stream(self) -> Struct:
        """Return torch's current stream."""
        return ffi.cast("void *", torch.cuda.current_stream(self.index).cuda_stream)

    def free_bytes(self) -> tuple[int, int]:
        """Return the free bytes and the total bytes of the GPU."""
        numbers = ffi.new("uint64_t[2]")
        self.gpu_memory(numbers, numbers + 1)
        return int(numbers[0]), int(numbers[1])


class _Devices:
    """The GPU of this process: only `card` opens it, and it stays open until the process ends."""

    card: Card | None = None


_open = _Devices()


def locate(folder: Path) -> tuple[Path, str]:
    """Return the library for GPUs and the text of its kernels. Raises UserError if they are missing or old."""
    driver, kernels = folder / build.card_library_name(), folder / build.ptx_name()
    for path in (driver, kernels):
        if not path.exists():
            others = any(folder.glob(f"gpu-*{path.suffix}"))
            why = "was built from other sources" if others else "is missing"
            raise UserError(f"layout.device = cuda: {path.name} {why}; {library.MEND}")
    return driver, kernels.read_text()


def open_card(index: int, driver: str) -> Card:
    """Open the kernels of a GPU. Raises UserError if they are missing or compute something else."""
    path, kernels = locate(build.SOURCES)
    functions, facts = ffi.dlopen(str(path)), ffi.new("GpuFacts *")
    fault = functions.gpu_open(driver.encode(), kernels.encode(), index, facts)
    if fault != ffi.NULL:
        raise UserError(f"layout.device = cuda:{index}: {ffi.string(fault).decode()}; {_INSTEAD}")
    card = Card(functions, facts, index)
    for precision, right in KNOWN_ANSWERS.items():
        answer = card.known_answer(precision)
        if answer != right:
            raise UserError(
                f"layout.device = cuda:{index}: the kernels compute {answer:#x} on {card.name} ({card.driver}) where "
                f"{right:#x} is right, so results would differ; {_INSTEAD}"
            )
    return card


def card(index: int = 0) -> Card:
    """Return the GPU of this process. The first call opens it. Raises UserError for a second GPU."""
    if _open.card is None:
        if torch.version.cuda is None:
            raise UserError(f"layout.device = cuda: torch {torch.__version__} was built without CUDA; install another "
                            f"build, or {_INSTEAD}")  # fmt: skip
        _open.card = open_card(index, DRIVER)
        torch.cuda.init()
    if _open.card.index != index:
        raise UserError(f"device cuda:{index}: this process computes on cuda:{_open.card.index}; a process has one GPU")
    return _open.card


def kernels_of(device: torch.device) -> Kernels:
    """Return the kernels that compute on tensors of a device."""
    if device.type == "cuda":
        return card(device.index or 0)
    return library.load()


def torch_device(name: str, rank: int = 0) -> torch.device:
    """Return torch's device for `layout.device`; with `cuda`, process `rank` takes GPU `rank` mod their number."""
    if name == "cpu":
        return CPU
    index = name.partition(":")[2]
    return torch.device("cuda", int(index) if index else rank % device_count(name))


def device_count(name: str) -> int:
    """Return the number of devices that the processes of one machine share with `layout.device`."""
    return max(1, torch.cuda.device_count()) if name == "cuda" else 1
