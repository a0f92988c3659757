"""Weights as files: a model as transformers reads it from a folder, and named tensors as one safetensors file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.numerics.device import state_on_cpu

FILE_BYTES = 5 * 10**9  # as the Hub takes them
FORMAT = {"format": "pt"}  # what transformers wants to read in a file of a model


def write_model(model: PreTrainedModel, folder: Path, original_format: bool = True) -> None:
    """Write a model into a folder that exists, in files of at most FILE_BYTES of weights, but for a larger tensor.

    `original_format`: a mixture's experts as published checkpoints have them. Raises OSError.
    """
    state = state_on_cpu(model)
    model.save_pretrained(folder, state_dict=state, max_shard_size=FILE_BYTES, save_original_format=original_format)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write float32 tensors as a safetensors file, one by one; returns its SHA-256. Raises OSError.

    safetensors holds the whole file in memory. Digested before it is written, so that an error of the disk shows.
    """
    tensors = dict(sorted(tensors.items()))  # the file is a function of what is in it
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"tensor {name} is {tensor.dtype}; files here hold float32")
        begin, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        parts: Iterator[bytes | memoryview] = chain(
            (len(text).to_bytes(8, "little"), text),
            (t.detach().cpu().contiguous().view(-1).numpy().data for t in tensors.values()),
        )
        for part in parts:
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module by name, without gradients; a tied one once."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}
