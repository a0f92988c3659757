"""A CUDA device for torch's CPU build: its tensors lie in memory of the CPU, and are marked.

`use_card(driver)` gives this process a GPU: `torch.device("cuda")`, `.to("cuda")` and torch's factories work as on a
GPU, stock operations compute on the CPU, and the kernels of ppo_repro run over a stand-in for the driver. As on a GPU
an operation over tensors of both devices fails, and so does NumPy over a tensor of the GPU.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppo_repro.numerics import devices
from ppo_repro.numerics.devices import Card

CARD = torch.device("cuda", 0)
_marked: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
_MIXES = {  # operations that take tensors of both devices; of `index` only the indices may be the CPU's
    torch.ops.aten.copy_.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
    torch.ops.aten.set_.source_Tensor,
}


def is_marked(x: Any) -> bool:
    """Tell whether a tensor lies on the GPU."""
    return isinstance(x, Tensor) and x.layout == torch.strided and x.untyped_storage() in _marked


def _mark(x: Tensor) -> Tensor:
    _marked.add(x.untyped_storage())
    return x


class _Move(Function):
    """A copy on the other device, whose gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            moved = x.clone()
        return moved if is_marked(x) else _mark(moved)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Move.apply(gradient)


def _to(x: Tensor, device: torch.device | None) -> Tensor:
    moves = device is not None and device.type in ("cpu", "cuda") and (device.type == "cuda") != is_marked(x)
    return _Move.apply(x) if moves else x


def _converted(x: Tensor, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """Return what `x.to(..)` returns."""
    if args and isinstance(args[0], str | torch.device | Tensor):
        device, *args = args
    if isinstance(device, Tensor):
        kwargs["dtype"] = device.dtype
        device = CARD if is_marked(device) else device.device
    if device is None:
        return x.to(*args, **kwargs)
    device = torch.device(device)
    return _to(x, device).to("cpu" if device.type == "cuda" else device, *args, **kwargs)


class Devices(TorchFunctionMode):
    """Gives functions of torch the device that they are called with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func in (Tensor.device.__get__, Tensor.is_cuda.__get__, Tensor.get_device) and is_marked(first):
            return {Tensor.device.__get__: CARD, Tensor.is_cuda.__get__: True}.get(func, 0)
        if func in (Tensor.numpy, Tensor.__array__) and is_marked(first):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func == Tensor.grad.__set__ and isinstance(args[1], Tensor) and is_marked(first) != is_marked(args[1]):
            raise RuntimeError("a gradient on another device than its tensor")
        if func is Tensor.cpu:
            return _to(first, torch.device("cpu"))
        if func is Tensor.cuda:
            return _to(first, CARD)
        if func is Tensor.to:
            return _converted(*args, **kwargs)
        if func is Tensor.__deepcopy__:
            copied = func(*args, **kwargs)
            return _mark(copied) if is_marked(first) else copied
        if func is torch.nn.functional.one_hot and is_marked(first):  # makes its zeros without a tensor of the GPU
            with torch._C._DisableTorchDispatch():
                return _mark(func(*args, **kwargs))
        if torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return func(*args, **kwargs)
        assert kwargs.get("generator") is None, "a generator of the CPU"
        del kwargs["device"]
        made = func(*args, **kwargs)
        shares = func in (torch.as_tensor, torch.asarray)
        return _to(made, CARD) if shares else _mark(made)


class Places(TorchDispatchMode):
    """Lets an operation compute where its tensors lie, and refuses tensors of both devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_card = [is_marked(x) for x in tensors]
        if any(on_card):
            mixed = any(x.dim() and not there for x, there in zip(tensors, on_card, strict=True))
            if mixed and (func not in _MIXES or (func is not torch.ops.aten.copy_.default and not on_card[0])):
                raise RuntimeError(f"Expected all tensors to be on the same device, {func}")
        out = func(*args, **kwargs)
        if any(on_card) and func is not torch.ops.aten.copy_.default:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    _mark(x)
        return out


def catch_backward(put: Callable[[Any, str, Any], None]) -> None:
    """Let the modes act in a backward pass: torch leaves a mode for the functions that the mode calls."""
    engine = torch.autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with Devices():
            return engine(*args, **kwargs)

    put(torch.autograd, "_engine_run_backward", run)


def current_stream(device: object = None) -> SimpleNamespace:
    """Return the stream of an emulated GPU."""
    return SimpleNamespace(cuda_stream=0)


def use_card(driver: Path) -> Card:
    """Give this process a GPU over a library in place of the driver, until it ends."""
    functions: dict[str, Any] = {
        "init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 0,
        "is_bf16_supported": lambda including_emulation=True: True,
        "current_stream": current_stream,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    catch_backward(setattr)
    # torch compares devices of saved tensors where the modes do not act
    torch.utils.checkpoint._allowed_determinism_checks_to_fns["default"] = lambda _: None
    torch.version.cuda = "emulated"
    devices.DRIVER = str(driver)
    Devices().__enter__()
    Places().__enter__()
    return devices.card()


if __name__ == "__main__":  # the command line with an emulated GPU: DRIVER, then arguments
    from ppo_repro.commands.cli import main

    use_card(Path(sys.argv.pop(1)))
    main()
