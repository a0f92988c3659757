"""Weights as files: a model as transformers reads it from a folder, and named tensors as one safetensors file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.numerics.device import state_on_cpu

FORMAT = {"format": "pt"}  # what transformers wants to read in a file of a model


def write_model(model: PreTrainedModel, folder: Path, file_bytes: int, original_format: bool = True) -> None:
    """Write a model into a folder that exists, in files of at most `file_bytes` of weights, but for a larger tensor.

    `original_format`: a mixture's experts as published checkpoints have them. Raises OSError.
    """
    state = state_on_cpu(model)
    model.save_pretrained(folder, state_dict=state, max_shard_size=file_bytes, save_original_format=original_format)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors as a safetensors file; returns its SHA-256. Raises OSError.

    Digested before it is written, so that an error of the disk shows.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = safetensors.torch.save(on_cpu, None if metadata is None else dict(metadata))
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module by name, without gradients; a tied one once."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}
