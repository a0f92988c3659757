"""Any causal model of transformers from a folder, in float32, without code from the folder and without the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from ppo_repro.base.errors import UserError, is_out_of_memory
from ppo_repro.base.output import say, shown
from ppo_repro.models.folder_files import has_tokenizer

FROM_DISK = {"local_files_only": True, "trust_remote_code": False}


def load_model(option: str, folder: Path, device: str) -> PreTrainedModel:
    """Load the model of a folder in evaluation mode. UserError says what is missing or damaged."""
    where = f"{option} {folder}"
    loaded: Any = AutoModelForCausalLM
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, report = loaded.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **FROM_DISK
        )
    except Exception as error:  # configurations and files fail in many ways
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{where}: transformers cannot load it ({shown(str(error))}); save it with save_pretrained"
        ) from error
    for name in sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise UserError(f"{where}: has no tensor {name}; save the model again")
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise UserError(f"{where}: tensor {name} has numbers that are not finite; restore it")
    model.config.pad_token_id = None  # a prompt may hold it, of which transformers would warn
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder; None if it has none that loads, and a line on stderr if there is one."""
    try:
        return AutoTokenizer.from_pretrained(folder, **FROM_DISK)
    except MemoryError:
        raise
    except Exception as error:  # no class for a tokenizer that is missing
        if has_tokenizer(folder):
            why = shown(str(error))
            say(f"--model {folder}: its tokenizer does not load ({why}); causes that need it are left out")
        return None
