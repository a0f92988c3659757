"""Write and read model folders: models, adapters in peft's format, value models, reward models."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import check_sums, whole_folder, write_sums
from ppo_repro.base.mode import Mode, Precision
from ppo_repro.base.output import type_and_message
from ppo_repro.models.folder_files import ADAPTER
from ppo_repro.models.load import load_as
from ppo_repro.models.lora import Lora
from ppo_repro.models.networks import make_policy
from ppo_repro.numerics.families import CLASSIFIERS

VALUE_TENSORS, ADAPTER_TENSORS = "value_model.safetensors", "adapter_model.safetensors"
FILE_BYTES = 5 * 10**9  # as the Hub takes them
_FORMAT = {"format": "pt"}  # what transformers wants to read in a file of a model


def write_model(model: PreTrainedModel, folder: Path, original_format: bool = True) -> None:
    """Write a model into an existing folder, in files with at most FILE_BYTES of weights (or one larger tensor).

    `original_format`: write the experts of a mixture in the format of published checkpoints. Raises OSError.
    """
    state = {name: x.cpu() for name, x in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state, max_shard_size=FILE_BYTES, save_original_format=original_format)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model and its tokenizer as a transformers folder, completely or not at all.

    Raises UserError if that fails.
    """
    with whole_folder(folder) as temporary:
        write_model(model, temporary)
        tokenizer.save_pretrained(temporary)
        write_sums(temporary)


def try_to_save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Save all files of a model except its weights into a temporary folder, because a run saves them at its end.

    Raises UserError, beginning with `where`, if that fails.
    """
    with TemporaryDirectory(prefix="ppo-repro-") as folder:
        try:
            model.config.save_pretrained(folder)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except Exception as error:  # whatever the library and the folder's files do
            reason = type_and_message(error)
            raise UserError(
                f"{where}: could not be saved with the trained weights ({reason}); correct the folder"
            ) from error


def write_sampled(
    policy: PreTrainedModel, end_ids: Collection[int], folder: Path, original_format: bool = True
) -> None:
    """Write the policy with the run's end tokens into an existing folder, for a sampling program.

    A generation configuration is left out, because it may have other end tokens. With `original_format` the experts of
    a mixture have the format of published checkpoints. Raises OSError if the folder cannot be written.
    """
    write_model(policy, folder, original_format)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "eos_token_id": sorted(end_ids)}, indent=1), encoding="utf-8")
    (folder / "generation_config.json").unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write float32 tensors one by one as a safetensors file, and return its SHA-256.

    safetensors would hold the whole file in memory. The digest is of the bytes before writing, so that it reveals
    errors of the disk. Raises OSError if writing fails, ValueError for other dtypes.
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
    """Return the parameters of a module by name, without gradients. Tied parameters appear once."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def save_adapter(lora: Lora, folder: Path, base_model: str) -> None:
    """Write the factors in peft's format into a folder; peft will load W from `base_model`. Raises OSError."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": all(layer.transposed for layer in lora.layers.values()),
        "inference_mode": True,
        "init_lora_weights": True,
    }
    tensors = {f"base_model.model.{name}": factor.cpu().contiguous() for name, factor in lora.factors().items()}
    (folder / ADAPTER).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    safetensors.torch.save_file(tensors, folder / ADAPTER_TENSORS, metadata=_FORMAT)


def save_value_model(parameters: Mapping[str, Tensor], config: PretrainedConfig | None, folder: Path) -> None:
    """Write the parameters of a value model, with the `config` of its trunk, or of a value head (`config` None).

    The folder appears completely or not at all. Raises UserError if that fails.
    """
    with whole_folder(folder) as temporary:
        write_tensors(temporary / VALUE_TENSORS, parameters, _FORMAT)
        if config is not None:
            trunk = copy.deepcopy(config)
            trunk.architectures = None  # a loaded trunk still names the class of the policy's folder
            trunk.save_pretrained(temporary)
        write_sums(temporary)


def load_value_parameters(folder: Path) -> dict[str, Tensor]:
    """Return the parameters that `save_value_model` wrote. Raises UserError if they are missing or damaged."""
    check_sums(folder)
    try:
        return safetensors.torch.load_file(folder / VALUE_TENSORS)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder / VALUE_TENSORS}: cannot be read ({reason}); restore it") from error


def load_reward_model(
    folder: Path, mode: Mode, max_context: int, precision: Precision = "highest"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load reward model and tokenizer of a transformers folder, without code from it and without the network.

    Raises UserError if the class is not in `CLASSIFIERS`, has more than one label, or cannot be read.
    """
    where = f"reward model {folder}"
    model, tokenizer = load_as(folder, AutoModelForSequenceClassification, CLASSIFIERS, where)
    if model.config.num_labels != 1:
        raise UserError(f"{where}: num_labels = {model.config.num_labels}; a reward model has exactly 1")
    return make_policy(model, mode, max_context, precision), tokenizer


def require_same_tokens(policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase) -> None:
    """Raise UserError unless both vocabularies are equal, because the reward model scores token ids, not text."""
    ours, theirs = policy.get_vocab(), reward.get_vocab()
    if ours != theirs:
        token = min(set(ours.items()) ^ set(theirs.items()))[0]
        raise UserError(
            f"the reward model has another tokenizer than the policy: token {token!r} is {ours.get(token)} in the "
            f"policy's and {theirs.get(token)} in the reward model's; use models with the same tokenizer"
        )
