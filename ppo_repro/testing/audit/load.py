"""Any causal model of transformers from a folder, in float32, without code from the folder and without the network."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import say, shown
from ppo_repro.models.folder_files import check_size, check_weights, has_tokenizer
from ppo_repro.models.load import reading

FROM_DISK = {"local_files_only": True, "trust_remote_code": False}


def load_model(option: str, folder: Path, device: str) -> PreTrainedModel:
    """Load the model of a folder that `check_config` let pass, in evaluation mode. UserError says what is wrong."""
    where = f"{option} {folder}"
    found = check_weights(folder, where)
    loaded: Any = AutoModelForCausalLM
    with reading(where):
        with torch.device("meta"):
            empty = loaded.from_config(AutoConfig.from_pretrained(folder, **FROM_DISK))
        check_size(sum(parameter.numel() for parameter in empty.parameters()), found, where)
        model, report = loaded.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **FROM_DISK
        )
    for name in sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise UserError(f"{where}: has no tensor {name}; save the model again")
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise UserError(f"{where}: tensor {name} has numbers that are not finite; restore it")
    model.config.pad_token_id = None  # a prompt may hold it, of which transformers would warn
    with reading(where), torch.no_grad():  # a value may be wrong only where it is used
        model.eval()(torch.zeros(1, 2, dtype=torch.int64))
    return model.to(device)


def last_matrices(model: PreTrainedModel, others: Mapping[str, PreTrainedModel]) -> dict[str, PreTrainedModel]:
    """Return the model with the output matrix of each of `others` that has the same shape; the rest is shared."""
    found, own = {}, model.get_output_embeddings()
    for name, other in others.items():
        head = other.get_output_embeddings()
        if own is not None and head is not None and head.weight.shape == own.weight.shape:
            found[name] = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
            found[name].set_output_embeddings(head)
    return found


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder; None if it has none that loads, and a line on stderr if there is one."""
    try:
        with reading("its tokenizer"):
            return AutoTokenizer.from_pretrained(folder, **FROM_DISK)
    except UserError as error:  # also if there is no class for a tokenizer that is missing
        if has_tokenizer(folder):
            say(f"--model {folder}: {shown(str(error))}; causes that need it are left out")
        return None
