"""Reading a transformers model folder, without code from the folder and without the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ppo_repro.disk.folder import check_sums
from ppo_repro.errors import UserError
from ppo_repro.numerics.layers.families import CAUSAL_MODELS

AutoClass = type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification]


def load_folder(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Causal model in float32 and tokenizer of a folder; UserError says what is missing or not supported."""
    return load_as(path, AutoModelForCausalLM, CAUSAL_MODELS, f"model.path = {path}")


def load_as(
    folder: Path, auto_class: AutoClass, classes: Sequence[type[PreTrainedModel]], where: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Float32 model and tokenizer of a folder. UserError, beginning with `where`, unless it is one of `classes`.

    Weights saved in bfloat16 or float16 are float32 numbers too, so they load without rounding.
    """
    saved = read_model_config(folder, classes, where).dtype
    if saved == torch.float64:
        raise UserError(f"{where}: dtype = float64 in its config.json would be rounded; save the model in float32")
    check_sums(folder)
    try:
        loaded: Any = auto_class.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        model, report = loaded
        if type(model) not in classes:  # model_type and architectures of the folder disagree
            raise UserError(f"{where}: loads as {type(model).__name__}; must be one of {_names(classes)}")
        if report["missing_keys"]:  # transformers would fill them with random numbers
            raise UserError(f"{where}: has no tensor {sorted(report['missing_keys'])[0]}; save the model again")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _unreadable(where, error) from error
    for name in ("is_local", "local_files_only"):  # otherwise saved with the tokenizer
        tokenizer.init_kwargs.pop(name, None)
    return model.eval(), tokenizer


def read_model_config(folder: Path, classes: Sequence[type[PreTrainedModel]], where: str) -> PretrainedConfig:
    """The configuration of a model folder, which needs nothing but config.json. UserError as in `load_as`."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{where}: must be a transformers model folder; there is no config.json in it")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(where, error) from error
    architecture = (config.architectures or ["unknown"])[0]
    if architecture not in {c.__name__ for c in classes}:
        raise UserError(f"{where}: architecture {architecture}; must be one of {_names(classes)}")
    return config


def _names(classes: Sequence[type[PreTrainedModel]]) -> str:
    return ", ".join(c.__name__ for c in classes)


def _unreadable(where: str, error: Exception) -> UserError:
    return UserError(f"{where}: cannot be loaded ({' '.join(str(error).split())[:200]})")


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a response: those of the tokenizer and of the generation config. UserError without any."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(declared if isinstance(declared, list) else [declared]) | {tokenizer.eos_token_id}
    end_tokens = frozenset(int(i) for i in ids if i is not None)
    if not end_tokens:
        raise UserError("the model has no end token: set eos_token_id in its tokenizer or generation config")
    return end_tokens


def input_files(path: Path) -> list[Path]:
    """The files of a model folder that decide what is loaded; none if there is no folder, which loading refuses."""
    if not path.is_dir():
        return []
    return sorted(p for p in path.iterdir() if p.suffix in {".json", ".safetensors", ".jinja", ".model", ".txt"})
