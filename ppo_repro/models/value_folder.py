"""A trained value model in a folder: safetensors by parameter name, and the configuration of a trunk of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig

from ppo_repro.errors import UserError
from ppo_repro.files import check_sums, whole_folder, write_sums
from ppo_repro.models.networks import ValueModel, make_policy
from ppo_repro.models.write import FORMAT, write_tensors

TENSORS_NAME, CONFIG_NAME = "value_model.safetensors", "config.json"


def save_value_model(parameters: Mapping[str, Tensor], config: PretrainedConfig | None, folder: Path) -> None:
    """Write the parameters of a value model, or of a head on the policy's trunk; `config` of its own trunk.

    The folder appears whole or not at all. UserError where that fails.
    """
    with whole_folder(folder) as temporary:
        write_tensors(temporary / TENSORS_NAME, parameters, FORMAT)
        if config is not None:
            trunk = copy.deepcopy(config)
            trunk.architectures = None  # of a trunk that was loaded, the class of the policy's folder
            trunk.save_pretrained(temporary)
        write_sums(temporary)


def load_value_parameters(folder: Path) -> dict[str, Tensor]:
    """The parameters that `save_value_model` wrote; UserError where they are missing or damaged."""
    check_sums(folder)
    try:
        return safetensors.torch.load_file(folder / TENSORS_NAME)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder / TENSORS_NAME}: cannot be read ({reason}); restore it") from error


def load_value_model(folder: Path, mode: str, max_context: int) -> ValueModel:
    """A value model with a trunk of its own, ready for use in the given numerics.

    UserError where the folder is damaged or holds a head on the policy's trunk, which is no model by itself.
    """
    parameters = load_value_parameters(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{folder}: holds a head on the policy's trunk; put it on the policy of checkpoints/final")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    trunk = AutoModel.from_config(config, trust_remote_code=False).float()
    weight = parameters["head.weight"]
    head = nn.Linear(weight.shape[1], 1)
    stock = ValueModel(trunk, head)
    stock.load_state_dict(parameters)
    return ValueModel(make_policy(trunk, mode, max_context), head)
