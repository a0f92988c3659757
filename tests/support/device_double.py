"""A second device for machines without a GPU: tensors that say they are on CUDA and compute on the CPU.

Like CUDA tensors they cannot meet tensors of the CPU (numbers without dimensions excepted) and have no NumPy view. So a
missing move to the device, or back, fails here too, and what is computed can be compared with the CPU to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_NAME = "twin"
_MOVES = ("_to_copy", "copy_", "_local_scalar_dense", "equal", "is_same_size")


class OnDevice(Tensor):
    """A tensor that says it is on CUDA; `inner` has its numbers, on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(_NAME, 0), requires_grad=False,
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            twin = OnDevice(self.inner.detach().clone()).requires_grad_(self.requires_grad)
            twin._is_param = getattr(self, "_is_param", False)  # type: ignore[attr-defined]
            memo[id(self)] = twin
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _computed(func, args, kwargs or {})


def _wrap(x: Any) -> Any:
    return OnDevice(x) if isinstance(x, Tensor) and not isinstance(x, OnDevice) else x


def _unwrap(x: Any) -> Any:
    return x.inner if isinstance(x, OnDevice) else x


def _mapped(f: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, (list, tuple)) and type(tree) is not torch.Size:
        return type(tree)(_mapped(f, x) for x in tree)
    return {key: _mapped(f, x) for key, x in tree.items()} if isinstance(tree, dict) else f(tree)


def _tensors(*trees: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(lambda x: found.append(x) if isinstance(x, Tensor) else None, trees)
    return found


def _computed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    tensors = _tensors(args, kwargs)
    own = [x for x in tensors if isinstance(x, OnDevice)]
    if name not in _MOVES and own:
        others = [x for x in tensors if not isinstance(x, OnDevice) and x.dim() > 0]
        is_index = name in ("index", "index_put", "index_put_", "_index_put_impl_")  # CUDA takes indices of the CPU
        if others and not (is_index and all(x is not args[0] and x.dtype in (torch.int64, torch.bool) for x in others)):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two: {func}")
    if name == "sqrt" and own:  # correctly rounded on CUDA; torch's own on a CPU is not
        return OnDevice(torch.from_numpy(np.asarray(np.sqrt(own[0].inner.detach().numpy()))))
    wanted = kwargs.get("device")
    inner_kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if wanted is not None:
        inner_kwargs["device"] = torch.device("cpu")
    out = func(*_mapped(_unwrap, args), **_mapped(_unwrap, inner_kwargs))
    if name == "copy_" or (name.endswith("_") and not name.startswith("_") and isinstance(args[0], Tensor)):
        return args[0]
    if name == "_to_copy" and wanted is not None:
        return _wrap(out) if torch.device(wanted).type == _NAME else out
    is_here = bool(own) if wanted is None else torch.device(wanted).type == _NAME
    return _mapped(_wrap, out) if is_here else out


class _Factories(TorchDispatchMode):
    """Makes tensors that are asked for on CUDA, and moves others there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _computed(func, args, kwargs or {})


@contextmanager
def device_double() -> Iterator[torch.device]:
    """In this block the device exists."""
    if not hasattr(torch, _NAME):  # once in a process
        _setup_privateuseone_for_python_backend(_NAME)
        getattr(torch, _NAME).get_amp_supported_dtype = list  # checkpointing asks, though autocast is off
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a moved parameter stays the same object, as on CUDA
    try:
        with _Factories():
            yield torch.device(_NAME, 0)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
