"""A model as transformers reads it from a folder: config, weights in files of a limited size, and their index.

No process has more than one whole tensor of a divided model at a time. The bytes are those that transformers writes for
one process with all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.numerics.device import state_on_cpu
from ppo_repro.numerics.pieces import Divided
from ppo_repro.numerics.sharding.parts import held_state, parts_of
from ppo_repro.numerics.sharding.tensor_file import FORMAT, lend, write_tensors

WEIGHTS = "model.safetensors"


def write_model(model: PreTrainedModel, folder: Path, file_bytes: int, original_format: bool = True) -> None:
    """Write a model into a folder that exists, in files of at most `file_bytes` of weights, but for a larger tensor.

    `original_format`: a mixture's experts as published checkpoints have them. Where processes divide the model, the
    others call `lend_model` meanwhile. Raises OSError.
    """
    if not parts_of(model).divides:
        state = state_on_cpu(model)
        model.save_pretrained(folder, state_dict=state, max_shard_size=file_bytes, save_original_format=original_format)
        return
    held = held_state(model)
    _write_config(model, folder)
    split = _split(held, file_bytes)
    for name, tensors in split.filename_to_tensors.items():
        write_tensors(folder / name, {tensor: held[tensor] for tensor in tensors}, FORMAT)
    if split.is_sharded:
        numbers = sum(tensor.shape.numel() for tensor in held.values())
        metadata = {"total_parameters": numbers, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{WEIGHTS}.index.json").write_text(text, encoding="utf-8")


def lend_model(model: PreTrainedModel, file_bytes: int) -> None:
    """Give this process's parts of a model while another writes it; nothing where that one has all of it."""
    held = held_state(model)
    for tensors in _split(held, file_bytes).filename_to_tensors.values():
        lend({name: held[name] for name in tensors})


def _split(held: Mapping[str, Tensor | Divided], file_bytes: int) -> StateDictSplit:
    pattern = WEIGHTS.replace(".", "{suffix}.")
    return split_state_dict_into_shards_factory(
        dict(held),
        get_storage_size=lambda tensor: 4 * tensor.shape.numel(),
        filename_pattern=pattern,
        max_shard_size=file_bytes,
    )


def _write_config(model: PreTrainedModel, folder: Path) -> None:
    """As transformers does before it writes the weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
