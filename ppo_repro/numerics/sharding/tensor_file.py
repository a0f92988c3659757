"""A safetensors file of tensors that one process holds, or several in parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ppo_repro.numerics.pieces import Divided

FORMAT = {"format": "pt"}  # what transformers wants to read in a file of a model


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Divided], metadata: Mapping[str, str] | None = None
) -> str:
    """Write float32 tensors as a safetensors file, one by one; returns its SHA-256. Raises OSError.

    The bytes are those of `safetensors.torch.save_file`. Where processes divide the tensors, the others `lend` theirs.

    The whole file is never in memory, nor more than one tensor of those that processes divide. Digested before it is
    written, so that an error of the disk shows.
    """
    tensors = dict(sorted(tensors.items()))  # the file is a function of what is in it
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        dtype = tensor.piece.dtype if isinstance(tensor, Divided) else tensor.dtype
        if dtype != torch.float32:
            raise ValueError(f"tensor {name} is {dtype}; files here hold float32")
        begin, end = end, end + 4 * tensor.shape.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            digest.update(piece)
            file.write(piece)
        for tensor in tensors.values():
            _write_numbers(tensor, file, digest)
    return digest.hexdigest()


def _write_numbers(tensor: Tensor | Divided, file: BinaryIO, digest: hashlib._Hash) -> None:
    whole = tensor.whole() if isinstance(tensor, Divided) else tensor
    numbers = whole.detach().cpu().contiguous().view(-1).numpy().data
    digest.update(numbers)
    file.write(numbers)


def lend(tensors: Mapping[str, Tensor | Divided]) -> None:
    """Give this process's parts of tensors while another writes them, in its order, and keep nothing of the others'."""
    for _, tensor in sorted(tensors.items()):
        if isinstance(tensor, Divided):
            tensor.whole()
